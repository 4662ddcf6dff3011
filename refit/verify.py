"""Do the bytes that were read carry their publishers' digests?

`Verifier` runs the checks of a version (`reshard.refit.checks`) against the digests that were read beside the data,
after checking those against the root that the rendezvous told.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from reshard.refit.checks import STAGING, Check, Checks
from reshard.refit.crew import Crew
from reshard.refit.deadline import Deadline
from reshard.refit.devices import HOST, Device, host_bytes
from reshard.refit.digests import CELL_BYTES, MOST_THREADS, Digester, n_cpus, root_of, worker_threads
from reshard.refit.errors import UnverifiedError, VerificationError

if TYPE_CHECKING:
    from reshard.refit.devices import Memory

logger = logging.getLogger(__name__)

__all__ = ["Mode", "Verifier", "check_mode"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Mode = Literal["off", "sample", "full"]


def check_mode(mode: str) -> Mode:
    """Return ``mode``, or raise ValueError for what is none."""
    if mode not in ("off", "sample", "full"):
        raise ValueError(f"verify={mode!r}: expected 'off', 'sample' or 'full'")
    return cast(Mode, mode)


_SAMPLE_OF = 16
_SHOWN = 8


class _Tool:
    """What one thread verifies with."""

    def __init__(self) -> None:
        self.digester = Digester()
        self.scratch = np.empty(0, np.uint8)
        self.got = np.zeros(2, np.uint64)
        self.seconds = 0.0


class Verifier:
    """Checks one version; a context manager that ends its threads.

    Cells that lie where they stay are verified by other threads while the next batch is read (`feed`, `finish`),
    staged ones by the caller before they are copied on (`check_staged`). A device digests many cells at once, in the
    order of its stream, and they are looked at once it has been waited for (`settle`).

    Parameters
    ----------
    checks
        Of the plan.
    mode
        ``full``, ``sample`` (one cell in 16, others at each version) or ``off``.
    seed
        Chooses the sample; the version's (epoch, step).
    deadline
        Of the refit.
    device
        Where the cells land.
    """

    def __init__(
        self, checks: Checks, mode: Mode, seed: tuple[int, int], deadline: Deadline, device: Device = HOST
    ) -> None:
        self._checks = checks
        self._deadline = deadline
        self._device = device
        self._launched: list[tuple[list[Check], Callable[[], U64]]] = []
        salt = zlib.crc32(repr(seed).encode())
        self._mode = mode
        self._staged: dict[int, list[Check]] = {}
        self._direct: list[tuple[int, Check]] = []
        for number, check in enumerate(checks.checks if mode != "off" else ()):
            if mode != "full" and (check.cell * 2654435761 + check.holder * 40503 + salt) % _SAMPLE_OF:
                continue
            if check.wave >= 0:
                self._staged.setdefault(check.wave, []).append(check)
            else:
                self._direct.append((number, check))
        self._by_batch: dict[int, list[Check]] = {}
        self._rest = [check for _, check in self._direct]
        self._digests: list[U64 | None] = [None] * len(checks.names)
        self._lost: frozenset[int] = frozenset()
        self._staging: Memory = np.zeros(0, np.uint8)
        self._buffers: list[Memory] = []
        self._tools: list[_Tool] = []
        self._good: list[Check] = []
        self._bad: list[Check] = []
        self._crew: Crew[Check, _Tool] | None = None

    @property
    def verified_bytes(self) -> int:
        """Bytes of the cells that have their digests; those of lost holders, which are read again, apart."""
        return sum(c.proves_bytes for c in self._good if c.holder not in self._lost)

    @property
    def n_cells(self) -> int:
        """Cells that have their digests, those of lost holders apart."""
        return sum(c.holder not in self._lost for c in self._good)

    @property
    def seconds(self) -> float:
        """Seconds that threads spent on digests, summed over them."""
        return sum(tool.seconds for tool in self._tools)

    def trust(self, digests: Mapping[str, U64], roots: Mapping[str, bytes]) -> None:
        """Take the digests that were read, after checking them against the roots that the rendezvous told.

        Holders without a root (digests off) are left unverified.

        Raises
        ------
        VerificationError
            If a holder's digests do not have its root.
        """
        self._digests = []
        for name in self._checks.names:
            root = roots.get(name, b"")
            if not root or name not in digests:
                self._digests.append(None)
                continue
            if root_of(digests[name]) != root:
                raise VerificationError(
                    f"holder {name!r}: the digests read from it do not have the root that it published"
                )
            self._digests.append(digests[name])

    # -- while others are read

    def begin(self, staging: Memory, buffers: Sequence[Memory], complete_with: Int64 | None) -> None:
        """Say where cells land, and with which batch each check's cell is there (None: nothing is fed)."""
        self._staging, self._buffers = staging, list(buffers)
        if complete_with is not None and self._direct:
            for number, check in self._direct:
                self._by_batch.setdefault(int(complete_with[number]), []).append(check)
            self._rest = []
            self._crew = self._make_crew(max(1, min(MOST_THREADS, n_cpus() - 1)))

    def feed(self, batch: int, lost: Collection[str] = ()) -> None:
        """Have verified, meanwhile, what is complete with ``batch``; ``lost`` holders apart.

        Raises
        ------
        VerificationError
            Naming the cells that were found to differ up to now.
        """
        self._without(lost)
        if self._crew is not None:
            self._crew.feed(self._known(self._by_batch.pop(batch, ())))
            self._crew.check()
        self._require_good()

    def check_staged(self, wave: int, lost: Collection[str] = ()) -> None:
        """Verify what lies in staging after ``wave``, ``lost`` holders apart.

        It is done when this returns; on a device, once that has been waited for and `settle` called.

        Raises
        ------
        VerificationError
            Naming the cells that differ.
        """
        self._without(lost)
        self._all_of(self._known(self._staged.pop(wave, ())))
        self._require_good()

    def settle(self) -> None:
        """Look at what a device has digested; call it after waiting for the device.

        Raises
        ------
        VerificationError
            Naming the cells that differ.
        """
        launched, self._launched = self._launched, []
        for checks, result in launched:
            for check, got in zip(checks, result(), strict=True):
                expected = self._digests[check.holder]
                if expected is not None and check.holder not in self._lost:
                    (self._good if bool((got == expected[check.cell]).all()) else self._bad).append(check)
        self._require_good()

    def finish(self, lost: Collection[str] = ()) -> None:
        """Verify everything that is left, ``lost`` holders apart.

        Raises
        ------
        VerificationError
            Naming the cells that differ.
        RefitTimeoutError
            Naming the cells at work when the deadline passed.
        """
        self._without(lost)
        crew, self._crew = self._crew, None
        if crew is not None:
            left, self._by_batch = self._by_batch, {}
            crew.feed(self._known([c for checks in left.values() for c in checks]))
            crew.finish(self._deadline)
        rest, self._rest = self._rest, []
        self._all_of(self._known(rest))
        if self._launched:
            self._device.synchronize()
        self.settle()

    def stop(self) -> None:
        """Wait until no thread looks at the buffers any more, some seconds at most; idempotent."""
        crew, self._crew = self._crew, None
        left = crew.stop(self._deadline) if crew is not None else ()
        if left:
            logger.warning("%s: still verifying %s; what comes of it is not used", self._deadline.what, ", ".join(left))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _without(self, lost: Collection[str]) -> None:
        self._lost = frozenset(i for i, name in enumerate(self._checks.names) if name in lost)

    def _known(self, checks: Iterable[Check]) -> list[Check]:
        """Those of holders that are there and published digests."""
        return [c for c in checks if self._digests[c.holder] is not None and c.holder not in self._lost]

    def _make_crew(self, n_threads: int) -> Crew[Check, _Tool]:
        def make_tool() -> _Tool:
            self._tools.append(tool := _Tool())
            return tool

        return Crew(make_tool, self._verify, n_threads, lambda c: self._checks.describe(c.holder, c.cell))

    def _all_of(self, checks: list[Check]) -> None:
        launched = self._device.digest(checks, self._staging, self._buffers) if checks else None
        if launched is not None:
            self._launched.append((checks, launched))
            return
        crew = self._make_crew(worker_threads(sum(c.nbytes for c in checks)) - 1)
        crew.feed(checks)
        crew.finish(self._deadline)

    def _verify(self, check: Check, tool: _Tool) -> None:
        """Sort one check into good and bad; runs in any thread."""
        since = time.perf_counter()
        expected = self._digests[check.holder]
        if expected is None or check.holder in self._lost:
            return
        tool.digester.digest(_bytes_of(check, self._staging, self._buffers, tool), check.tag, tool.got)
        same = bool((tool.got == expected[check.cell]).all())
        (self._good if same else self._bad).append(check)
        tool.seconds += time.perf_counter() - since

    def _require_good(self) -> None:
        bad = [c for c in self._bad if c.holder not in self._lost]
        if bad:
            shown = [self._checks.describe(c.holder, c.cell) for c in bad[:_SHOWN]]
            raise VerificationError(
                f"{len(bad)} of {len(bad) + len(self._good)} cells do not have their publisher's digest: "
                f"{'; '.join(shown)}",
                cells=shown,
            )

    @property
    def partial(self) -> list[tuple[int, int]]:
        """(holder, cell) of what is used and cannot be verified, that of lost holders apart."""
        return [(holder, cell) for holder, cell in self._checks.partial if holder not in self._lost]

    def require_all(self, verified_bytes: int, received_bytes: int) -> None:
        """Raise UnverifiedError if anything that was read and is used was not verified.

        Parameters
        ----------
        verified_bytes, received_bytes
            For the message.
        """
        holders = {c.holder for c in self._checks.checks} - self._lost
        silent = sorted(self._checks.names[h] for h in holders if self._digests[h] is None)
        partial = self.partial
        if self._mode == "full" and not partial and not silent:
            return
        shown = [self._checks.describe(h, c) for h, c in partial[:_SHOWN]]
        nothing = f"; no digests from {', '.join(silent[:_SHOWN])}" if silent else ""
        raise UnverifiedError(
            f"{verified_bytes} of {received_bytes} bytes were verified (mode {self._mode}); "
            f"{len(partial)} cells were read in part{': ' if shown else ''}{'; '.join(shown)}{nothing}; give the "
            "publisher this receiver's cut hints, or drop require_verified"
        )


def _bytes_of(check: Check, staging: Memory, buffers: Sequence[Memory], tool: _Tool) -> U8:
    """The cell's bytes, contiguous: where they lie, or gathered into the tool's scratch memory."""
    first = check.pieces[0]
    memory = host_bytes(staging if first.buffer == STAGING else buffers[first.buffer])
    if not first.at and first.contiguous():
        return memory[first.offset : first.offset + check.nbytes]
    if not tool.scratch.size:
        tool.scratch = np.empty(CELL_BYTES, np.uint8)
    out = tool.scratch[: check.nbytes]
    cell = out.view(f"V{first.inner}").reshape(check.shape)
    for piece in check.pieces:
        memory = host_bytes(staging if piece.buffer == STAGING else buffers[piece.buffer])
        view = np.lib.stride_tricks.as_strided(
            memory[piece.offset : piece.offset + piece.inner].view(f"V{piece.inner}"), piece.shape, piece.strides
        )
        cell[piece.at or ...] = view
    return out
