"""How are a hundred thousand names kept and checked without a Python object each? In 8-byte words.

1. A name is its UTF-8 and one to eight NULs, which fill its last word; names lie one after another. So the last byte
   of a word is NUL exactly in the last word of a name, and equal names are equal words.
2. Every rule of a name is checked for all names at once. That no name comes twice is shown by fingerprints that all
   differ; where two agree, the names themselves are compared.
3. Strings are made when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from reshard.planner.classify import Int64, UInt64, ragged_arange
from reshard.planner.errors import TableError
from reshard.planner.names import MAX_NAME_BYTES, check_name

WORD_BYTES: Final = 8
_PADDING: Final = tuple(b"\0" * (WORD_BYTES - used) for used in range(WORD_BYTES))
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, half of its bits set
_STIR: Final = np.uint64(0xBF58476D1CE4E5B9)
_HALF: Final = np.uint64(32)
_LEAST: Final = np.array([1 << 8 * k for k in range(WORD_BYTES)], np.uint64)  # words of 1, 2, ... bytes begin here


@dataclass(frozen=True, eq=False)
class PackedNames:
    """Distinct names.

    Parameters
    ----------
    blob : bytes
        The words of all names.

    Raises
    ------
    TableError
        A name is empty, longer than 4,096 bytes, holds a NUL, is not UTF-8 or comes twice; the last one has no end.
    """

    blob: bytes

    def __post_init__(self) -> None:
        if len(self.blob) % WORD_BYTES:
            raise TableError(
                f"names: {len(self.blob)} bytes; expected whole words of {WORD_BYTES}",
                got=len(self.blob),
                expected=WORD_BYTES,
            )
        if self.blob:
            self._check_words()
            self._check_text()
            self._check_distinct()

    @classmethod
    def pack(cls, names: Sequence[str]) -> PackedNames:
        """From strings.

        Raises
        ------
        TableError
            As for the words, and where a string has a lone surrogate.
        """
        raw = [check_name(name) for name in names]
        packed = cls(b"".join([name + _PADDING[len(name) % WORD_BYTES] for name in raw]))
        packed.__dict__["strings"] = list(names)
        return packed

    @staticmethod
    def count(blob: bytes) -> int:
        """Return how many names the words of `blob` are, whether they are good or not."""
        return int(np.count_nonzero(np.frombuffer(blob, np.uint8)[WORD_BYTES - 1 :: WORD_BYTES] == 0))

    def __len__(self) -> int:
        return len(self._last_word)

    @cached_property
    def strings(self) -> list[str]:
        """All names, in order."""
        return list(filter(None, self.blob.decode().split("\0")))

    def text(self, i: int) -> str:
        """Name `i`."""
        stop = int(self._last_word[i]) + 1
        start = stop - int(self._n_words[i])
        return self.blob[start * WORD_BYTES : stop * WORD_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def take(self, rows: Int64) -> PackedNames:
        """Some of the names, none of them twice, in the order given."""
        n_words = self._n_words[rows]
        first = self._last_word[rows] + 1 - n_words
        return PackedNames(self._words[np.repeat(first, n_words) + ragged_arange(n_words)].tobytes())

    @staticmethod
    def joined(sources: Sequence[PackedNames], strings: list[str]) -> PackedNames:
        """The names of several, which are `strings` and have none in common; nothing is checked again."""
        names = object.__new__(PackedNames)
        names.__dict__.update(blob=b"".join([source.blob for source in sources]), strings=strings)
        return names

    @property
    def _words(self) -> UInt64:
        return np.frombuffer(self.blob, "<u8")

    @cached_property
    def _last_word(self) -> Int64:
        """int64[T]: where the last word of each name is."""
        return np.flatnonzero(np.frombuffer(self.blob, np.uint8)[WORD_BYTES - 1 :: WORD_BYTES] == 0)

    @cached_property
    def _n_words(self) -> Int64:
        """int64[T]: words of each name."""
        return np.diff(self._last_word, prepend=np.int64(-1))

    def _check_words(self) -> None:
        """Check where names end, their lengths, and that they hold no NUL."""
        raw = np.frombuffer(self.blob, np.uint8)
        if raw[-1]:
            raise TableError("names: the last one does not end in a NUL")
        last = self._words[self._last_word]
        used = np.searchsorted(_LEAST, last, side="right")
        n_bytes = (self._n_words - 1) * WORD_BYTES + used
        if int(n_bytes.min()) < 1 or int(n_bytes.max()) > MAX_NAME_BYTES:
            bad = int(np.argmax((n_bytes < 1) | (n_bytes > MAX_NAME_BYTES)))
            raise TableError(
                f"tensor {bad}: name of {int(n_bytes[bad])} bytes; expected 1 to {MAX_NAME_BYTES}",
                got=int(n_bytes[bad]),
                expected=MAX_NAME_BYTES,
            )
        # all bytes that are not NUL lie within the names: as many as these have bytes, or one of theirs is a NUL
        if np.count_nonzero(raw) != int(n_bytes.sum()):
            raise TableError("names: one holds a NUL byte")

    def _check_text(self) -> None:
        try:
            _ = self.blob.isascii() or self.blob.decode()  # a NUL follows each name: none is valid by its neighbour
        except UnicodeDecodeError as error:
            raise TableError(f"names: one is not valid UTF-8 ({error.reason})") from error

    def _check_distinct(self) -> None:
        marks = self._fingerprints()
        marks.sort()
        if not (marks[1:] == marks[:-1]).any():
            return
        seen: set[str] = set()
        for name in self.strings:
            if name in seen:
                raise TableError(f"tensor {name!r} appears twice in one dictionary", tensor=name)
            seen.add(name)

    def _fingerprints(self) -> UInt64:
        """uint64[T]: equal for equal names; the sum over each word, mixed with the word before it."""
        words = self._words
        first = self._last_word + 1 - self._n_words
        mixed = np.empty(len(words), np.uint64)
        np.multiply(words[:-1], _SPREAD, out=mixed[1:])
        mixed[first] = 0
        mixed ^= mixed >> _HALF
        mixed ^= words
        mixed *= _STIR
        mixed ^= mixed >> _HALF
        return np.add.reduceat(mixed, first)
