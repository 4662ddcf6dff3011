"""May a refit leave weights as they are? Only where the old ones can be trusted, and the engine still has them."""

from __future__ import annotations

from reshard.refit.engine import Engine
from reshard.refit.errors import QuarantinedError, RefitError
from reshard.refit.planning import Planned

__all__ = ["require_trusted"]


def require_trusted(planned: Planned, engine: Engine, member: str, *, quarantined: bool) -> None:
    """Refuse a partial refit of a quarantined rank, or of an engine that must be written whole.

    Raises
    ------
    RefitError
        The engine keeps no load layout, and a parameter is left out.
    QuarantinedError
        The rank is quarantined, and a parameter is written in part or not at all.
    """
    written = set(planned.plan.buffers.names_list)
    left_out = [name for name in getattr(engine, "must_write", ()) if name not in written]
    if left_out:
        raise RefitError(
            f"member {member!r}: parameter {left_out[0]!r} ({len(left_out)} such) is not part of "
            f"this refit, but {type(engine).__name__} keeps no load layout: each refit must write them all"
        )
    left = sorted(set(planned.captured.reads.buffers.names_list) - written)
    if quarantined and left:
        raise QuarantinedError(
            f"member {member!r} is quarantined and this refit leaves {left[0]!r} as it is "
            f"({len(left)} such parameters), whatever version that is of; refit in full"
        )
    if planned.seeded and quarantined:
        raise QuarantinedError(
            f"member {member!r} is quarantined and this refit writes {planned.seeded[0]!r} in "
            f"part ({len(planned.seeded)} such parameters): it needs old weights that cannot be trusted; "
            "refit in full"
        )
