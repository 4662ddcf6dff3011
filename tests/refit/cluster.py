"""A whole refit in one process: NumPy trainers, receivers in threads, memory transport, in-process rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from reshard.refit.adapters.numpy_arrays import local_tensors
from reshard.refit.engine import Engine
from reshard.refit.engines.arrays import ArrayEngine, take
from reshard.refit.publisher import Published, Publisher
from reshard.refit.receiver import Receiver
from reshard.refit.report import RefitReport
from reshard.refit.tensors import LocalTensor
from reshard.rendezvous import Rendezvous
from reshard.transports import Transport, open_transport

TIMEOUT_S = 20.0
Weights = dict[str, np.ndarray]


def weights(seed: int = 0) -> Weights:
    """A small model: fused and row-parallel parts, a bias, uneven rows."""
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((8, 16)).astype(np.float32),
        "k": rng.standard_normal((8, 16)).astype(np.float32),
        "o": rng.standard_normal((16, 8)).astype(np.float32),
        "norm": rng.standard_normal(7).astype(np.float32),
    }


def rows(index: int, n: int, size: int) -> tuple[int, int]:
    """Rows of rank ``index`` by the ceil-chunk rule."""
    chunk = -(-size // n)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def shards_of(model: Weights, index: int, n: int, *, replica: int = -1) -> list[LocalTensor]:
    """Rank ``index``'s rows of every tensor."""
    pieces, starts = {}, {}
    for name, w in model.items():
        a, b = rows(index, n, w.shape[0])
        if b > a:
            pieces[name] = w[a:b]
            starts[name] = (a, *(0,) * (w.ndim - 1))
    return local_tensors(
        pieces,
        shapes={name: model[name].shape for name in pieces},
        starts=starts,
        replica_groups=dict.fromkeys(pieces, replica) if replica >= 0 else None,
    )


def tp_engine(rank: int, **settings: object) -> ArrayEngine:
    """Rank ``rank`` of two: fused q and k by rows, o by columns, norm whole."""
    half = np.s_[4 * rank : 4 * rank + 4]
    return ArrayEngine(
        {
            "qk": np.zeros((8, 16), np.float32),
            "o": np.zeros((16, 4), np.float32),
            "norm": np.zeros(7, np.float32),
        },
        layout={
            "qk": [take("q", half, into=np.s_[0:4]), take("k", half, into=np.s_[4:8])],
            "o": [take("o", np.s_[:, half])],
        },
        **settings,  # type: ignore[arg-type]
    )


def expected(model: Weights, rank: int) -> Weights:
    """What `tp_engine` must hold."""
    half = slice(4 * rank, 4 * rank + 4)
    return {"qk": np.concatenate([model["q"][half], model["k"][half]]), "o": model["o"][:, half], "norm": model["norm"]}


def holds(engine: ArrayEngine, model: Weights, rank: int) -> bool:
    """Whether an engine holds exactly ``model``."""
    return all(np.array_equal(engine[name], w) for name, w in expected(model, rank).items())


@dataclass
class Cluster:
    """Trainers and one group of receivers.

    ``errors`` of the last `refit` are by member; `refit` raises none of them.
    """

    n_trainers: int = 2
    engines: Sequence[Engine] = ()
    transport: str = "memory"
    publisher_settings: Mapping[str, object] = field(default_factory=dict)
    receiver_settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous.in_process()
        self.slots = [f"trainer-{i}" for i in range(self.n_trainers)]
        self.trainer_transports: list[Transport] = [open_transport(self.transport) for _ in self.slots]
        self.publishers = [self.publisher(i) for i in range(self.n_trainers)]
        self.members = [f"tp{i}" for i in range(len(self.engines))]
        self.receiver_transports: list[Transport] = [open_transport(self.transport) for _ in self.members]
        self.receivers = [self.receiver(i) for i in range(len(self.engines))]

    def publisher(self, i: int) -> Publisher:
        """A publisher of slot ``i``."""
        return Publisher(
            self.trainer_transports[i],
            self.rendezvous,
            model="m",
            slot=self.slots[i],
            slots=self.slots,
            **self.publisher_settings,  # type: ignore[arg-type]
        )

    def receiver(self, i: int, **settings: object) -> Receiver:
        """A receiver of member ``i``."""
        merged = {**self.receiver_settings, **settings}
        return Receiver(
            self.receiver_transports[i],
            self.rendezvous,
            self.engines[i],
            model="m",
            group="g",
            members=self.members,
            member=self.members[i],
            **merged,  # type: ignore[arg-type]
        )

    def publish(self, step: int, model: Weights, *, epoch: int = 0, layout_epoch: int = 0) -> list[Published]:
        """Publish ``model`` sharded by rows."""
        return [
            p.publish(
                epoch=epoch,
                step=step,
                tensors=shards_of(model, i, self.n_trainers),
                layout_epoch=layout_epoch,
                timeout_s=TIMEOUT_S,
            )
            for i, p in enumerate(self.publishers)
        ]

    def refit(
        self,
        version: int = 0,
        *,
        only: Sequence[str] = (),
        timeout_s: float = TIMEOUT_S,
        before: Callable[[int], None] | None = None,
    ) -> list[RefitReport | BaseException]:
        """Refit all members at once; each one's report or error."""
        out: list[RefitReport | BaseException | None] = [None] * len(self.receivers)

        def one(i: int) -> None:
            try:
                if before is not None:
                    before(i)
                out[i] = self.receivers[i].refit(version, only=only, timeout_s=timeout_s)
            except BaseException as error:
                out[i] = error

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(self.receivers))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout_s + 15)
        if any(t.is_alive() for t in threads):
            raise AssertionError(f"a refit did not end within {timeout_s} s")
        return [r if r is not None else AssertionError("no result") for r in out]

    def refit_ok(
        self, version: int = 0, *, only: Sequence[str] = (), before: Callable[[int], None] | None = None
    ) -> list[RefitReport]:
        """Refit, and raise the first error."""
        reports = []
        for result in self.refit(version, only=only, before=before):
            if isinstance(result, BaseException):
                raise result
            reports.append(result)
        return reports

    def all_joined(self) -> bool:
        """Wait until every member has joined the open transaction (a no before that leaves the others a new one)."""
        return self._joined(len(self.members))

    def in_turn(self, i: int) -> None:
        """For `refit`'s ``before``: member ``i`` comes once those before it have joined.

        Who missed a transaction that was aborted is told of it once, unless another one is open by then.
        """
        assert self._joined(i)

    def _joined(self, n: int) -> bool:
        end_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end_s:
            open_ones = [t for t in self.rendezvous.describe().transactions if t.decision.value == "pending"]
            if len(open_ones[-1].joined if open_ones else ()) >= n:
                return True
            time.sleep(0.005)
        return False

    def leftovers(self) -> list[str]:
        """Leases that are still live."""
        return [lease.id for lease in self.rendezvous.describe().leases]

    def close(self) -> None:
        for r in self.receivers:
            r.close()
        for p in self.publishers:
            p.close()
        for t in (*self.receiver_transports, *self.trainer_transports):
            t.close()
        self.rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tp_cluster(**settings: object) -> Cluster:
    """Two trainers, two `tp_engine` ranks."""
    return Cluster(engines=[tp_engine(0), tp_engine(1)], **settings)  # type: ignore[arg-type]
