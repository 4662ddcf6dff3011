"""The processes of the fault matrix: service, NumPy trainers, receivers. No torch; everything else is real."""

from __future__ import annotations

import ctypes
import hashlib
import signal
import time

import numpy as np

from reshard.refit import ArrayEngine, LocalTensor, Publisher, Receiver
from reshard.refit.buffers import DATA, DIGESTS
from reshard.refit.demo.channel import Channel, JsonValue, Message, serve_commands
from reshard.refit.errors import HolderLostError
from reshard.refit.receiver import ServingState
from reshard.refit.retry import RetryPolicy
from reshard.refit.waves import failed_peers
from reshard.rendezvous import Rendezvous
from reshard.rendezvous.service import serve
from reshard.transports import open_transport
from reshard.transports.errors import TransportError

ROWS, COLUMNS = 8, 16
NAMES = ("a", "b")
MODEL, GROUP = "faults", "group"
LEASE_TTL_S = 5.0
WORKER_TTL_S = 5.0
"""Renewed at each third: a process may do nothing for twice that before it counts as dead."""


def full(name: str, step: int) -> np.ndarray:
    """The whole tensor of a name at a step."""
    seed = int.from_bytes(hashlib.blake2b(f"{name}@{step}".encode(), digest_size=4).digest(), "little")
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def run_server(channel: Channel, *, port: int) -> None:
    """The rendezvous service, with the memory store."""
    with serve(listen=f"127.0.0.1:{port}") as server:
        channel.send({"answer": {"address": server.address}})
        serve_commands(channel, {})


def run_trainer(channel: Channel, *, slot: str, slots: list[str], address: str, transport: str) -> None:
    """Publishes half of the rows of every tensor."""
    service, wire = Rendezvous.connect(address), open_transport(transport)
    publisher = Publisher(wire, service, model=MODEL, slot=slot, slots=slots, ttl_s=WORKER_TTL_S)
    half = ROWS // len(slots)
    first = slots.index(slot) * half

    def publish(command: Message) -> Message:
        step, epoch = int(str(command["step"])), int(str(command["epoch"]))
        tensors = [
            LocalTensor(n, "float32", (ROWS, COLUMNS), (first, 0), full(n, step)[first : first + half]) for n in NAMES
        ]
        publisher.publish(epoch=epoch, step=step, tensors=tensors, timeout_s=15.0)
        worker = publisher._offering._worker
        return {"worker_id": worker.id if worker is not None else ""}

    def spoil(command: Message) -> Message:
        """Change a byte of the data, or leave the digests of another version."""
        buffer = publisher._newest
        if buffer is None:
            raise RuntimeError("nothing is published")
        region, at, bit = (DATA, 7, 0x20) if command["what"] == "data" else (DIGESTS, 0, 0x10)
        ctypes.c_uint8.from_address(int(buffer.region_bases[region]) + at).value ^= bit
        return {}

    try:
        channel.send({"answer": {}})
        serve_commands(channel, {"publish": publish, "spoil": spoil})
    finally:
        publisher.close()
        wire.close()
        service.close()


def run_receiver(
    channel: Channel, *, member: str, members: list[str], address: str, transport: str, install: str
) -> None:
    """Holds every tensor whole; stops at a stage until it is told to go on."""
    signal.signal(signal.SIGTERM, _leave)
    service, wire = Rendezvous.connect(address), open_transport(transport)
    engine = ArrayEngine({n: np.zeros((ROWS, COLUMNS), np.float32) for n in NAMES})
    at = {"stage": ""}
    trouble = {"memory": False}

    def on_stage(stage: str) -> None:
        if stage == at["stage"]:
            at["stage"] = ""
            channel.send({"paused": stage, "status": status({})})
            order = channel.receive(timeout_s=120.0)
            if order.get("do") == "dawdle":
                time.sleep(float(str(order["seconds"])))
            elif order.get("do") == "exhaust":
                trouble["memory"] = True

    def on_allocate(what: str, nbytes: int) -> None:
        if trouble["memory"]:
            raise MemoryError(f"no {nbytes} bytes for {what}")

    def on_state(state: ServingState) -> None:
        channel.send({"state": state, "serving": step_served(), "at_s": time.monotonic()})

    def step_served() -> int:
        return receiver.serving.step if receiver.serving is not None else -1

    receiver = Receiver(
        wire,
        service,
        engine,
        model=MODEL,
        group=GROUP,
        members=members,
        member=member,
        install="stream" if install == "stream" else "shadow",
        stream_bytes=ROWS * COLUMNS * 4,  # one tensor at a time
        on_stage=on_stage,
        on_state=on_state,
        on_allocate=on_allocate,
        lease_ttl_s=LEASE_TTL_S,
        worker_ttl_s=WORKER_TTL_S,
        retry=RetryPolicy(2, 0.05),
    )
    receiver.reader.batch_bytes = 256  # cells are verified while others are read

    def refit(command: Message) -> Message:
        at["stage"] = str(command.get("pause_at", ""))
        trouble["memory"] = False
        if command.get("cold"):
            receiver.bench.forget()
        try:
            report = receiver.refit(int(str(command["step"])), timeout_s=float(str(command["timeout_s"])))
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error)[:400], "lost": _lost(error)}
        finally:
            at["stage"] = ""
        return {"error": "", "text": str(report), "lost": []}

    def status(command: Message) -> Message:
        del command
        held: list[JsonValue] = []
        for name in NAMES:
            array = np.asarray(engine[name])
            known = {step: full(name, step) for step in range(4)} | {-1: np.zeros_like(array)}
            held.append(next((s for s, w in known.items() if w.tobytes() == array.tobytes()), None))
        return {
            "state": receiver.state,
            "serving": step_served(),
            "held": held,
            "links": {slot: link.worker_id for slot, link in receiver.reader.links._links.items()},
            "peers": sorted(wire._peers),  # type: ignore[attr-defined]
            "n_quarantined": len(wire.quarantined()),
        }

    def settle(command: Message) -> Message:
        try:
            return {"state": receiver.resolve(timeout_s=float(str(command["timeout_s"])))}
        except Exception as error:
            return {"state": receiver.state, "error": str(error)[:200]}

    try:
        channel.send({"answer": {}})
        serve_commands(channel, {"refit": refit, "status": status, "settle": settle})
    finally:
        receiver.close()
        wire.close()
        service.close()


def _lost(error: BaseException | None) -> list[JsonValue]:
    """The holders that an error, or what caused it, is about."""
    names: set[str] = set()
    while error is not None:
        if isinstance(error, HolderLostError):
            names.update(error.holders)
        elif isinstance(error, TransportError):
            names |= failed_peers(error)
        error = error.__cause__
    return [*sorted(names)]


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
