"""Thousands of refits of the demo's model with the optimizer stepping between: nothing may grow (``make soak``).

One process: the model trains, two publishers offer half of its rows each, two tensor-parallel ranks of the demo's
engine refit together. After every refit each rank's parameters equal, bit for bit, what its own loader makes of the
trained tensors; memory, file descriptors, threads, mappings, registered regions, prepared lists and leases are
counted along the way.

    python -m benchmarks.soak [--refits 2000] [--layers 4] [--transport memory] [--batch-kib 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
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
    """What the process holds."""

    rss_mib: float
    descriptors: int
    threads: int
    shared_mappings: int
    endpoint_bytes: int
    prepared_lists: int
    leases: int


class Soak:
    """The trainer, the publishers and the ranks."""

    def __init__(self, layers: int, transport: str, batch_bytes: int) -> None:
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
        self.rendezvous = Rendezvous.in_process()
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
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        maps = Path("/proc/self/maps").read_text()
        return Usage(
            round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            sum("memfd:" in line or "/dev/shm" in line for line in maps.splitlines()),
            sum(len(t.endpoint()) for t in self.transports),
            sum(len(list(bound.lists())) for r in self.receivers for bound in r.reader.bound()),
            len(self.rendezvous.describe().leases),
        )

    def close(self) -> None:
        for r in self.receivers:
            r.close()
        for p in self.publishers:
            p.close()
        for t in self.transports:
            t.close()
        self.rendezvous.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if anything grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refits", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--transport", default="memory")
    parser.add_argument(
        "--batch-kib", type=int, default=64, help="small, so that cells are verified while more is read"
    )
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    soak = Soak(options.layers, options.transport, options.batch_kib << 10)
    warm_up = max(10, options.refits // 10)
    soak.usage()  # the endpoint message of a receiver's transport starts what serves it, once
    samples: list[tuple[int, Usage]] = []
    since = time.monotonic()
    try:
        for step in range(options.refits):
            soak.train(step)
            soak.cycle(step)
            is_due = step + 1 >= warm_up and (step + 1 - warm_up) % max(1, options.refits // 20) == 0
            if is_due or step + 1 == options.refits:
                samples.append((step + 1, soak.usage()))
                print(f"{step + 1:6} refits, {time.monotonic() - since:7.1f} s: {samples[-1][1]}", flush=True)
    finally:
        soak.close()
    first, last = samples[0][1], samples[-1][1]
    grown = {
        name: (before, after)
        for name, before in asdict(first).items()
        if (after := asdict(last)[name]) > (before * 1.02 + 8 if name == "rss_mib" else before)
    }
    print(f"{options.refits} refits, every version's bytes equal; " + (f"grown: {grown}" if grown else "nothing grew"))
    if options.json is not None:
        options.json.write_text(json.dumps([{"refits": n, **asdict(u)} for n, u in samples], indent=1))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
