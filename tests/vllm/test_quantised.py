"""A quantised vLLM engine that was refitted with another checkpoint's tensors says what one started from it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import TRANSPORT, Site, all_ask, answer
from tests.vllm.models import config_of


def scheme(kind: str, form: str) -> dict[str, Any]:
    """A scale for each row of a weight, and one for each token of the activations."""
    how = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = how | {"strategy": "channel", "dynamic": False}
    activations = how | {"strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}


SCHEMES = {"int8": scheme("int", "int-quantized"), "fp8": scheme("float", "float-quantized")}


def checkpoint(folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """A Llama in int8 or fp8: saved, and its tensors."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    config = config_of("llama")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "_proj" not in name:
            tensors[name] = tensor.to(torch.bfloat16)
            continue
        largest = tensor.abs().amax(dim=1, keepdim=True)
        if kind == "int8":
            scale = largest / 127
            tensors[name] = torch.round(tensor / scale).to(torch.int8)
        else:
            scale = largest / torch.finfo(torch.float8_e4m3fn).max
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": SCHEMES[kind]}))
    return tensors


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SCHEMES)
def test_quantised_weights_with_scales_are_refitted(site: Site, kind: str) -> None:
    from reshard.refit.publisher import Publisher
    from reshard.refit.tensors import LocalTensor
    from reshard.rendezvous import Rendezvous
    from reshard.transports import open_transport

    checkpoint(site.folder / "first", kind, 1)
    engine = site.engine(site.folder / "first", refits=True)
    said = [answer(engine)]
    with (
        Rendezvous.connect(site.rendezvous) as service,
        open_transport(TRANSPORT) as wire,
        Publisher(wire, service, model="policy", slot="all", slots=["all"]) as publisher,
    ):
        epoch = publisher.open_epoch(kind)
        engine.ask("init", info=site.info())
        for step in (1, 2):
            tensors = checkpoint(site.folder / f"step-{step}", kind, 1 + step)
            publisher.publish(
                epoch=epoch,
                step=step,
                tensors=[
                    LocalTensor(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), (0,) * t.dim(), t)
                    for n, t in tensors.items()
                ],
                timeout_s=60,
            )
            engine.ask("refit", info={"step": step, "timeout_s": 60.0})
            said.append(answer(engine))
    site.end(engine)
    assert len({str(tokens) for tokens, _ in said}) == 3, "other weights say the same, so equal answers prove nothing"
    for step in (1, 2):
        assert said[step] == site.answer_of(site.folder / f"step-{step}"), f"step {step}"


@pytest.mark.timeout(900)
def test_weights_that_vllm_quantises_itself_are_refitted(site: Site) -> None:
    """bfloat16 from the trainer, int8 in the engine: each install quantises anew."""
    online = {"quantization": "int8_per_channel_weight_only"}
    trainers = site.trainers("llama", n=1)
    all_ask(trainers, "save", folder=str(site.folder / "first"))
    engine = site.engine(site.folder / "first", refits=True, **online)
    before = answer(engine)
    engine.ask("init", info=site.info())
    all_ask(trainers, "train", step=1)
    all_ask(trainers, "publish", step=1)
    all_ask(trainers, "save", folder=str(site.folder / "step-1"))
    engine.ask("refit", info={"step": 1, "timeout_s": 60.0})
    said = answer(engine)
    site.end(engine, *trainers)
    assert said[0] != before[0]
    started = site.engine(site.folder / "step-1", refits=False, **online)
    assert said == answer(started)
