"""NIXL over TCP, a trainer stopped in the middle of a read: nothing late lands in memory that is in use again."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="the rendezvous service needs grpcio")

from tests.faults.matrix import ENVIRONMENT
from tests.faults.ranks import COLUMNS, MODEL, NAMES, ROWS, WORKER_TTL_S, full
from tests.ports import lasting_port

from reshard.planner.errors import ReshardError
from reshard.refit import ArrayEngine, Receiver
from reshard.refit.demo.supervisor import Child, ChildrenFailed, Supervisor
from reshard.refit.errors import HolderLostError, QuarantinedError
from reshard.refit.report import RefitReport
from reshard.refit.retry import RetryPolicy
from reshard.refit.waves import failed_peers
from reshard.rendezvous import Rendezvous
from reshard.transports import open_transport
from reshard.transports.errors import TransferTimeoutError
from reshard.transports.registry import probe

pytestmark = [
    pytest.mark.skipif(bool(probe("nixl")), reason=f"nixl does not work here: {probe('nixl')}"),
    pytest.mark.slow,
]

SLOTS = ["trainer-0", "trainer-1"]


def stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more: the one that gets the signal may be the last to be scheduled."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("install", ["shadow", "stream"])
def test_a_stopped_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: str) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over shared memory a stopped process can be read
    port = lasting_port()
    address = f"127.0.0.1:{port}"
    engine = ArrayEngine({n: np.zeros((ROWS, COLUMNS), np.float32) for n in NAMES})
    with Supervisor((), tmp_path, environment=ENVIRONMENT) as supervisor:
        server = supervisor.start("server", "tests.faults.ranks:run_server", {"port": port})
        supervisor.wait([server], timeout_s=60)
        numbers = itertools.count()

        def start(slot: str) -> Child:
            arguments = {"slot": slot, "slots": SLOTS, "address": address, "transport": "nixl"}
            name = f"{slot}-{next(numbers)}"
            return supervisor.start(name, "tests.faults.ranks:run_trainer", arguments)  # type: ignore[arg-type]

        trainers = [start(slot) for slot in SLOTS]
        supervisor.wait(trainers, timeout_s=60)

        def publish(step: int) -> None:
            supervisor.ask(trainers, {"do": "publish", "step": step, "epoch": 0}, timeout_s=30)

        def stop(stage: str) -> None:
            if stage == "read" and armed:
                armed.clear()
                os.kill(trainers[1].pid, signal.SIGSTOP)
                end_s = time.monotonic() + 60.0
                while not stopped(trainers[1].pid):
                    assert time.monotonic() < end_s, "the trainer does not stop"
                    time.sleep(0.005)

        def take(step: int) -> RefitReport:
            publish(step)
            return receiver.refit(step, timeout_s=60)

        def take_next() -> RefitReport:
            """The next version; of another life of the trainer, where UCX has ended this one as it went on.

            UCX's reads over TCP end an owner whose answer finds the reader gone, now and then (docs/transports.md).
            """
            try:
                return take(next(steps))
            except (ChildrenFailed, ReshardError):
                if "ucp_request.inl" not in trainers[1].log_tail():
                    raise
            trainers[1].kill()
            supervisor.forget(trainers[1])
            trainers[1] = start("trainer-1")
            supervisor.wait([trainers[1]], timeout_s=60)
            return take(next(steps))

        armed: list[str] = []
        steps = itertools.count()
        service, wire = Rendezvous.connect(address), open_transport("nixl")
        receiver = Receiver(
            wire,
            service,
            engine,
            model=MODEL,
            group="here",
            members=["one"],
            member="one",
            install="stream" if install == "stream" else "shadow",
            on_stage=stop,
            stall_s=WORKER_TTL_S + 1.0,  # so that the trainer knows, when it goes on, that it must register again
            retry=RetryPolicy(1),
        )
        try:
            for _ in range(2):
                take(next(steps))
            publish(next(steps))
            armed.append("now")
            with pytest.raises(Exception, match="trainer-1") as caught:
                receiver.refit(2, timeout_s=40)
            error: BaseException | None = caught.value
            if install == "stream":
                assert isinstance(error, QuarantinedError)
                error = error.__cause__
            assert isinstance(error, HolderLostError)
            assert error.holders == ("trainer-1",)
            cause = error.__cause__
            assert isinstance(cause, TransferTimeoutError)
            assert failed_peers(cause) == {"trainer-1"}
            assert not service.describe().leases
            assert receiver.state == ("serving" if install == "shadow" else "quarantined")
            if install == "shadow":
                assert all(np.array_equal(engine[n], full(n, 1)) for n in NAMES)
            os.kill(trainers[1].pid, signal.SIGCONT)
            taken = take_next().version.step
            time.sleep(1.0)  # time for what was late to land, if it could
            assert all(np.array_equal(engine[n], full(n, taken)) for n in NAMES)
            assert take_next().verified_bytes == 2 * ROWS * COLUMNS * 4
            assert not wire.quarantined()
            assert not service.describe().leases
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(trainers[1].pid, signal.SIGCONT)
            receiver.close()
            wire.close()
            service.close()
