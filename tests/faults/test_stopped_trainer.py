"""NIXL over TCP, a trainer stopped in the middle of a read: nothing late lands in memory that is in use again."""

from __future__ import annotations

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

from reshard.refit import ArrayEngine, Receiver
from reshard.refit.demo.supervisor import Supervisor
from reshard.refit.errors import HolderLostError, QuarantinedError
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
        shared = {"slots": SLOTS, "address": address, "transport": "nixl"}
        trainers = [
            supervisor.start(slot, "tests.faults.ranks:run_trainer", {"slot": slot, **shared})  # type: ignore[dict-item]
            for slot in SLOTS
        ]
        supervisor.wait(trainers, timeout_s=60)

        def publish(step: int) -> None:
            supervisor.ask(trainers, {"do": "publish", "step": step, "epoch": 0}, timeout_s=30)

        def stop(stage: str) -> None:
            if stage == "read" and armed:
                armed.clear()
                os.kill(trainers[1].pid, signal.SIGSTOP)

        armed: list[str] = []
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
            for step in range(2):
                publish(step)
                receiver.refit(step, timeout_s=30)
            publish(2)
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
            publish(3)
            receiver.refit(3, timeout_s=30)
            time.sleep(1.0)  # time for what was late to land, if it could
            assert all(np.array_equal(engine[n], full(n, 3)) for n in NAMES)
            publish(4)
            assert receiver.refit(4, timeout_s=30).verified_bytes == 2 * ROWS * COLUMNS * 4
            assert not wire.quarantined()
            assert not service.describe().leases
        finally:
            os.kill(trainers[1].pid, signal.SIGCONT)
            receiver.close()
            wire.close()
            service.close()
