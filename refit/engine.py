"""What an inference engine gives to a `Receiver`: two calls, and a few facts about its parameters.

1. `Engine.capture` says, for a manifest of published tensors, which view of which tensor lands where (a `ReadTable`
   whose buffers are named after the engine's parameters).
2. The receiver fills *shadow buffers*, one for each read-table buffer, without touching the engine.
3. Where capture found sources whose values the loader computes with, `Engine.load_materialised` runs that part of
   the loader on staged real tensors, still into the shadow buffers.
4. After the group's decision `Engine.install` makes the shadow buffers live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from reshard.refit.errors import RefitError
from reshard.refit.tensors import SourceTensor

if TYPE_CHECKING:
    from reshard.planner import ReadTable
    from reshard.refit.devices import Memory

__all__ = ["Captured", "Engine", "EngineParameter", "InstallMode", "StreamEngine", "Unsupported", "install_mode_of"]

InstallMode = Literal["shadow", "stream"]


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """A parameter or buffer of the engine, as it lies in memory: name, dtype label, shape, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A source that capture could not describe, and why. Reported in the coverage record."""

    source: str
    cause: str


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture found.

    Attributes
    ----------
    reads
        The read table. Its buffers are named after engine parameters; materialised sources have requests of that kind.
    n_copies
        Copies seen while the loader ran.
    consumed
        Names of the sources that some request takes.
    materialised
        Sources that must be staged as real tensors, in the loader's order.
    loader_buffers
        Buffers that only the loader's run on the materialised sources writes.
    loader_bytes
        For each of them, how many of its bytes that run writes.
    unsupported
        Sources left out, with causes; empty unless the engine was told to allow them.
    """

    reads: ReadTable
    n_copies: int
    consumed: frozenset[str]
    materialised: tuple[str, ...] = ()
    loader_buffers: tuple[str, ...] = ()
    loader_bytes: tuple[int, ...] = ()
    unsupported: tuple[Unsupported, ...] = field(default=())


@runtime_checkable
class Engine(Protocol):
    """The protocol of an engine adapter. Implementations are in `reshard.refit.engines`."""

    def capture(self, manifest: Sequence[SourceTensor]) -> Captured:
        """Describe how the published tensors land in the engine's parameters. Touches nothing."""
        ...

    def parameters(self) -> Sequence[EngineParameter]:
        """All parameters and persistent or plain buffers, each piece of memory once."""
        ...

    def signature(self) -> bytes:
        """Changes when a destination was reallocated, reshaped or retyped by anyone but `install`."""
        ...

    def read_live(self, name: str, into: Memory) -> None:
        """Copy the live bytes of parameter ``name`` into ``into`` (for parameters that a refit writes in part)."""
        ...

    def load_materialised(self, sources: Mapping[str, Memory], buffers: Mapping[str, Memory]) -> None:
        """Run the loader on staged sources (``name -> row-major bytes``), writing only ``buffers``."""
        ...

    def install(self, buffers: Mapping[str, Memory]) -> None:
        """Make ``buffers`` the live weights. Called after the group decided COMMIT; may keep them (swap) or copy."""
        ...


@runtime_checkable
class StreamEngine(Engine, Protocol):
    """An engine whose live weights can be written in place, part by part, while it is paused."""

    def pause(self) -> None:
        """Stop serving; called before the vote. Idempotent."""
        ...

    def resume(self) -> None:
        """Serve again; called after SERVE, and after a refit that touched nothing. Idempotent."""
        ...

    def write_live(self, buffers: Mapping[str, Memory]) -> None:
        """Copy whole parameters into the live weights."""
        ...


def install_mode_of(engine: Engine, asked: str | None) -> InstallMode:
    """How an engine is to be installed: as ``asked``, else as its ``install_mode`` says, else ``shadow``.

    Raises
    ------
    ValueError
        What was asked for is neither ``shadow`` nor ``stream``.
    RefitError
        ``stream``, and the engine is no `StreamEngine`.
    """
    mode = asked if asked is not None else getattr(engine, "install_mode", "shadow")
    whose = "install" if asked is not None else f"{type(engine).__name__}.install_mode"
    if mode == "shadow":
        return "shadow"
    if mode != "stream":
        raise ValueError(f"{whose}={mode!r}: expected 'shadow' or 'stream'")
    if not isinstance(engine, StreamEngine):
        raise RefitError(f"{type(engine).__name__} cannot be written in place: it is no StreamEngine")
    return "stream"
