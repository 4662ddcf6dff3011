"""Captures a model of full size on the meta device with vLLM's real class; prints what it took as one JSON line.

python -m tests.vllm.meta_capture CONFIGURATION_FOLDER CHECKPOINT_NAMES.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(folder: str, names: str) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from reshard.planner import Holder, PlanOptions, Shard, ShardPart, ShardTable
    from reshard.refit.engines.vllm import VllmEngine
    from reshard.refit.planning import Gate, plan_refit
    from reshard.refit.tensors import SourceTensor

    arguments = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        store = Path(folder) / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = initialize_model(config)
        torch.set_default_dtype(torch.float32)
        manifest = [SourceTensor(name, "bfloat16", tuple(shape)) for name, shape in json.loads(Path(names).read_text())]
        engine = VllmEngine(model, model_config=config.model_config)
        started = time.perf_counter()
        captured = engine.capture(manifest)
        captured_s = time.perf_counter() - started
        shards, at = [], 0
        for s in manifest:
            shards.append(Shard(s.name, s.dtype, s.shape, (0,) * len(s.shape), s.shape, 0, at))
            nbytes = 2
            for n in s.shape:
                nbytes *= n
            at += nbytes
        table = ShardTable([ShardPart.from_shards(Holder("trainer"), shards, [at])])
        started = time.perf_counter()
        planned = plan_refit(
            captured,
            table,
            engine.parameters(),
            PlanOptions(),
            gate=Gate(True, 1.0),
            rank=0,
            topology=b"",
        )
        record = planned.coverage
    print(
        json.dumps(
            {
                "tensors": len(manifest),
                "copies": captured.n_copies,
                "materialised": list(captured.materialised),
                "unconsumed": len({s.name for s in manifest} - captured.consumed),
                "coverage_pct": record.coverage_pct,
                "never_written": list(record.params_never_written_sample),
                "engine_bytes": record.engine_bytes,
                "wire_bytes": record.planned_wire_bytes,
                "capture_s": round(captured_s, 3),
                "plan_s": round(time.perf_counter() - started, 3),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
