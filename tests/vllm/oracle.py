"""Installs by the read table and compares, element for element, with vLLM's own loader on real tensors.

python -m tests.vllm.oracle CASES.json: one line of JSON a case. A case says which model, which rank of which parallel
layout, and whether it is small (built on the CPU twice: loaded by its loader, and written by executing our requests) or
of full size (on the meta device: coverage only).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.vllm.dry import Case, built, rank_of


def main(path: str) -> None:
    os.environ |= {"VLLM_PLUGINS": ""}
    for arguments in json.loads(Path(path).read_text()):
        name, names = arguments.pop("name"), arguments.pop("tensors")
        meta = arguments.pop("meta", False)
        try:
            found = on_meta(Case(**arguments), names) if meta else compared(Case(**arguments), names)
        except Exception as error:  # the test says it
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"name": name, **found}), flush=True)


def compared(case: Case, tensors: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, Any]:
    """Coverage, and parameters in which the two differ."""
    import torch

    from reshard.planner import Holder, PlanOptions, Shard, ShardPart, ShardTable, plan
    from reshard.planner.execute import execute
    from reshard.refit.engines.vllm import VllmEngine
    from reshard.refit.tensors import SourceTensor

    real = {name: coded(number, dtype, tuple(shape)) for number, (name, dtype, shape) in enumerate(tensors)}
    with rank_of(case) as config, torch.no_grad():
        model = built(config, "cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            raw = tensor.data.view(torch.uint8) if tensor.is_contiguous() and tensor.dim() else None
            if raw is not None and tensor.is_floating_point():
                raw.zero_()
        engine = VllmEngine(model, model_config=config.model_config)
        manifest = [SourceTensor(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
        started = time.perf_counter()
        captured = engine.capture(manifest)
        capture_s = time.perf_counter() - started
        shards, blobs, at = [], [], 0
        for name, dtype, shape in tensors:
            raw = real[name].reshape(-1).view(torch.uint8).numpy()
            shards.append(Shard(name, dtype, tuple(shape), (0,) * len(shape), tuple(shape), 0, at))
            blobs.append(raw)
            at += raw.nbytes
        table = ShardTable([ShardPart.from_shards(Holder("h"), shards, [at])])
        made = plan(table, captured.reads, PlanOptions())
        buffers = {
            n: np.zeros(int(b), np.uint8) for n, b in zip(made.buffers.names_list, made.buffer_bytes, strict=True)
        }
        execute(made, {"h": [np.concatenate(blobs)]}, list(buffers.values()))
        if captured.materialised:
            staged = {n: real[n].reshape(-1).view(torch.uint8).numpy().copy() for n in captured.materialised}
            engine.load_materialised(staged, {n: buffers[n] for n in captured.loader_buffers})
        model.load_weights(iter(real.items()))
        written = {n: b for n, b in buffers.items() if n in engine._places}
        return {
            "tensors": len(tensors),
            "copies": captured.n_copies,
            "consumed": len(captured.consumed),
            "materialised": len(captured.materialised),
            "capture_s": round(capture_s, 3),
            "compared_bytes": sum(b.nbytes for b in written.values()),
            "parameter_bytes": sum(p.nbytes for p in engine.parameters()),
            "never_written": sorted({p.name for p in engine.parameters()} - written.keys()),
            "differing": differing(engine, written),
        }


def differing(engine: Any, written: Mapping[str, np.ndarray]) -> list[str]:
    import torch

    wrong = []
    for name, raw in written.items():
        place = engine._places[name]
        site = place.sites[0]
        live = getattr(site.layer, site.attribute).data
        shown = place.place.view_of(raw, live)
        if not torch.equal(shown.contiguous().view(torch.uint8), live.contiguous().view(torch.uint8)):
            wrong.append(name)
    return wrong


def coded(number: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Every element tells which it is: consecutive bit patterns that are finite, from a start of its own a tensor."""
    import torch

    kind = getattr(torch, dtype)
    n = int(np.prod(shape, dtype=np.int64))
    if kind.itemsize == 1:
        return ((torch.arange(n) * 7 + number * 13) % 0x78).to(torch.uint8).view(kind).view(shape)
    if kind.itemsize == 2:
        return ((torch.arange(n) + number * 2741) % 0x7F00).to(torch.int16).view(kind).view(shape)
    return (torch.arange(n, dtype=torch.float64) / 4 + number).to(kind).view(shape)


def on_meta(case: Case, tensors: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, Any]:
    from reshard.refit.engines.vllm import VllmEngine
    from reshard.refit.tensors import SourceTensor

    with rank_of(case) as config:
        model = built(config, "meta")
        engine = VllmEngine(model, model_config=config.model_config)
        started = time.perf_counter()
        captured = engine.capture([SourceTensor(name, dtype, tuple(shape)) for name, dtype, shape in tensors])
        capture_s = time.perf_counter() - started
        parameters = engine.parameters()
        return {
            "tensors": len(tensors),
            "copies": captured.n_copies,
            "consumed": len(captured.consumed),
            "materialised": len(captured.materialised),
            "capture_s": round(capture_s, 3),
            "requested_bytes": captured.reads.requested_bytes,
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "never_written": sorted({p.name for p in parameters} - set(captured.reads.buffers.names_list)),
        }


if __name__ == "__main__":
    main(*sys.argv[1:])
