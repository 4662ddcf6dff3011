"""Are the arguments of a client's call what they must be? Checks that name the argument, before anything is sent."""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from reshard.rendezvous import limits
from reshard.rendezvous.errors import InvalidRequestError, WorkerLostError
from reshard.rendezvous.types import Progress, VersionKey, WorkerInfo
from reshard.rendezvous.worker import AnyWorker

__all__ = ["checked_timeout", "ignore", "instance_of", "left_s", "require_live", "split_want"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s`, seconds, if it is finite, over 0 and not over the bound."""
    return limits.check_timeout("timeout_s", timeout_s)


def left_s(deadline: float) -> float:
    """Seconds until a deadline on ``time.monotonic()``, over 0."""
    return max(deadline - time.monotonic(), 0.001)


def instance_of(kind: type[T], field: str, value: object) -> T:
    """`value`, if it is a `kind`."""
    if not isinstance(value, kind):
        raise InvalidRequestError(field, f"expected a {kind.__name__}, got {type(value).__name__}")
    return value


def require_live(worker: AnyWorker) -> str:
    """The id of a worker that is not lost, as far as is known here."""
    if not isinstance(getattr(worker, "info", None), WorkerInfo):
        raise InvalidRequestError("worker", f"expected a registered worker, got {type(worker).__name__}")
    if worker.lost:
        raise WorkerLostError(f"worker {worker.info.name!r} ({worker.id}) is lost; register anew")
    return worker.id


def split_want(model: str, want: VersionKey | int | str) -> tuple[int | None, int | None]:
    """Return (step, epoch), None for the latest and for the current."""
    if isinstance(want, VersionKey):
        if want.model != model:
            raise InvalidRequestError("want", f"{want} is no version of {model!r}")
        return want.step, want.epoch
    if isinstance(want, str):
        limits.check_choice("want", want, ("latest",))
        return None, None
    return limits.check_int("want", want, at_least=0, at_most=limits.MAX_STEP), None


def ignore(progress: Progress) -> None:
    """Hear of progress where nobody asked to."""
    _log.debug("waiting: %s", progress.message)
