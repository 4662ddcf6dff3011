"""Move a model's weights from the ranks that train it into the ranks that serve it.

The names below are loaded on first use, so that ``import reshard`` costs next to nothing and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.planner import Plan, PlanOptions, ReadTable, ShardTable, plan
    from reshard.planner.errors import ReshardError
    from reshard.refit.publisher import Publisher
    from reshard.refit.receiver import Receiver
    from reshard.rendezvous import Rendezvous
    from reshard.transports import open_transport

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "PlanOptions",
    "Publisher",
    "ReadTable",
    "Receiver",
    "Rendezvous",
    "ReshardError",
    "ShardTable",
    "__version__",
    "open_transport",
    "plan",
]

_HOME = {
    "Plan": "reshard.planner",
    "PlanOptions": "reshard.planner",
    "Publisher": "reshard.refit.publisher",
    "ReadTable": "reshard.planner",
    "Receiver": "reshard.refit.receiver",
    "Rendezvous": "reshard.rendezvous",
    "ReshardError": "reshard.planner.errors",
    "ShardTable": "reshard.planner",
    "open_transport": "reshard.transports",
    "plan": "reshard.planner",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
