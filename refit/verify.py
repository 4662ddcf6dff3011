"""Do the bytes that were read carry their publishers' digests?

`Verifier` runs the checks of a version (`reshard.refit.checks`) against the digests that were read beside the data,
after checking those against the root that the rendezvous told.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt

from reshard.refit.checks import STAGING, Check, Checks
from reshard.refit.digests import CELL_BYTES, digest_into, root_of, worker_threads
from reshard.refit.errors import UnverifiedError, VerificationError

__all__ = ["Mode", "Verifier"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
Mode = Literal["off", "sample", "full"]

_SAMPLE_OF = 16
_SHOWN = 8


class Verifier:
    """Checks one version.

    Parameters
    ----------
    checks
        Of the plan.
    mode
        ``full``, ``sample`` (one cell in 16, others at each version) or ``off``.
    seed
        Chooses the sample; the version's (epoch, step).
    """

    def __init__(self, checks: Checks, mode: Mode, seed: tuple[int, int]) -> None:
        self._checks = checks
        self._salt = zlib.crc32(repr(seed).encode())
        self._mode = mode
        self._by_wave: dict[int, list[Check]] = {}
        for check in checks.checks if mode != "off" else ():
            if mode == "full" or (check.cell * 2654435761 + check.holder * 40503 + self._salt) % _SAMPLE_OF == 0:
                self._by_wave.setdefault(check.wave, []).append(check)
        self.verified_bytes = 0
        self.n_cells = 0
        self.staged_seconds = 0.0
        """Seconds spent on cells in staging, between the waves."""
        self._digests: list[U64 | None] = [None] * len(checks.names)

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

    def check_wave(self, wave: int, staging: U8, buffers: Sequence[U8], *, lost: frozenset[str] = frozenset()) -> None:
        """Verify what lies in staging after ``wave`` (wave -1: in the buffers), ``lost`` holders apart.

        Raises
        ------
        VerificationError
            Naming the cells that differ.
        """
        gone = {i for i, name in enumerate(self._checks.names) if name in lost}
        todo = [c for c in self._by_wave.get(wave, ()) if self._digests[c.holder] is not None and c.holder not in gone]
        if not todo:
            return
        since = time.perf_counter()
        n_threads = worker_threads(sum(c.nbytes for c in todo))
        shares = [todo[i::n_threads] for i in range(n_threads)]
        if n_threads == 1:
            failed = [self._failures(todo, staging, buffers)]
        else:
            with ThreadPoolExecutor(n_threads, thread_name_prefix="reshard-verify") as pool:
                failed = list(pool.map(lambda share: self._failures(share, staging, buffers), shares))
        bad = [c for part in failed for c in part]
        if wave >= 0:
            self.staged_seconds += time.perf_counter() - since
        if bad:
            shown = [self._checks.describe(c.holder, c.cell) for c in bad[:_SHOWN]]
            raise VerificationError(
                f"{len(bad)} of {len(todo)} cells do not have their publisher's digest: {'; '.join(shown)}", cells=shown
            )
        self.verified_bytes += sum(c.nbytes for c in todo)
        self.n_cells += len(todo)

    def _failures(self, checks: Sequence[Check], staging: U8, buffers: Sequence[U8]) -> list[Check]:
        scratch = np.empty(CELL_BYTES, np.uint8)
        got = np.zeros(2, np.uint64)
        failed = []
        for check in checks:
            digest_into(_bytes_of(check, staging, buffers, scratch), check.tag, got)
            expected = self._digests[check.holder]
            if expected is None or got[0] != expected[check.cell, 0] or got[1] != expected[check.cell, 1]:
                failed.append(check)
        return failed

    def require_all(self, received_bytes: int) -> None:
        """Raise UnverifiedError if anything received was not verified."""
        if self._mode == "full" and not self._checks.partial and self.verified_bytes >= received_bytes:
            return
        shown = [self._checks.describe(h, c) for h, c in self._checks.partial[:_SHOWN]]
        raise UnverifiedError(
            f"{self.verified_bytes} of {received_bytes} bytes were verified (mode {self._mode}); "
            f"{len(self._checks.partial)} cells were "
            f"read in part{': ' if shown else ''}{'; '.join(shown)}; give the publisher this receiver's cut "
            "hints, or drop require_verified"
        )


def _bytes_of(check: Check, staging: U8, buffers: Sequence[U8], scratch: U8) -> U8:
    """The cell's bytes, contiguous: where they lie, or gathered into ``scratch``."""
    first = check.pieces[0]
    memory = staging if first.buffer == STAGING else buffers[first.buffer]
    if not first.at and first.contiguous():
        return memory[first.offset : first.offset + check.nbytes]
    out = scratch[: check.nbytes]
    cell = out.view(f"V{first.inner}").reshape(check.shape)
    for piece in check.pieces:
        memory = buffers[piece.buffer]
        view = np.lib.stride_tricks.as_strided(
            memory[piece.offset : piece.offset + piece.inner].view(f"V{piece.inner}"), piece.shape, piece.strides
        )
        cell[piece.at or ...] = view
    return out
