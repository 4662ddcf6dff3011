"""Which bytes of which holder are read? Templates broadcast to their members, holder by holder.

An *item* is one thing that is read, on templates: a piece read exactly, or a fetch into staging. For each
holder a `Segment` has the source offset of every (item, member) instance that the holder serves; nothing else
differs between members. A segment depends on one part and on the templates only, so that `replan` can keep
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard.planner.classes import Classes
from reshard.planner.classify import Int64, ragged_arange
from reshard.planner.join import Pieces
from reshard.planner.needs import PartRows
from reshard.planner.replicas import Serves
from reshard.planner.shape import MODE_EXACT, Fetches, Layout
from reshard.planner.shards import ShardPart
from reshard.planner.sources import SourceBoxes


@dataclass(frozen=True, eq=False)
class Items:
    """Template items, ordered by source box.

    Attributes
    ----------
    cls, box : int64[I]
    src_offset : int64[I]
        Bytes from the shard's start.
    piece, fetch : int64[I]
        The piece read exactly, or the fetch; the other is -1.
    """

    cls: Int64
    box: Int64
    src_offset: Int64
    piece: Int64
    fetch: Int64

    def __len__(self) -> int:
        return len(self.cls)


@dataclass(eq=False, slots=True)
class Segment:
    """What is read from one holder.

    Attributes
    ----------
    part : int
        Part number in the shard table.
    item, n_members : int64[K]
        Items, and how many instances of each follow one another.
    tensor : int64[N]
        Needed-tensor number of each instance.
    row : int64[N] or None
        Row in the part (None where rows are `tensor` itself).
    src_offset : int64[N]
        Bytes from the region's start.
    region : int64[N] or None
        None where all are region 0.
    key : bytes
        All that the columns follow from, besides the part and the members of each class.
    """

    part: int
    item: Int64
    n_members: Int64
    tensor: Int64
    row: Int64 | None
    src_offset: Int64
    region: Int64 | None
    key: bytes

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def ranges(self) -> Int64:
        """int64[K, 4]: first member (a place in `Classes.members`), how many, which shard of it, source offset."""
        return np.frombuffer(self.key, np.int64).reshape(-1, 4)

    def moved(self, part: int, item: Int64) -> Segment:
        """The same columns under another part number and other item numbers."""
        return Segment(part, item, self.n_members, self.tensor, self.row, self.src_offset, self.region, self.key)


def list_items(pieces: Pieces, layout: Layout, mode: Int64, fetches: Fetches, boxes: SourceBoxes) -> Items:
    """Exact pieces and fetches, together, by source box."""
    exact = np.flatnonzero(mode == MODE_EXACT)
    box = np.concatenate([pieces.box[exact], fetches.box])
    offset = np.concatenate([layout.src_offset[exact], fetches.src_offset])
    piece = np.concatenate([exact, np.full(len(fetches), -1, np.int64)])
    fetch = np.concatenate([np.full(len(exact), -1, np.int64), np.arange(len(fetches))])
    order = np.argsort(box, kind="stable")
    box = box[order]
    return Items(boxes.cls[box], box, offset[order], piece[order], fetch[order])


def assemble(
    classes: Classes,
    boxes: SourceBoxes,
    items: Items,
    serves: Serves,
    known: Mapping[int, tuple[ShardPart, Segment]] | None = None,
) -> list[Segment]:
    """Broadcast items to members, one segment a holder that is read from.

    Parameters
    ----------
    known : mapping, optional
        By part number: a part and its segment, made with the same `classes.members`; kept where part and key
        are the same.
    """
    n_items = np.bincount(items.box, minlength=len(boxes))
    first_item = np.cumsum(n_items) - n_items
    counts = n_items[serves.box]
    serve = np.repeat(np.arange(len(counts)), counts)
    item = np.repeat(first_item[serves.box], counts) + ragged_arange(counts)
    part, nth = boxes.candidate_part[serves.candidate][serve], boxes.candidate_nth[serves.candidate][serve]
    order = np.argsort(part.astype(np.int32), kind="stable")
    item, part, nth, serve = item[order], part[order], nth[order], serve[order]
    first = classes.member_start[items.cls[item]] + serves.first[serve]
    size = serves.stop[serve] - serves.first[serve]
    columns = np.stack([first, size, nth, items.src_offset[item]], axis=1)
    begin = np.flatnonzero(np.diff(part, prepend=-1))
    present, end = part[begin], np.append(begin[1:], len(part))[: len(begin)]
    keys, row_bytes = columns.tobytes(), columns.itemsize * columns.shape[1]
    # holders that serve the same members share one tensor column, and one column of distances from the shards' starts
    shared: dict[bytes, Int64] = {}
    deltas: dict[bytes, Int64] = {}
    inverse = np.zeros(len(classes.tensor), np.int64)
    out = []
    for p, a, b in zip(present.tolist(), begin.tolist(), end.tolist(), strict=True):
        key = keys[a * row_bytes : b * row_bytes]
        rows = classes.parts[p]
        old = known.get(p) if known is not None else None
        if old is not None and old[0] is rows.part and old[1].key == key:
            out.append(old[1].moved(p, item[a:b]))
            continue
        members = columns[a:b, :2].tobytes()
        tensor = shared.get(members)
        if tensor is None:
            n = size[a:b]
            tensor = shared[members] = classes.members[np.repeat(first[a:b], n) + ragged_arange(n)]
        delta = deltas.get(key)
        if delta is None:
            delta = deltas[key] = np.repeat(columns[a:b, 3], size[a:b])
        out.append(_segment(p, rows, item[a:b], size[a:b], tensor, nth[a:b], delta, inverse, key))
    return out


def _segment(
    number: int,
    rows: PartRows,
    item: Int64,
    counts: Int64,
    tensor: Int64,
    nth: Int64,
    delta: Int64,
    inverse: Int64,
    key: bytes,
) -> Segment:
    part = rows.part
    row: Int64 | None = None
    if not rows.unique:
        row = rows.row(np.searchsorted(rows.tensor, tensor) + np.repeat(nth, counts))
    elif rows.rows is not None or len(rows.tensor) < len(inverse):
        inverse[rows.tensor] = np.arange(len(rows.tensor)) if rows.rows is None else rows.rows
        row = inverse[tensor]
    offset = np.take(part.offset_bytes, tensor if row is None else row, mode="clip")
    offset += delta
    region: Int64 | None = None
    if not part.one_region or (len(part) and int(part.region[0]) != 0):
        region = part.region[tensor if row is None else row]
    return Segment(number, item, counts, tensor, row, offset, region, key)
