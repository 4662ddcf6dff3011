"""The processes of the fault matrix: service, NumPy trainers, receivers. No torch; everything else is real."""

from __future__ import annotations

import hashlib
import signal
import time

import numpy as np

from reshard.refit import ArrayEngine, LocalTensor, Publisher, Receiver
from reshard.refit.demo.channel import Channel, JsonValue, Message, serve_commands
from reshard.refit.retry import RetryPolicy
from reshard.rendezvous import Rendezvous
from reshard.rendezvous.service import serve
from reshard.transports import open_transport

ROWS, COLUMNS = 8, 16
NAMES = ("a", "b")
MODEL, GROUP = "faults", "group"
LEASE_TTL_S = 3.0
WORKER_TTL_S = 3.0


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
        return {}

    def spoil(command: Message) -> Message:
        """Change a byte of the data, or leave the digests of another version."""
        buffer = publisher._newest
        if buffer is None:
            raise RuntimeError("nothing is published")
        if command["what"] == "data":
            buffer.data[7] ^= 0x20
        else:
            buffer.digests[0] ^= np.uint64(0x10)
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
            channel.send({"paused": stage})
            order = channel.receive(timeout_s=30.0)
            if order.get("do") == "dawdle":
                time.sleep(float(str(order["seconds"])))
            elif order.get("do") == "exhaust":
                trouble["memory"] = True

    def on_allocate(what: str, nbytes: int) -> None:
        if trouble["memory"]:
            raise MemoryError(f"no {nbytes} bytes for {what}")

    receiver = Receiver(
        wire,
        service,
        engine,
        model=MODEL,
        group=GROUP,
        members=members,
        member=member,
        install="stream" if install == "stream" else "shadow",
        stream_bytes=1024,
        on_stage=on_stage,
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
            return {"error": type(error).__name__, "text": str(error)[:400]}
        finally:
            at["stage"] = ""
        return {"error": "", "text": str(report)}

    def status(command: Message) -> Message:
        del command
        held: list[JsonValue] = []
        for name in NAMES:
            array = np.asarray(engine[name])
            known = {step: full(name, step) for step in range(4)} | {-1: np.zeros_like(array)}
            held.append(next((s for s, w in known.items() if w.tobytes() == array.tobytes()), None))
        return {
            "state": receiver.state,
            "serving": receiver.serving.step if receiver.serving is not None else -1,
            "held": held,
            "links": list(receiver.reader.links.names()),
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


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
