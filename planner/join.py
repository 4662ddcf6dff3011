"""Which part of each request does each source box serve, and is nothing missing? Join and coverage.

A *piece* is the intersection of one template request with one source box, in the request's own coordinates k
(so that stepped views are boxes too). Pieces of one request are proved pairwise disjoint, and their volumes
must add up to the request's; a shortfall is a `CoverageError` with the missing boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard.planner.boxes import find_overlap, subtract
from reshard.planner.classes import Classes
from reshard.planner.classify import Bool, Int64, ragged_arange
from reshard.planner.errors import Box, CoverageError, DTypeError, OverlapError, format_box
from reshard.planner.requests import Requests
from reshard.planner.sources import SourceBoxes
from reshard.planner.tables import ShardTable

_PAIR_CHUNK = 1 << 20
_SAMPLE = 16


@dataclass(frozen=True, eq=False)
class TemplateRequests:
    """The requests of each class's first member, ordered by class.

    Attributes
    ----------
    cls, nth : int64[Q]
        Class, and which of its tensor's requests.
    row : int64[Q]
        Row in the `Requests`.
    start, step, count, stride : D int64[Q]
        In units (elements, or bytes of packed elements).
    """

    cls: Int64
    nth: Int64
    row: Int64
    start: list[Int64]
    step: list[Int64]
    count: list[Int64]
    stride: list[Int64]

    def __len__(self) -> int:
        return len(self.cls)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Intersections of template requests and source boxes.

    Attributes
    ----------
    request, box : int64[P]
        Template request and source box.
    lo, count : D int64[P]
        First k and number of k along each dim.
    """

    request: Int64
    box: Int64
    lo: list[Int64]
    count: list[Int64]

    def __len__(self) -> int:
        return len(self.request)

    def take(self, rows: Int64 | Bool) -> Pieces:
        """Some of the pieces."""
        return Pieces(self.request[rows], self.box[rows], [c[rows] for c in self.lo], [c[rows] for c in self.count])


def template_requests(sources: ShardTable, classes: Classes, requests: Requests) -> tuple[TemplateRequests, Int64]:
    """Requests of the first members, and int64[C] elements in a unit of each class (over 1 where packed).

    Raises
    ------
    DTypeError
        A packed tensor cut inside a byte on either side.
    """
    n_req = classes.n_requests[classes.first]
    cls = np.repeat(np.arange(len(classes)), n_req)
    nth = ragged_arange(n_req)
    row = classes.request_first[classes.first][cls] + nth
    start = [c[row] for c in requests.start]
    step = [c[row] for c in requests.step]
    count = [c[row] for c in requests.count]
    stride = [c[row] for c in requests.stride]
    bits = sources.tensors.bits[classes.tensor[classes.first]]
    pack = np.where(bits < 8, 8 // np.minimum(bits, 8), 1)
    if bool((pack > 1).any()):
        unit = pack[cls]
        packed = unit > 1
        wrong = packed & ((start[-1] % unit != 0) | (count[-1] % unit != 0) | (step[-1] != 1) | (stride[-1] != 1))
        for s in stride[:-1]:
            wrong |= packed & (s % unit != 0)
        if wrong.any():
            bad = int(np.argmax(wrong))
            _refuse_cut(sources, classes, int(cls[bad]), int(start[-1][bad]), int(count[-1][bad]), int(unit[bad]))
        start[-1], count[-1] = start[-1] // unit, count[-1] // unit
        stride = [np.where(packed, s // unit, s) for s in stride]
        stride[-1] = np.where(packed, 1, stride[-1])
    return TemplateRequests(cls, nth, row, start, step, count, stride), pack


def _refuse_cut(sources: ShardTable, classes: Classes, cls: int, start: int, count: int, unit: int) -> None:
    tensor = int(classes.tensor[classes.first[cls]])
    name = sources.tensors.name(tensor)
    raise DTypeError(
        f"tensor {name!r}: elements [{start}, {start + count}) of the last dim cut a byte of {unit} packed elements "
        f"({sources.tensors.dtype_label(tensor)}), or are not contiguous in the destination",
        tensor=name,
        got=(start, start + count),
        expected=unit,
    )


def join(requests: TemplateRequests, boxes: SourceBoxes, n_classes: int) -> Pieces:
    """Intersect each template request with each source box of its class; empty intersections are dropped."""
    n_boxes = np.bincount(boxes.cls, minlength=n_classes)
    first_box = np.cumsum(n_boxes) - n_boxes
    counts = n_boxes[requests.cls]
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // _PAIR_CHUNK)) + 1
    out = []
    for rows in np.split(np.arange(len(requests)), cuts):
        n = counts[rows]
        request = np.repeat(rows, n)
        box = np.repeat(first_box[requests.cls[rows]], n) + ragged_arange(n)
        lo, hi = [], []
        alive = np.ones(len(request), np.bool_)
        for d in range(len(requests.count)):
            start, step, count = requests.start[d][request], requests.step[d][request], requests.count[d][request]
            a, b = boxes.start[d][box] - start, boxes.stop[d][box] - start
            first, last = np.maximum(a, 0), b
            if not (step == 1).all():
                first, last = np.maximum(-(-a // step), 0), -(-b // step)
            last = np.minimum(last, count)
            lo.append(first)
            hi.append(last)
            alive &= first < last
        keep = np.flatnonzero(alive)
        out.append(
            Pieces(
                request[keep],
                box[keep],
                [c[keep] for c in lo],
                [b[keep] - a[keep] for a, b in zip(lo, hi, strict=True)],
            )
        )
    if len(out) == 1:
        return out[0]
    return Pieces(
        np.concatenate([p.request for p in out]),
        np.concatenate([p.box for p in out]),
        [np.concatenate(c) for c in zip(*[p.lo for p in out], strict=True)],
        [np.concatenate(c) for c in zip(*[p.count for p in out], strict=True)],
    )


def check_coverage(
    sources: ShardTable, classes: Classes, requests: TemplateRequests, pieces: Pieces, boxes: SourceBoxes, pack: Int64
) -> None:
    """Prove that the pieces of each template request tile it.

    Raises
    ------
    OverlapError
        Two pieces of one request overlap (would be a defect of the planner; the proof does not rest on its
        steps).
    CoverageError
        Part of a request has no piece; the missing boxes are listed in global elements.
    """
    hi = [a + n for a, n in zip(pieces.lo, pieces.count, strict=True)]
    pair = find_overlap(pieces.request, pieces.lo, hi)
    if pair is not None:
        name = _name(sources, classes, int(requests.cls[pieces.request[pair[0]]]))
        raise OverlapError(f"tensor {name!r}: two pieces of one request overlap", tensor=name)
    covered = np.zeros(len(requests), np.int64)
    volume = np.ones(len(pieces), np.int64)
    for n in pieces.count:
        volume *= n
    np.add.at(covered, pieces.request, volume)
    wanted = np.ones(len(requests), np.int64)
    for n in requests.count:
        wanted *= n
    short = np.flatnonzero(covered != wanted)
    if len(short):
        raise _coverage_error(sources, classes, requests, pieces, boxes, pack, short)


def _name(sources: ShardTable, classes: Classes, cls: int) -> str:
    return sources.tensors.name(int(classes.tensor[classes.first[cls]]))


def _coverage_error(
    sources: ShardTable,
    classes: Classes,
    requests: TemplateRequests,
    pieces: Pieces,
    boxes: SourceBoxes,
    pack: Int64,
    short: Int64,
) -> CoverageError:
    sample = short[:_SAMPLE]
    mine = np.isin(pieces.request, sample)
    part = pieces.take(mine)
    number = np.searchsorted(sample, part.request)
    origin, lo, hi = subtract(
        np.arange(len(sample)),
        [np.zeros(len(sample), np.int64) for _ in requests.count],
        [c[sample] for c in requests.count],
        number,
        part.lo,
        [a + n for a, n in zip(part.lo, part.count, strict=True)],
    )
    failures: dict[str, list[Box]] = {}
    texts = []
    for i in range(len(origin)):
        q = int(sample[origin[i]])
        cls = int(requests.cls[q])
        unit = int(pack[cls])
        n = int(sources.tensors.ndim[int(classes.tensor[classes.first[cls]])])
        box = []
        for d in range(len(lo) - n, len(lo)):
            start, step = int(requests.start[d][q]), int(requests.step[d][q])
            factor = unit if d == len(lo) - 1 else 1
            begin = start + step * int(lo[d][i])
            end = start + step * (int(hi[d][i]) - 1) + 1
            box.append((begin * factor, end * factor))
        failures.setdefault(_name(sources, classes, cls), []).append(tuple(box))
    names = [_name(sources, classes, int(c)) for c in np.unique(requests.cls[short]).tolist()]
    first = next(iter(failures))
    cls = int(requests.cls[int(sample[0])])
    ours = np.flatnonzero(boxes.cls == cls)
    held = []
    for b in ours[:4].tolist():
        scale = [1] * (len(lo) - 1) + [int(pack[cls])]
        dims = range(len(lo) - len(failures[first][0]), len(lo))
        held.append(tuple((int(boxes.start[d][b]) * scale[d], int(boxes.stop[d][b]) * scale[d]) for d in dims))
    cover = ", ".join(format_box(b) for b in held) or "nothing"
    for name, missing in list(failures.items())[:4]:
        texts.append(f"tensor {name!r}: no source for {', '.join(format_box(b) for b in missing[:4])}")
    members = np.diff(classes.member_start)[np.unique(requests.cls[short])].sum()
    more = f"; {int(members)} tensors concerned" if members > 1 else ""
    return CoverageError(
        f"{'; '.join(texts)}; sources cover {cover}{' ...' if len(ours) > 4 else ''}{more}",
        tensor=first,
        missing=failures[first],
        failures={**{n: [] for n in names if n not in failures}, **failures},
    )
