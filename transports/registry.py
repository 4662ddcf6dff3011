"""Which transports exist, and opening one by name.

Built-in backends are rows of a table; others are found through the entry point group ``reshard.transports``,
whose objects are callables ``(**settings) -> Transport``.  A class may offer ``probe() -> str``: the reason
why it cannot work here, empty if it can; without one the backend counts as working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from logging import getLogger
from typing import cast

from reshard.planner.errors import MissingDependencyError
from reshard.transports.base import Transport
from reshard.transports.choice import Choice, choose, look
from reshard.transports.errors import TransportUnavailableError

logger = getLogger(__name__)

ENTRY_POINT_GROUP = "reshard.transports"


@dataclass(frozen=True, slots=True)
class Backend:
    """One row: where the class is, and what to install for it."""

    name: str
    path: str
    extra: str = ""


BUILT_IN = (
    Backend("nixl", "reshard.transports.nixl:NixlTransport", "nixl"),
    Backend("ucx", "reshard.transports.ucx:UcxTransport", "ucx"),
    Backend("memory", "reshard.transports.memory:MemoryTransport"),
)
Factory = Callable[..., Transport]

_told: set[Choice] = set()


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend works here; ``reason`` says why not."""

    name: str
    ok: bool
    reason: str = ""


def names() -> tuple[str, ...]:
    """Return the names of all backends, built-in ones first."""
    own = tuple(row.name for row in BUILT_IN)
    return own + tuple(sorted(point.name for point in _plug_ins() if point.name not in own))


def available() -> tuple[Availability, ...]:
    """Probe every backend, without opening one."""
    return tuple(Availability(name, not (reason := probe(name)), reason) for name in names())


def probe(name: str) -> str:
    """Return why the backend cannot work here, or an empty string."""
    try:
        factory = load(name)
    except (ImportError, TransportUnavailableError) as error:
        return str(error)
    check = getattr(factory, "probe", None)
    return str(check()) if callable(check) else ""


def load(name: str) -> Factory:
    """Return the class or factory of a backend.

    Raises
    ------
    TransportUnavailableError
        If there is no such backend (naming those that exist), or its module cannot be imported.
    """
    row = next((row for row in BUILT_IN if row.name == name), None)
    try:
        if row is not None:
            module, _, attribute = row.path.partition(":")
            return cast(Factory, getattr(import_module(module), attribute))
        for point in _plug_ins():
            if point.name == name:
                return cast(Factory, point.load())
    except MissingDependencyError as error:
        raise TransportUnavailableError(str(error), package=error.package, extra=error.extra) from error
    except (ImportError, AttributeError, OSError) as error:  # OSError: for want of file descriptors
        extra = row.extra if row else ""
        hint = f"; pip install 'reshard[{extra}]'" if extra else ""
        raise TransportUnavailableError(f"transport {name!r} cannot be imported: {error}{hint}", extra=extra) from error
    raise TransportUnavailableError(f"transport {name!r} is unknown, expected one of {', '.join((*names(), 'auto'))}")


def open_transport(name: str = "auto", **settings: object) -> Transport:
    """Open a transport.

    Parameters
    ----------
    name : str
        A name of `names`, or ``"auto"``: what fits this machine; see `reshard.transports.choice`. The log says
        which and why, once, at INFO.
    **settings
        Passed to the backend; ``"auto"`` takes none.

    Raises
    ------
    TransportUnavailableError
        If it is unknown or does not work here, saying why and what to install.
    TypeError
        For a setting that the backend does not have.
    """
    if name == "auto":
        if settings:
            raise TypeError(f"open_transport('auto') takes no settings, got {', '.join(sorted(settings))}")
        choice = choose(look(), probe)
        if not choice.name:
            raise TransportUnavailableError(f"no transport works here: {choice.reason}")
        if choice not in _told:
            _told.add(choice)
            logger.info("open_transport('auto') takes %r: %s", choice.name, choice.reason)
        name = choice.name
    return load(name)(**settings)


def _plug_ins() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
