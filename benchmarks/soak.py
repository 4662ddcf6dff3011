"""Thousands of refits of the demo's model with the optimizer stepping between: nothing may grow (``make soak``).

One process: the model trains, two publishers offer half of its rows each, two tensor-parallel ranks of the demo's
engine refit together, with the service in the process or (``--grpc``) behind a socket. After every refit each rank's
parameters equal, bit for bit, what its own loader makes of the trained tensors; what the process holds (see `Usage`)
is counted along the way.

    python -m benchmarks.soak [--refits 2000] [--layers 4] [--transport memory] [--grpc] [--batch-kib 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver

TIMEOUT_S = 60.0
N_TRAINERS = 2
N_RANKS = 2


@dataclass(frozen=True)
class Usage:
    """What the process holds.

    Attributes
    ----------
    rss_mib
        Resident memory, anonymous, of files and shared.
    objects
        Python objects that the garbage collector knows, without timers that were cancelled: asyncio keeps up to a
        hundred of them, each with its context, and lets all go at once.
    descriptors, threads
        Of files, sockets and the like; of Python.
    shared_mappings, shared_mib
        Mappings of shared memory, and how much address space they take.
    shared_files
        Entries of /dev/shm that this process has open.
    registrations, peers, prepared_lists
        Of all transports: registered regions, connections, and lists of rows made ready to be read.
    leases, versions, transactions
        That the service knows.
    """

    rss_mib: float
    objects: int
    descriptors: int
    threads: int
    shared_mappings: int
    shared_mib: float
    shared_files: int
    registrations: int
    peers: int
    prepared_lists: int
    leases: int
    versions: int
    transactions: int


TOLERATED: Mapping[str, tuple[float, float]] = {"rss_mib": (0.02, 8.0), "objects": (0.0, 50.0)}
"""What may be more in the last third of the samples than in the first: a share, and so much. Nothing, of all others."""
WARM_UP = 150
"""Refits after which the caches that are bounded (of 64 versions, of 256 parts of their slots) are full."""


def sampled(n_refits: int) -> list[int]:
    """After which refits it is counted: from the end of the warm-up on, some twenty times, and at the end."""
    every = max(1, (n_refits - WARM_UP) // 20)
    return sorted({*range(WARM_UP, n_refits, every), n_refits})


def grown(samples: Sequence[Usage]) -> dict[str, tuple[float, float]]:
    """What grew from the first third of the samples to the last, with the least that each of them saw.

    A call that has not quite ended holds objects, descriptors and memory for a moment, and so makes one sample or
    another larger; what leaks is in all that follow.
    """
    third = max(1, len(samples) // 3)
    found: dict[str, tuple[float, float]] = {}
    for name in asdict(samples[0]):
        before, after = (min(getattr(usage, name) for usage in part) for part in (samples[:third], samples[-third:]))
        share, more = TOLERATED.get(name, (0.0, 0.0))
        if after > before * (1 + share) + more:
            found[name] = (before, after)
    return found


class Soak:
    """The trainer, the publishers and the ranks."""

    def __init__(self, layers: int, transport: str, batch_bytes: int, *, grpc: bool = False) -> None:
        import torch

        from reshard.refit.adapters.torch_dtensor import local_tensors
        from reshard.refit.adapters.transformers_names import CheckpointNames
        from reshard.refit.demo import models
        from reshard.refit.demo.engine import ReferenceModel, TensorParallel
        from reshard.refit.demo.settings import DemoSettings
        from reshard.refit.engines.loader import LoaderEngine
        from reshard.refit.publisher import Publisher
        from reshard.refit.receiver import Receiver
        from reshard.rendezvous import Rendezvous
        from reshard.transports import open_transport

        torch.set_num_threads(1)
        self.torch, self._local = torch, local_tensors
        self.kept = models.serving_dtype
        settings = DemoSettings(layers=layers)
        config = models.build_config(settings)
        self.model = models.build_model(config)
        self.vocabulary = config.vocab_size
        self.names = CheckpointNames.of_model(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.server = None
        if grpc:
            from reshard.rendezvous.service import serve

            self.server = serve(listen="127.0.0.1:0")
        self.rendezvous = Rendezvous.connect(self.server.address) if self.server else Rendezvous.in_process()
        slots = [f"trainer-{i}" for i in range(N_TRAINERS)]
        members = [f"tp{i}" for i in range(N_RANKS)]
        self.transports = [open_transport(transport) for _ in range(N_TRAINERS + N_RANKS)]
        self.publishers = [
            Publisher(
                self.transports[i],
                self.rendezvous,
                model="soak",
                slot=slots[i],
                slots=slots,
                wire_dtype="bfloat16",
                wire_dtype_exceptions=models.KEPT_IN_FLOAT32,
            )
            for i in range(N_TRAINERS)
        ]
        shape = models.model_shape(config)
        self.engines = [ReferenceModel(shape, TensorParallel(r, N_RANKS), torch.bfloat16) for r in range(N_RANKS)]
        self.expected = [ReferenceModel(shape, TensorParallel(r, N_RANKS), torch.bfloat16) for r in range(N_RANKS)]
        self.receivers = [
            Receiver(
                self.transports[N_TRAINERS + r],
                self.rendezvous,
                LoaderEngine(self.engines[r].module, load_weights=self.engines[r].load_weights),
                model="soak",
                group="g",
                members=members,
                member=members[r],
                require_full_coverage=True,
            )
            for r in range(N_RANKS)
        ]
        for receiver in self.receivers:
            receiver.reader.batch_bytes = batch_bytes

    def train(self, step: int) -> None:
        """One optimizer step on random tokens."""
        torch = self.torch
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.vocabulary, (1, 16), generator=generator)
        self.optimizer.zero_grad(set_to_none=True)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def cycle(self, step: int) -> None:
        """Publish, refit, compare."""
        from reshard.planner.errors import ReshardError
        from reshard.refit.tensors import LocalTensor

        held = self.names.apply(self._local(self.model))
        for i, publisher in enumerate(self.publishers):
            mine = []
            for t in held:
                rows = t.shape[0]
                first, last = rows * i // N_TRAINERS, rows * (i + 1) // N_TRAINERS
                if last > first:
                    start = (first, *(0,) * (len(t.shape) - 1))
                    mine.append(LocalTensor(t.name, t.dtype, t.shape, start, t.data[first:last]))
            publisher.publish(epoch=0, step=step, tensors=mine, timeout_s=TIMEOUT_S)
        errors: list[Exception] = []

        def one(receiver: Receiver) -> None:
            try:
                report = receiver.refit(step, timeout_s=TIMEOUT_S)
                if report.cold != (step == 0) or (step and report.new_registrations):
                    raise AssertionError(f"step {step}: a warm refit planned or registered: {report}")
            except (ReshardError, AssertionError) as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(r,)) for r in self.receivers]
        for t in threads:
            t.start()
        for t in threads:
            t.join(2 * TIMEOUT_S)
        if any(t.is_alive() for t in threads):
            raise AssertionError(f"step {step}: a refit has not come back {2 * TIMEOUT_S} s after it began")
        if errors:
            raise errors[0]
        published = [(t.name, t.data.detach().to(self.kept(t.name))) for t in held]  # type: ignore[union-attr]
        for engine, expected in zip(self.engines, self.expected, strict=True):
            expected.load_weights(published)
            wanted = dict(expected.named_parameters())
            for name, parameter in engine.named_parameters():
                if not self.torch.equal(parameter, wanted[name]):
                    raise AssertionError(
                        f"step {step}: {name} differs from what the loader makes of the trained tensors"
                    )

    def usage(self) -> Usage:
        """Count everything that could grow."""
        known = self.rendezvous.describe()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        shared = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:" in line or "/dev/shm" in line
        ]
        files = [os.readlink(f"/proc/self/fd/{name}") for name in _descriptors()]
        lists = [row for r in self.receivers for bound in r.reader.bound() for row in bound.lists()]
        return Usage(
            rss_mib=round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1),
            objects=_objects(),
            descriptors=len(files),
            threads=threading.active_count(),
            shared_mappings=len(shared),
            shared_mib=round(sum(last - first for first, last in shared) / (1 << 20), 3),
            shared_files=sum(name.startswith("/dev/shm/") for name in files),
            registrations=sum(len(t._ledger.all_entries()) for t in self.transports),  # type: ignore[attr-defined]
            peers=sum(len(t._peers) for t in self.transports),  # type: ignore[attr-defined]
            prepared_lists=len(lists),
            leases=len(known.leases),
            versions=len(known.versions),
            transactions=len(known.transactions),
        )

    def close(self) -> None:
        for r in self.receivers:
            r.close()
        for p in self.publishers:
            p.close()
        for t in self.transports:
            t.close()
        self.rendezvous.close()
        if self.server is not None:
            self.server.close()


def _objects() -> int:
    known = gc.get_objects()
    return len(known) - 2 * sum(type(o) is asyncio.TimerHandle and o.cancelled() for o in known)


def _descriptors() -> list[str]:
    """Open descriptors, without the one of the folder that they are listed from."""
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if anything grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refits", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--transport", default="memory")
    parser.add_argument("--grpc", action="store_true", help="the service behind a socket")
    parser.add_argument(
        "--batch-kib", type=int, default=64, help="small, so that cells are verified while more is read"
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.refits <= WARM_UP:
        parser.error(f"--refits {options.refits}: expected over {WARM_UP}, from when on nothing may grow")
    soak = Soak(options.layers, options.transport, options.batch_kib << 10, grpc=options.grpc)
    soak.usage()  # the endpoint message of a receiver's transport starts what serves it, once
    due = sampled(options.refits)
    texts: list[str] = []  # of the samples: what is counted must not grow by being counted
    since = time.monotonic()
    try:
        for step in range(options.refits):
            soak.train(step)
            soak.cycle(step)
            if step + 1 in due:
                usage = soak.usage()
                texts.append(json.dumps(asdict(usage)))
                print(f"{step + 1:6} refits, {time.monotonic() - since:7.1f} s: {usage}", flush=True)
    finally:
        soak.close()
    samples = [Usage(**json.loads(text)) for text in texts]
    more = grown(samples)
    print(f"{options.refits} refits, every version's bytes equal; " + (f"grown: {more}" if more else "nothing grew"))
    if options.json is not None:
        rows = [{"refits": n, **asdict(usage)} for n, usage in zip(due, samples, strict=True)]
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
