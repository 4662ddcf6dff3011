"""Settings of `plan()`: the replica policy, the budgets and the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from reshard.planner.dtypes import dtype
from reshard.planner.errors import PlanError

if TYPE_CHECKING:
    from reshard.planner.scales import BlockScale

Policy = Literal["spread", "first", "nearest"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What reading costs, for the choice between exact runs and a covering span.

    Attributes
    ----------
    descriptor_s : float
        Seconds a descriptor (post, completion), amortised over a long list.
    wire_bytes_per_s : float
    copy_bytes_per_s : float
        Of the local strided copy out of staging.

    Notes
    -----
    The defaults are those of a 200 Gb/s RDMA port: 50 million messages a second, 25 GB/s, and a 20 GB/s
    copy. They favour exact runs; `reshard doctor` measures the real ones.
    """

    descriptor_s: float = 2e-8
    wire_bytes_per_s: float = 25e9
    copy_bytes_per_s: float = 20e9

    def __post_init__(self) -> None:
        if not (self.descriptor_s >= 0 and self.wire_bytes_per_s > 0 and self.copy_bytes_per_s > 0):
            raise PlanError(f"cost model {self}: expected rates over 0 and a descriptor time of 0 or more", got=self)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How to plan.

    Attributes
    ----------
    instance, instances : int
        Which of how many receiver instances this one is; `spread` balances over instances without
        communication.
    member, members : int
        Which of how many receivers of its instance this one is, so that they start at different replicas;
        where that is not known (members 1), what a receiver reads decides.
    policy : {"spread", "first", "nearest"}
        Which replica of a box to read.
    receiver_host : str
        For `nearest`.
    max_runs_per_block : int
        Descriptor budget of a (request, shard) block: over it the block is read as a span, whatever the cost
        model says.
    staging_bytes : int
        Bytes of staging that the two waves in flight may take together.
    cost : CostModel
    strided_rows : bool
        The backend moves a regular series of runs at the cost of one descriptor: budget and cost model count series.
        False for backends that take rows of five columns but issue their runs one by one.
    round_spans : bool
        Spans are rounded outwards, by at most a sixteenth, to whole indices of the outermost dim that they step over: a
        column slice brings whole rows, so that cells that digests cover are read whole, and can be verified.
    trust_equal_boxes : bool
        Equal boxes of several holders are replicas even where nobody claims it (for tables that cannot say).
    allow_casts : frozenset of (src label, dst label)
        Casts between integers and floats (or of integers) that are allowed by name.
    aliases : mapping of str to str
        Requested name to published name, for content published under another name (tied weights).
    block_scales : mapping of str to BlockScale
        Tensors quantised by blocks, and where their scales are: cuts off the block grid are refused.
    """

    instance: int = 0
    instances: int = 1
    member: int = 0
    members: int = 1
    policy: Policy = "spread"
    receiver_host: str = ""
    max_runs_per_block: int = 64
    staging_bytes: int = 256 << 20
    cost: CostModel = field(default_factory=CostModel)
    strided_rows: bool = False
    round_spans: bool = False
    trust_equal_boxes: bool = False
    allow_casts: frozenset[tuple[str, str]] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    block_scales: Mapping[str, BlockScale] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.policy not in ("spread", "first", "nearest"):
            raise PlanError(
                f"policy {self.policy!r}; expected 'spread', 'first' or 'nearest'",
                got=self.policy,
                expected=("spread", "first", "nearest"),
            )
        if not 0 <= self.instance < self.instances:
            raise PlanError(
                f"instance {self.instance} of {self.instances}; expected 0 <= instance < instances",
                got=self.instance,
                expected=self.instances,
            )
        if not 0 <= self.member < self.members:
            raise PlanError(
                f"member {self.member} of {self.members}; expected 0 <= member < members",
                got=self.member,
                expected=self.members,
            )
        if self.max_runs_per_block < 1:
            raise PlanError(
                f"max_runs_per_block {self.max_runs_per_block}; expected 1 or more",
                got=self.max_runs_per_block,
                expected=1,
            )
        if self.staging_bytes < 4096:
            raise PlanError(
                f"staging_bytes {self.staging_bytes}; expected 4096 or more", got=self.staging_bytes, expected=4096
            )
        for src, dst in self.allow_casts:
            dtype(src), dtype(dst)
