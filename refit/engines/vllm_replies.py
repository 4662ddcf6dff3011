"""Why can an engine of several workers go on after an update that was refused? Because all workers' replies are read.

vLLM 0.32's `MultiprocExecutor.collective_rpc` raises at the first worker that reports an error, and leaves the replies
of the others in their queues, where the next call takes them for its own (vLLM issue 49972). An update that all
workers refuse would leave the engine without a way to be updated again. `read_all_replies` makes the calls of weight
transfer, of engines that use the back end ``reshard``, report errors as values, so that every reply is read:

1. `call_worker` runs in each worker and returns what was raised as text.
2. The executor collects all replies and raises one error that names every worker which failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

from reshard.refit.errors import RefitError

logger = logging.getLogger(__name__)

__all__ = ["CALLS", "Reply", "call_worker", "read_all_replies", "values_of"]

CALLS = frozenset(
    {
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
    }
)


class Reply(NamedTuple):
    """What one worker says: an error's text, or a value."""

    error: str | None
    value: object


def call_worker(method: str, worker: Any, *args: object, **kwargs: object) -> Reply:
    """Call a worker's method there; what it raises is the reply."""
    try:
        return Reply(None, getattr(worker, method)(*args, **kwargs))
    except Exception as error:
        logger.exception("%s failed", method)
        return Reply(f"{type(error).__name__}: {error}", None)


def values_of(method: str, replies: Sequence[Reply]) -> list[object]:
    """The workers' values.

    Raises
    ------
    RefitError
        Any of them failed; all that failed are named.
    """
    failed = [f"worker {rank}: {reply.error}" for rank, reply in enumerate(replies) if reply.error is not None]
    if failed:
        raise RefitError(f"{method} failed on {len(failed)} of {len(replies)} workers: " + "; ".join(failed))
    return [reply.value for reply in replies]


def read_all_replies() -> None:
    """Wrap the executor's call. Idempotent; other back ends' and other calls are passed on as they are."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    original: Callable[..., Any] = MultiprocExecutor.collective_rpc
    if getattr(original, "reads_all_replies", False):
        return

    @wraps(original)
    def collective_rpc(
        self: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        config = self.vllm_config.weight_transfer_config
        if not isinstance(method, str) or method not in CALLS or more or config is None or config.backend != "reshard":
            return original(self, method, timeout, args, kwargs, **more)
        return values_of(method, original(self, partial(call_worker, method), timeout, args, kwargs))

    collective_rpc.reads_all_replies = True  # type: ignore[attr-defined]
    MultiprocExecutor.collective_rpc = collective_rpc
