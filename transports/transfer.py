"""One posting of a prepared list: a gate, then slices, posted in order and polled to the end.

- A *slice* is a bounded piece of native work.  Its ``post`` may block for the whole copy (NIXL over CMA
  does), so a list is cut into slices, and a deadline or a cancellation takes effect between two of them.
- The *gate* proves that the peer is still who it was; nothing is posted before it is through.
- After a failure or a cancellation nothing more is posted, and what is in flight is polled until it has
  ended; only then is the transfer over.  If that does not come in time its owner *abandons* it, and its
  destination is poisoned.

States: ``active``, then ``done``, ``failed``, ``cancelled`` or ``abandoned``.  The owner's callback moves it
on, under the owner's lock; `ListTransfer.step` is safe to call from several threads, of which one at a time
does the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from reshard.transports.errors import TransferError, TransportError

if TYPE_CHECKING:
    from reshard.transports.lists import PreparedList

IN_FLIGHT = 4
"""Slices of one transfer that are in flight together."""


class Slice(Protocol):
    """A bounded piece of native work, posted again and again, never twice at once."""

    def post(self) -> bool:
        """Start it, return whether it is complete already; may block until it is.  Raises a mapped error."""
        ...

    @property
    def moved(self) -> bool:
        """Whether the last call did native work, so that another at once is worth it."""
        ...

    @property
    def native_s(self) -> float:
        """Seconds that the native library measured for the last posting, 0.0 if it does not measure."""
        ...

    def poll(self) -> bool:
        """Return whether it is complete.  Raises a mapped error once it has failed."""
        ...

    def close(self) -> None:
        """Free it, whatever its state; never raises."""
        ...


class Call:
    """A slice that is a function: complete, or failed, when it returns.

    Parameters
    ----------
    run : callable
        Does the work; raises a mapped error.
    """

    __slots__ = ("_run",)
    moved = False
    native_s = 0.0

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def post(self) -> bool:
        """See `Slice.post`."""
        self._run()
        return True

    def poll(self) -> bool:
        """See `Slice.poll`."""
        return True

    def close(self) -> None:
        """Have nothing to free."""


class ListTransfer:
    """The state machine.

    Parameters
    ----------
    prepared : PreparedList
    gate : Slice
    slices : sequence of Slice
    on_end : callable
        Called once with the transfer when nothing of it is in flight any more.

    Attributes
    ----------
    state : str
    error : TransportError or None
    inline : bool
        Small enough to be driven by the thread that posts it and waits for it.
    posted : int
        Slices handed to the native library.
    failed_in_flight : bool
        A slice failed after it had been posted, so that only the backend can say whether it still writes.
    quiet : bool
        Nothing is in flight and nothing will be posted.
    """

    # Defaults on the class: one of these is made for each list at each refit.
    state = "active"
    error: TransportError | None = None
    ended = 0.0
    post_seconds = 0.0
    posted = 0
    failed_in_flight = False
    quiet = False
    _gate_state = "shut"
    _cancelled = False

    def __init__(
        self,
        prepared: PreparedList,
        gate: Slice,
        slices: Sequence[Slice],
        on_end: Callable[[ListTransfer], None],
    ) -> None:
        self.prepared = prepared
        self.began = time.monotonic()
        self.inline = prepared.small
        self._gate = gate
        self._slices = slices
        self._on_end = on_end
        self._flying: list[Slice] = []
        self._lock = threading.Lock()

    @property
    def cancelled(self) -> bool:
        """Whether it was told to stop before all of it was posted."""
        return self._cancelled and self.posted < len(self._slices)

    @property
    def refused(self) -> bool:
        """Whether the gate failed, so that its peer is of no use any more."""
        return self._gate_state == "refused"

    @property
    def posting(self) -> bool:
        """Whether a thread is at work on it now, perhaps inside a native call."""
        return self._lock.locked()

    @property
    def native_seconds(self) -> float:
        """What the native library measured over all slices."""
        if len(self._slices) == 1:
            return self._slices[0].native_s
        return sum(piece.native_s for piece in self._slices)

    def retire(self) -> None:
        """Do nothing more: its owner knows that it can write no more. Another thread may be inside `step`."""
        self._cancelled = self.quiet = True

    def cancel(self) -> None:
        """Post nothing more; what is in flight still has to end."""
        self._cancelled = True

    def step(self) -> bool:
        """Do one bounded piece of work; return whether anything moved."""
        if not self._lock.acquire(False):
            return False
        try:
            if self.quiet:
                return False
            moved = self._advance() if self._gate_state == "open" else self._pass_gate()
            if not self._flying and self._over():
                self.quiet = True
                self.ended = time.monotonic()
                self._on_end(self)
                return True
            return moved
        finally:
            self._lock.release()

    def _over(self) -> bool:
        """Whether all is done, or nothing more will be; asked while nothing is in flight."""
        if self.quiet:  # retired meanwhile
            return False
        if self._gate_state == "open" and self.posted == len(self._slices):
            return True
        return self._gate_state != "asked" and (self._cancelled or self.error is not None)

    def _pass_gate(self) -> bool:
        try:
            if self._gate_state == "shut":
                if self._cancelled:
                    return False
                self._gate_state = "asked"
                through = self._gate.post()
            else:
                through = self._gate.poll()
        except Exception as error:  # noqa: BLE001 - whatever a backend raises ends this transfer, not its thread
            self._gate_state = "refused"
            self._fail(error)
            return True
        if through:
            self._gate_state = "open"
            self._advance()
        return through

    def _advance(self) -> bool:
        moved = False
        wanted = self.posted < len(self._slices) and not self._cancelled and self.error is None
        if wanted and len(self._flying) < IN_FLIGHT:
            moved = True
            self._post(self._slices[self.posted])
        if not self._flying:
            return moved
        for piece in list(self._flying):
            try:
                if not piece.poll():
                    moved |= piece.moved
                    continue
            except Exception as error:  # noqa: BLE001 - as above
                self.failed_in_flight = True
                self._fail(error)
            self._flying.remove(piece)
            moved = True
        return moved

    def _post(self, piece: Slice) -> None:
        self.posted += 1
        start = time.monotonic()
        try:
            if not piece.post():
                self._flying.append(piece)
        except Exception as error:  # noqa: BLE001 - as above
            self.failed_in_flight = True
            self._fail(error)
        except BaseException:  # an interrupt: what it had begun may go on
            self._flying.append(piece)
            raise
        self.post_seconds += time.monotonic() - start

    def _fail(self, error: Exception) -> None:
        if self.error is not None:
            return
        if isinstance(error, TransportError):
            self.error = error
        else:
            name = self.prepared.peer.name
            self.error = TransferError(f"reading from peer {name!r}: {type(error).__name__}: {error}", peer=name)
            self.error.__cause__ = error
