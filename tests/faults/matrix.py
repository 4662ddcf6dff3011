"""Every step of a refit x everything that can go wrong in it, over real processes (``make faults``).

After each combination: every survivor serves entirely the old or entirely the new version, or says that it serves
nothing (and the old one, where the group had not yet decided); no two ranks of the group have served different versions
at any moment; survivors have given their leases back, and none is left; nobody is connected to a trainer that died; the
next refit succeeds. Where the fault must be felt, somebody's error says so.

A *network stall* holds back all traffic with the service (a proxy between it and everybody else) and stops one
trainer's process, so that neither questions nor, over nixl and TCP, reads are answered; *server silent* holds it back
for longer than the refit has.

    python -m tests.faults.matrix [--install shadow|stream ...] [--transport memory|nixl|ucx] [--steps STEP ...]
                                  [--only STEP:FAULT ...] [--jobs N] [--times N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.combinations import STEPS, Combination, combinations
from tests.faults.ranks import GROUP, MODEL
from tests.faults.trial import Outcome, Trial

from reshard.refit.demo.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "UCX_TLS": "tcp",  # over shared memory a stopped process can be read
}
_MODULES = ("numpy", "grpc", "tests.faults.ranks", "reshard.transports.memory", "reshard.refit.attempt")


def run(
    chosen: Sequence[Combination],
    folder: Path,
    report: Callable[[Outcome], None] = lambda outcome: None,
    *,
    jobs: int = 1,
) -> list[Outcome]:
    """Run combinations, ``jobs`` of them at a time: most of a trial is waiting. Outcomes are in the order given."""
    waiting: queue.SimpleQueue[tuple[int, Combination]] = queue.SimpleQueue()
    for row in enumerate(chosen):
        waiting.put(row)
    done: dict[int, Outcome] = {}
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work(name: str) -> None:
        logs = folder / name
        logs.mkdir()
        try:
            with Supervisor(_MODULES, logs, environment=ENVIRONMENT) as supervisor:
                while not failures:
                    try:
                        number, combination = waiting.get_nowait()
                    except queue.Empty:
                        return
                    outcome = Trial(supervisor, number, combination).run()
                    with lock:
                        done[number] = outcome
                        report(outcome)
        except BaseException as error:  # raised below, in the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"job-{i}",)) for i in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [done[number] for number in range(len(chosen))]


def problems(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """By combination, what did not hold."""
    return {str(o.combination): o.problems for o in outcomes if o.problems}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", nargs="+", choices=("shadow", "stream"), default=["shadow"])
    parser.add_argument("--transport", choices=("memory", "nixl", "ucx"), default="memory")
    parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS)
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP:FAULT")
    parser.add_argument("--jobs", type=int, default=1, help="combinations at a time")
    parser.add_argument("--times", type=int, default=1, help="how often each is tried")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.times < 1:
        parser.error(f"--jobs {options.jobs} --times {options.times}: expected 1 or more")
    every = [c for mode in options.install for c in combinations(mode, options.transport) if c.step in options.steps]
    chosen = [c for c in every if not options.only or f"{c.step}:{c.fault}" in options.only] * options.times
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: no such combination")

    def show(outcome: Outcome) -> None:
        if outcome.skipped:
            print(f"skip  {outcome.combination!s:40} {outcome.skipped}")
            return
        mark = "FAIL" if outcome.problems else "ok"
        states = ", ".join(f"{n}: {outcome.results.get(n, '-')} -> {s}" for n, s in outcome.states.items())
        print(f"{mark:5} {outcome.combination!s:40} {outcome.seconds:5.1f} s  {states}", flush=True)
        for problem in outcome.problems:
            print(f"      {problem}")

    with tempfile.TemporaryDirectory(prefix="reshard-faults-") as folder:
        outcomes = run(chosen, Path(folder), show, jobs=options.jobs)
    tried = [o for o in outcomes if not o.skipped]
    failed = [o for o in tried if o.problems]
    print(f"{len(tried)} combinations tried, {len(outcomes) - len(tried)} skipped with a reason, {len(failed)} failed")
    if options.json is not None:
        rows = [asdict(o) for o in outcomes]
        options.json.write_text(json.dumps({"model": MODEL, "group": GROUP, "combinations": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
