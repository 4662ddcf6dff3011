"""Trainer and inference processes of NumPy arrays, for `test_demo_faults.py`: the rest is real."""

from __future__ import annotations

import hashlib

import numpy as np

from reshard.refit import ArrayEngine, LocalTensor, Publisher, Receiver
from reshard.refit.demo.channel import Channel, JsonValue, Message, serve_commands
from reshard.rendezvous import Rendezvous
from reshard.transports import open_transport

ROWS, COLUMNS = 12, 8
LAYERS = tuple(f"layers.{layer}.w" for layer in range(3))
EXPERT = "experts.1.w"
NAMES = (*LAYERS, EXPERT)


def weights(name: str, step: int) -> np.ndarray:
    """The full tensor of a name at a step."""
    seed = int.from_bytes(hashlib.blake2b(f"{name}@{step}".encode(), digest_size=4).digest(), "little")
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def run_trainer(
    channel: Channel, *, slot: str, slots: list[str], held: list[list[JsonValue]], transport: str, rendezvous: str
) -> None:
    """Publish rows [start, stop) of some tensors; `held` lists [name, start, stop]."""
    service = Rendezvous.connect(rendezvous)
    wire = open_transport(transport)
    publisher = Publisher(wire, service, model="numpy", slot=slot, slots=slots, ttl_s=6.0)

    def publish(command: Message) -> Message:
        step = int(str(command["step"]))
        tensors: list[LocalTensor] = []
        for name, start, stop in held:
            first, last = int(str(start)), int(str(stop))
            data = np.ascontiguousarray(weights(str(name), step)[first:last])
            tensors.append(LocalTensor(str(name), "float32", (ROWS, COLUMNS), (first, 0), data))
        publisher.publish(
            epoch=publisher.open_epoch("run"), step=step, tensors=tensors, empty=not tensors, timeout_s=20.0
        )
        return {}

    try:
        channel.send({"answer": {}})
        serve_commands(channel, {"publish": publish})
    finally:
        publisher.close()
        wire.close()
        service.close()


def run_inference(
    channel: Channel, *, member: str, members: list[str], transport: str, rendezvous: str, timeout_s: float
) -> None:
    """Hold every tensor whole."""
    service = Rendezvous.connect(rendezvous)
    wire = open_transport(transport)
    engine = ArrayEngine({name: np.zeros((ROWS, COLUMNS), np.float32) for name in NAMES})
    pause_at = [""]

    def on_stage(stage: str) -> None:
        channel.send({"stage": stage})
        if stage == pause_at[0]:
            pause_at[0] = ""
            channel.send({"paused": stage})
            channel.receive(timeout_s=30.0)

    receiver = Receiver(
        wire,
        service,
        engine,
        model="numpy",
        group="group",
        members=members,
        member=member,
        on_stage=on_stage,
        worker_ttl_s=6.0,
    )

    def refit(command: Message) -> Message:
        pause_at[0] = str(command.get("pause_at", ""))
        report = receiver.refit(int(str(command["step"])), timeout_s=timeout_s)
        return {"wire_bytes": report.wire_bytes, "cold": report.cold}

    def holds(command: Message) -> Message:
        """Which step's weights each tensor is, bit for bit; -1: zeros; None: neither."""
        steps: dict[str, JsonValue] = {}
        for name in NAMES:
            array = np.asarray(engine[name])
            known = {step: weights(name, step) for step in range(4)} | {-1: np.zeros_like(array)}
            steps[name] = next((step for step, full in known.items() if array.tobytes() == full.tobytes()), None)
        return {"steps": steps, "state": receiver.state}

    try:
        channel.send({"answer": {}})
        serve_commands(channel, {"refit": refit, "holds": holds})
    finally:
        receiver.close()
        wire.close()
        service.close()
