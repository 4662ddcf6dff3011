"""The planner: shard tables and read tables in, plan out. NumPy only; no I/O, no clock, no environment.

Public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "errors": (
        "ConflictError",
        "CoverageError",
        "DTypeError",
        "MissingDependencyError",
        "OverlapError",
        "PlanError",
        "ReshardError",
        "TableError",
    ),
    "dtypes": ("DType", "dtype"),
    "dictionaries": ("TensorDict",),
    "geometries": ("GeometryDict",),
    "scales": ("BlockScale",),
    "diff": ("PlanDiff", "TableDiff", "diff_plans", "diff_tables", "replan"),
    "shards": ("Holder", "Shard", "ShardPart"),
    "tables": ("ShardTable",),
    "reads": ("Buffer", "ReadRequest", "ReadTable"),
    "options": ("CostModel", "PlanOptions"),
    "planning": ("plan",),
    "plans": ("Plan",),
    "certificate": ("Assumption", "Certificate", "Economics"),
    "blocks": ("Blocks",),
    "rows": ("Fills", "LocalCopies", "WireRows"),
    "bind": ("BoundPlan", "PeerRows"),
    "affine": ("AlignedView", "source_aligned"),
    "coverage": ("Coverage", "engine_coverage"),
    "execute": ("allocate_buffers", "run_copies", "run_fills"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

if TYPE_CHECKING:
    from reshard.planner.affine import AlignedView as AlignedView
    from reshard.planner.affine import source_aligned as source_aligned
    from reshard.planner.bind import BoundPlan as BoundPlan
    from reshard.planner.bind import PeerRows as PeerRows
    from reshard.planner.blocks import Blocks as Blocks
    from reshard.planner.certificate import Assumption as Assumption
    from reshard.planner.certificate import Certificate as Certificate
    from reshard.planner.certificate import Economics as Economics
    from reshard.planner.coverage import Coverage as Coverage
    from reshard.planner.coverage import engine_coverage as engine_coverage
    from reshard.planner.dictionaries import TensorDict as TensorDict
    from reshard.planner.diff import PlanDiff as PlanDiff
    from reshard.planner.diff import TableDiff as TableDiff
    from reshard.planner.diff import diff_plans as diff_plans
    from reshard.planner.diff import diff_tables as diff_tables
    from reshard.planner.diff import replan as replan
    from reshard.planner.dtypes import DType as DType
    from reshard.planner.dtypes import dtype as dtype
    from reshard.planner.errors import ConflictError as ConflictError
    from reshard.planner.errors import CoverageError as CoverageError
    from reshard.planner.errors import DTypeError as DTypeError
    from reshard.planner.errors import MissingDependencyError as MissingDependencyError
    from reshard.planner.errors import OverlapError as OverlapError
    from reshard.planner.errors import PlanError as PlanError
    from reshard.planner.errors import ReshardError as ReshardError
    from reshard.planner.errors import TableError as TableError
    from reshard.planner.execute import allocate_buffers as allocate_buffers
    from reshard.planner.execute import run_copies as run_copies
    from reshard.planner.execute import run_fills as run_fills
    from reshard.planner.geometries import GeometryDict as GeometryDict
    from reshard.planner.options import CostModel as CostModel
    from reshard.planner.options import PlanOptions as PlanOptions
    from reshard.planner.planning import plan as plan
    from reshard.planner.plans import Plan as Plan
    from reshard.planner.reads import Buffer as Buffer
    from reshard.planner.reads import ReadRequest as ReadRequest
    from reshard.planner.reads import ReadTable as ReadTable
    from reshard.planner.rows import Fills as Fills
    from reshard.planner.rows import LocalCopies as LocalCopies
    from reshard.planner.rows import WireRows as WireRows
    from reshard.planner.scales import BlockScale as BlockScale
    from reshard.planner.shards import Holder as Holder
    from reshard.planner.shards import Shard as Shard
    from reshard.planner.shards import ShardPart as ShardPart
    from reshard.planner.tables import ShardTable as ShardTable

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return list(__all__)
