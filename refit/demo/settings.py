"""What does one run of the demo do: which model, how many ranks, over which transport, and where do its files go?

1. `DemoSettings` holds the options of `reshard demo`, checked when it is made.
2. `DemoSettings.work_folder` gives the folder of the run's files: the one to keep, or a temporary one that is removed.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.planner.errors import ReshardError

__all__ = ["MODELS", "SHARDINGS", "DemoError", "DemoSettings"]

MODELS = ("moe", "dense")
"""Models that the demo builds: a Qwen3-MoE, or a dense Qwen3 with tied embeddings."""

SHARDINGS = ("fsdp", "hsdp", "fsdp+tp")
"""How the trainers shard: over all ranks; in two replicas; over pairs that split the attention between them."""

MAX_TRAINERS = 64
MAX_LAYERS = 128
MAX_REFITS = 100
N_QUERY_HEADS = 8


class DemoError(ReshardError, RuntimeError):
    """The demo could not be run, or what it moved is not what it should be."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The options of one run.

    Parameters
    ----------
    transport
        Name of the transport that reads the weights: "auto" takes what fits this machine.
    trainers
        Number of FSDP2 trainer processes, at least 1.
    sharding
        One of `SHARDINGS`; all but "fsdp" need an even number of trainers.
    tensor_parallel
        Number of inference processes; divides the model's 8 query heads.
    layers
        Number of decoder layers.
    model
        "moe" or "dense".
    refits
        How many refits, at least 2, with an optimizer step before each but the first. With `cut_hints` the third is
        the first warm one.
    cut_hints
        Whether the trainers lay their buffers out, from the second version on, by the boxes that the inference ranks
        read: that refit plans anew, and all that is read later is verified.
    kill
        Name of a trainer to kill in the middle of the second refit, the last one then and a warm one; empty kills none.
        With replicas (sharding "hsdp") the ranks go on; without, they keep the old weights and the run fails.
    keep
        Folder to leave checkpoints, parameter dumps and process logs in; None takes a temporary folder.
    timeout_s
        Deadline of the whole run, in seconds.

    Raises
    ------
    DemoError
        If an option is out of range.
    """

    transport: str = "auto"
    trainers: int = 4
    sharding: str = "fsdp"
    tensor_parallel: int = 2
    layers: int = 4
    model: str = "moe"
    refits: int = 3
    cut_hints: bool = True
    kill: str = ""
    keep: Path | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise DemoError(f"--model: got {self.model!r}, expected one of {', '.join(MODELS)}")
        if not 1 <= self.trainers <= MAX_TRAINERS:
            raise DemoError(f"--trainers: got {self.trainers}, expected 1 to {MAX_TRAINERS}")
        if self.sharding not in SHARDINGS:
            raise DemoError(f"--sharding: got {self.sharding!r}, expected one of {', '.join(SHARDINGS)}")
        if self.sharding != "fsdp" and self.trainers % 2:
            raise DemoError(f"--sharding {self.sharding}: got {self.trainers} trainers, expected an even number")
        if not 1 <= self.layers <= MAX_LAYERS:
            raise DemoError(f"--layers: got {self.layers}, expected 1 to {MAX_LAYERS}")
        if self.tensor_parallel < 1 or N_QUERY_HEADS % self.tensor_parallel:
            raise DemoError(f"--tp: got {self.tensor_parallel}, expected a divisor of the {N_QUERY_HEADS} query heads")
        if not 2 <= self.refits <= MAX_REFITS:
            raise DemoError(f"--refits: got {self.refits}, expected 2 to {MAX_REFITS}")
        if self.kill and self.refits != 2:
            raise DemoError(f"--kill: got {self.refits} refits, expected 2: without the trainer there is no next step")
        if self.kill and self.cut_hints:
            raise DemoError("--kill: got --cut-hints, expected none: the refit that loses a trainer is a warm one")
        if self.kill and self.kill not in self.trainer_names:
            raise DemoError(f"--kill: got {self.kill!r}, expected one of {', '.join(self.trainer_names)}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise DemoError(f"--timeout: got {self.timeout_s}, expected a finite number of seconds over 0")

    @property
    def trainer_names(self) -> tuple[str, ...]:
        """Slot names of the trainers, in rank order."""
        return tuple(f"trainer-{rank}" for rank in range(self.trainers))

    @property
    def inference_names(self) -> tuple[str, ...]:
        """Member names of the inference group, in tensor-parallel rank order."""
        return tuple(f"inference-{rank}" for rank in range(self.tensor_parallel))

    @contextlib.contextmanager
    def work_folder(self) -> Iterator[Path]:
        """Yield the folder for this run's files; a temporary one is removed at the end."""
        if self.keep is not None:
            try:
                self.keep.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DemoError(f"--keep {self.keep}: the folder cannot be made: {error.strerror}") from error
            yield self.keep
            return
        with tempfile.TemporaryDirectory(prefix="reshard-demo-") as folder:
            yield Path(folder)
