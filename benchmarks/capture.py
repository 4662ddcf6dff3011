"""Capture of a Qwen3-30B-shaped model with vLLM's own class, side by side with ModelExpress 0.7.0.

    python -m benchmarks.capture [--rounds N] [--results FILE]

Needs vLLM and ModelExpress (`make bench-capture`); everything is on the meta device, nothing is allocated.

1. Ours is `VllmEngine(model)` and `capture`: from the names and shapes that a trainer publishes to a checked read
   table.
2. ModelExpress's is its receiver's own `_capture`: a meta twin of the model and `capture_geometry` on it. Its copies
   still name chains of operations, which its planner replays; `resolve_slice` of each is shown apart.
3. Both run in one process, in turn, after one round that is not counted. That both saw the same copies is checked,
   each box and each destination, before anything is reported.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Section, fmt, write_section
from benchmarks.vllm_models import QWEN3_30B, meta_model
from benchmarks.workloads import specs

from reshard.refit.engine import Captured
from reshard.refit.engines.vllm import VllmEngine
from reshard.refit.tensors import SourceTensor

MODEL = "qwen3-30b-a3b"
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
Copy = tuple[str, str, tuple[tuple[int, int], ...], int, tuple[int, ...]]
"""Source, destination, box, first element of the destination, its strides by source dim (0 where one element wide)."""


@dataclass(frozen=True)
class Round:
    """Seconds of one round."""

    ours_s: float
    twin_s: float
    geometry_s: float
    resolve_s: float

    @property
    def theirs_s(self) -> float:
        """Its whole `_capture`."""
        return self.twin_s + self.geometry_s


@dataclass(frozen=True)
class Both:
    """One round: how long it took, and what either side saw."""

    round: Round
    ours: set[Copy]
    theirs: set[Copy]
    captured: Captured


def one_round(model: Any, config: Any, manifest: Sequence[SourceTensor]) -> Both:
    import torch
    from modelexpress.engines.vllm.refit.receiver import VllmReshardReceiver
    from modelexpress.refit.reshard.geometry import capture_geometry
    from modelexpress.refit.reshard.slice_plan import resolve_slice
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    gc.collect()
    begin = time.perf_counter()
    captured = VllmEngine(model, model_config=config.model_config).capture(manifest)
    ours_s = time.perf_counter() - begin

    published = [(s.name, torch.bfloat16, s.shape) for s in manifest]
    receiver = VllmReshardReceiver.__new__(
        VllmReshardReceiver
    )  # without NIXL and its service, which capture does not use
    receiver._model, receiver._vllm_config, receiver._model_config = model, config, config.model_config
    gc.collect()
    begin = time.perf_counter()
    twin = receiver._build_meta_twin()
    built = time.perf_counter()
    geometry = capture_geometry(twin, published, default_weight_loader=default_weight_loader)
    seen = time.perf_counter()
    shapes = {name: shape for name, _, shape in published}
    resolved = [resolve_slice(copy, shapes[copy.src_name]) for copy in geometry.copies]
    end = time.perf_counter()
    if geometry.unsupported or geometry.unattributed:
        raise RuntimeError(f"ModelExpress gave up on {len(geometry.unsupported)} sources: not the same work")
    theirs = {
        (
            copy.src_name,
            copy.param_name,
            tuple(box),
            copy.dest_offset,
            tuple(s if stop - start > 1 else 0 for s, (start, stop) in zip(strides, box, strict=True)),
        )
        for copy, (box, strides) in zip(geometry.copies, resolved, strict=True)
    }
    return Both(Round(ours_s, built - begin, seen - built, end - seen), copies_of(captured), theirs, captured)


def copies_of(captured: Captured) -> set[Copy]:
    """Our read table in the same words."""
    reads = captured.reads
    found: set[Copy] = set()
    for row in range(len(reads)):
        tensor = int(reads.tensor_id[row])
        dims = range(reads.n_dims - int(reads.tensors.ndim[tensor]), reads.n_dims)
        if any(int(reads.step[d][row]) != 1 for d in dims):
            raise RuntimeError(f"{reads.where(row)} is stepped")
        box = tuple((int(reads.start[d][row]), int(reads.start[d][row] + reads.count[d][row])) for d in dims)
        strides = tuple(
            int(reads.dst_stride[d][row]) if stop - start > 1 else 0 for d, (start, stop) in zip(dims, box, strict=True)
        )
        source, destination = reads.names_of(row)
        found.add((source, destination, box, int(reads.dst_offset[row]), strides))
    return found


def measure(rounds: int) -> Section:
    manifest = [SourceTensor(s.name, "bfloat16", s.shape) for s in specs(MODEL)]
    with meta_model(QWEN3_30B) as (model, config):
        taken = []
        for number in range(rounds + 1):
            both = one_round(model, config, manifest)
            differing = both.ours ^ both.theirs
            if differing:
                raise RuntimeError(f"{len(differing)} copies differ, such as {sorted(differing)[:4]}")
            if number:
                taken.append(both.round)
        captured = both.captured
        engine = VllmEngine(model, model_config=config.model_config)
        engine_bytes = sum(p.nbytes for p in engine.parameters())
    written = captured.reads.requested_bytes
    if len(captured.consumed) != len(manifest) or captured.materialised or written != engine_bytes:
        raise RuntimeError(
            f"{written} of {engine_bytes} bytes from {len(captured.consumed)} sources: not the whole model"
        )
    ours_s = statistics.median(r.ours_s for r in taken)
    theirs_s = statistics.median(r.theirs_s for r in taken)
    geometry_s = statistics.median(r.geometry_s for r in taken)
    resolved_s = statistics.median(r.theirs_s + r.resolve_s for r in taken)
    section = Section("Capture of Qwen3-30B-A3B with vLLM's class")
    section.text(
        f"{len(manifest):,} tensors, {len(both.ours):,} copies, the same on both sides; {written:,} of "
        f"{engine_bytes:,} bytes written, coverage {100 * written / engine_bytes:.4f} %; medians of {rounds}."
    )
    section.table(
        ["against", "ours, s", "ModelExpress, s", "ours / theirs", "at most"],
        [
            ["its `_capture` (twin and `capture_geometry`)", fmt(ours_s), fmt(theirs_s), fmt(ours_s / theirs_s), "0.5"],
            ["`capture_geometry` alone", fmt(ours_s), fmt(geometry_s), fmt(ours_s / geometry_s), "-"],
            ["and boxes (`resolve_slice`), as ours has", fmt(ours_s), fmt(resolved_s), fmt(ours_s / resolved_s), "-"],
        ],
    )
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    os.environ.update(SETTINGS)
    section = measure(given.rounds)
    import torch
    import vllm

    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}, "
        f"vLLM {vllm.__version__}; load average {os.getloadavg()[0]:.1f} at the end."
    )
    print(machine, section.markdown(), sep="\n\n")
    if given.results:
        write_section(given.results, "capture", "Capture", machine, [section])


if __name__ == "__main__":
    main()
