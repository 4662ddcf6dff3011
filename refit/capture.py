"""What does an engine's own loader do with each published tensor? Run it on nothing and write down the answer.

`record` takes a quick look first (`reshard.refit.quickpass`), which is enough for loaders that only copy views. Any
other loader it calls with traced tensors (`reshard.refit.trace`) under a dispatch mode that sees every torch operation:

1. views of traced tensors stay views; copies of them become virtual storages;
2. a copy into a destination (a view of a known parameter) is a `Write` of kind ``copy``; filling one is a
   ``constant``; neither is carried out, so the engine is not touched;
3. any other operation on traced values, and any read of a destination, gives a *computed* tensor that carries the
   names it depends on; writing one makes destination and sources *materialised*: they are staged and the loader
   runs on them later, so here too, to see that it does the same then;
4. a value that leaves the tensor world (``bool(w > 0)``, ``w.numpy()``) is refused, naming the source; a source
   written into memory that belongs to no parameter is refused at the end, unless allowed by name.

Writes carry the loader's program order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from reshard.refit.errors import UnattributedWriteError, UnsupportedLoaderError
from reshard.refit.quickpass import look
from reshard.refit.recorder import recorder_type
from reshard.refit.recording import Destination, Recording
from reshard.refit.seen import Seen
from reshard.refit.trace import trace

if TYPE_CHECKING:
    import torch

__all__ = ["record"]


def record(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    manifest: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    destinations: Sequence[Destination],
    *,
    allow_unattributed: Callable[[str], bool] = lambda name: False,
) -> Recording | Seen:
    """Run ``loader`` on traced tensors and return what it wrote where.

    Parameters
    ----------
    loader
        Called with an iterable of (name, tensor), up to four times; not always with all of them.
    manifest
        Name, dtype and global shape of each published tensor, in the order the loader shall see them.
    destinations
        The memory that may be written.
    allow_unattributed
        Says for a source name whether it may end in memory that belongs to no destination (it is dropped then).

    Raises
    ------
    UnsupportedLoaderError
        The loader branched on a value, or did what capture cannot follow.
    UnattributedWriteError
        A source was written into memory that is no view of a destination and never reached one.
    """
    seen = look(loader, manifest, destinations)
    if seen is not None:
        writes, unwritten = seen
        if not unwritten or _ignores(loader, [manifest[i] for i in unwritten], destinations):
            return writes
    recording = _followed(loader, manifest, destinations)
    reached: set[str] = set()
    for write in recording.writes:
        reached |= {r.source for r in write.reads} | write.taint
    lost = {n: where for n, where in recording.scratch.items() if n not in reached and not allow_unattributed(n)}
    if lost:
        name, where = min(lost.items())
        raise UnattributedWriteError(
            f"source {name!r} was written into {where}, which is no view of a known parameter or buffer, and "
            "never reached one "
            f"({len(lost)} such source{'s' if len(lost) > 1 else ''}); register that memory as a parameter or "
            "buffer, or allow it by name",
            source=name,
        )
    _require_repeatable(loader, recording, manifest, destinations)
    return recording


def _require_repeatable(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    recording: Recording,
    manifest: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    destinations: Sequence[Destination],
) -> None:
    """Refuse a loader that computes otherwise when it is handed what it computes with alone, as it will be."""
    sources, targets = recording.materialised()
    if not targets:
        return
    alone = [row for row in manifest if row[0] in sources]
    what = f"the loader computes {', '.join(map(repr, sorted(targets)[:3]))}"
    try:
        again = _followed(loader, alone, destinations)
    except Exception as error:
        raise UnsupportedLoaderError(
            f"{what}, and does not run on the {len(alone)} sources that it computes them with alone: "
            f"{type(error).__name__}: {error}",
            source=min(sources, default=""),
        ) from error
    if again.of(targets) != recording.of(targets):
        raise UnsupportedLoaderError(
            f"{what}, and does otherwise where it is handed the {len(alone)} sources alone that it computes them with",
            source=min(sources, default=""),
        )


def _followed(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    manifest: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    destinations: Sequence[Destination],
) -> Recording:
    """What the recorder sees."""
    recording = Recording()
    with recorder_type()(recording, destinations):
        loader(_handed(recording, manifest))
    return recording


def _ignores(
    loader: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    manifest: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    destinations: Sequence[Destination],
) -> bool:
    """Whether the recorder, too, sees nothing done with these sources (such as experts of other ranks)."""
    try:
        recording = _followed(loader, manifest, destinations)
    except Exception:  # noqa: BLE001 - not without the others: the whole is followed then
        return False
    return not (recording.writes or recording.mutated or recording.scratch)


def _handed(
    recording: Recording, manifest: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Traced tensors one by one, noting which one the loader holds."""
    for name, dtype, shape in manifest:
        recording.current = recording.during = name
        yield name, trace(name, dtype, shape)
    recording.during = ""
