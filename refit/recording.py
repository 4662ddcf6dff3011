"""What a dry run of a loader writes down: writes to destinations in program order, and what must be materialised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.refit.errors import UnattributedWriteError, UnsupportedLoaderError
from reshard.refit.trace import AlignedRead, Strided

if TYPE_CHECKING:
    import torch

__all__ = ["PARAM", "Destination", "Recording", "Write", "element_bytes", "place_of", "storage_key"]

PARAM = "param:"
"""Prefix of a destination's name in a taint."""


def storage_key(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from all others alive: its address, or on the meta device the storage object's."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)


@dataclass(frozen=True, slots=True)
class Destination:
    """A parameter's place in memory: bytes ``[first_byte, first_byte + nbytes)`` of the storage `storage_key` names."""

    name: str
    storage_ptr: int
    first_byte: int
    nbytes: int
    item_bytes: int
    dtype: torch.dtype


def place_of(known: Sequence[Destination], tensor: torch.Tensor) -> tuple[Destination, Strided] | None:
    """The one of ``known``, destinations in the storage of ``tensor``, that holds it, and the view of it that it is.

    Raises
    ------
    UnsupportedLoaderError
        It is a view with another element size.
    UnattributedWriteError
        It lies in several of them.
    """
    if tensor.numel() == 0:
        return None
    item, first = tensor.element_size(), int(tensor.storage_offset())
    sizes, strides = tuple(tensor.shape), tensor.stride()
    reach = 1
    for n, s in zip(sizes, strides, strict=True):
        reach += (n - 1) * s
    start, stop = first * item, (first + reach) * item
    for d in known:
        if d.first_byte <= start and stop <= d.first_byte + d.nbytes:
            if item != d.item_bytes or (start - d.first_byte) % item:
                raise UnsupportedLoaderError(
                    f"the loader wrote parameter {d.name!r} through a view with {item} bytes an element; its own has "
                    f"{d.item_bytes}"
                )
            return d, Strided(first - d.first_byte // item, sizes, strides)
    overlapping = [d.name for d in known if start < d.first_byte + d.nbytes and d.first_byte < stop]
    if overlapping:
        raise UnattributedWriteError(
            f"the loader used a view that spans parameters {', '.join(map(repr, overlapping))} at once"
        )
    return None


def element_bytes(value: float | torch.Tensor, dtype: torch.dtype) -> bytes:
    """One element of ``dtype`` with that value, as it lies in memory."""
    import torch

    one = torch.empty((1,), dtype=dtype)
    one.fill_(value)
    return bytes(one.view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Write:
    """One thing that the loader did to a destination, in program order.

    ``kind`` is ``copy`` (``reads`` says from where), ``constant`` (``view`` and ``value``, one element's bytes) or
    ``computed``. ``during`` is the source that the loader was busy with; empty before the first and after the last.
    """

    order: int
    kind: str
    destination: str
    view: Strided
    reads: tuple[AlignedRead, ...] = ()
    value: bytes = b""
    taint: frozenset[str] = frozenset()
    during: str = ""


@dataclass(slots=True)
class Recording:
    """All writes of one dry run, and what has to be materialised for it.

    ``current`` is the source that the loader was handed last; ``during`` too, until it has been told that there are no
    more.
    """

    writes: list[Write] = field(default_factory=list)
    n_copies: int = 0
    mutated: set[str] = field(default_factory=set)
    current: str = ""
    during: str = ""
    scratch: dict[str, str] = field(default_factory=dict)

    def materialised(self) -> tuple[frozenset[str], frozenset[str]]:
        """Sources and destinations that the loader itself has to produce.

        The closure: a computed write takes its destination and all it depends on, sources as well as destinations that
        were written; a destination taken so takes every source that writes it (order matters there), and where a write
        has none, the one that was being handled; a source taken so takes every destination that it writes.
        """
        sources = set(self.mutated)
        targets: set[str] = set()
        written = {write.destination for write in self.writes}
        links: list[tuple[str, frozenset[str], frozenset[str], frozenset[str]]] = []
        for write in self.writes:
            own = frozenset(r.source for r in write.reads) | {n for n in write.taint if not n.startswith(PARAM)}
            read_back = frozenset(n.removeprefix(PARAM) for n in write.taint if n.startswith(PARAM)) & written
            links.append((write.destination, own, own or frozenset((write.during,)) - {""}, read_back))
            if write.kind == "computed":
                targets.add(write.destination)
        changed = True
        while changed:
            before = len(sources) + len(targets)
            for target, own, needed, read_back in links:
                if target in targets:
                    sources |= needed
                    targets |= read_back
                elif own & sources:
                    targets.add(target)
            changed = len(sources) + len(targets) != before
        return frozenset(sources), frozenset(targets)

    def of(self, destinations: frozenset[str]) -> list[tuple[object, ...]]:
        """What was written to these, in program order."""
        return [
            (w.kind, w.destination, w.view, w.reads, w.value, w.taint)
            for w in self.writes
            if w.destination in destinations
        ]
