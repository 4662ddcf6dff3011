"""How does one trainer update several vLLM engines as one group? Each call goes to all of them at the same time.

Engines of one group wait for each other inside ``update_weights``: calls made one after the other would wait until
their deadline. `SeveralEngines` is vLLM's ``VLLMWeightSyncClient`` over one client for each engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.refit.errors import RefitError

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightTransferUpdatePayload

__all__ = ["SeveralEngines", "ask_engine"]


class SeveralEngines:
    """A client that drives several engines of the same size as one group.

    Parameters
    ----------
    clients
        One for each engine, at least one. Each is called from a thread of its own.
    """

    def __init__(self, clients: Sequence[VLLMWeightSyncClient]) -> None:
        if not clients:
            raise ValueError("clients is empty: expected one for each engine")
        self.clients = tuple(clients)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Tell each engine which of the group it is: ``engine`` and ``engines`` are added to what is given."""
        n = len(self.clients)
        told = [partial(_init, info=dict(init_info) | {"engine": e, "engines": n}) for e in range(n)]
        self._on_all("init_weight_transfer_engine", told)

    def start_weight_update(self) -> None:
        """Open an update on all engines, or on none."""
        n = len(self.clients)
        opened: list[VLLMWeightSyncClient] = []

        def start(client: VLLMWeightSyncClient) -> None:
            client.start_weight_update()
            opened.append(client)

        try:
            self._on_all("start_weight_update", [start] * n)
        except RefitError:
            for client in opened:
                with suppress(Exception):  # the first error is the one to tell
                    client.finish_weight_update()
            raise

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Have all engines take the version together."""
        self._on_all("update_weights", [lambda c: c.update_weights(update_info)] * len(self.clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update on all engines."""
        self._on_all("finish_weight_update", [lambda c: c.finish_weight_update(weight_version)] * len(self.clients))

    def _on_all(self, call: str, calls: Sequence[Callable[[VLLMWeightSyncClient], None]]) -> None:
        with ThreadPoolExecutor(len(calls), thread_name_prefix=f"reshard-{call}") as pool:
            asked = [partial(each, client) for each, client in zip(calls, self.clients, strict=True)]
            made = [pool.submit(ask_engine, call, ask) for ask in asked]
            failures = {e: error for e, future in enumerate(made) if (error := future.exception()) is not None}
        if failures:
            told = "; ".join(f"engine {e}: {type(error).__name__}: {error}" for e, error in failures.items())
            first = next(iter(failures.values()))
            raise RefitError(f"{call} failed on {len(failures)} of {len(calls)} engines: {told}") from first


def _init(client: VLLMWeightSyncClient, info: dict[str, Any]) -> None:
    client.init_weight_transfer_engine(info)


def ask_engine(call: str, ask: Callable[[], object]) -> None:
    """Make one of a client's calls.

    Raises
    ------
    RefitError
        An HTTP error, which by itself says no more than its status, with the body of the answer. All others are the
        client's own.
    """
    try:
        ask()
    except Exception as error:
        body = getattr(getattr(error, "response", None), "text", "")
        if not body:
            raise
        raise RefitError(f"{call}: {error}: {body}") from error
