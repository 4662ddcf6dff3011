"""How is the outcome of the demo shown: a progress bar and tables for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from reshard.planner.errors import require
from reshard.refit.demo.channel import JsonValue, Message
from reshard.refit.demo.run import DemoReport, Progress, RefitOfRanks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["as_json", "print_report", "progress_bar"]

COLUMNS_A_TABLE: Final = 5


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """Show a progress bar while the block runs; yield the function that moves it."""
    require("rich", extra="viz")
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(30),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1)

        def show(what: str, detail: str, n_done: int, n_steps: int) -> None:
            bar.update(task, description=f"{what}  [dim]{detail}[/dim]", completed=n_done, total=n_steps)
            if not console.is_terminal and what != shown[0]:
                console.print(what)
            shown[0] = what

        shown = [""]
        yield show


def as_json(report: DemoReport) -> Message:
    """Return the report as JSON values."""
    settings = report.settings
    refits: list[JsonValue] = [
        {
            "step": refit.step,
            "loss": refit.loss,
            "publish_s": refit.publish_s,
            "refit_s": refit.refit_s,
            "n_elems_compared": refit.n_elems_compared,
            "tokens": refit.tokens,
            "ranks": dict(refit.ranks),
        }
        for refit in report.refits
    ]
    return {
        "schema": "reshard-demo-v1",
        "model": settings.model,
        "layers": settings.layers,
        "trainers": settings.trainers,
        "sharding": settings.sharding,
        "tensor_parallel": settings.tensor_parallel,
        "cut_hints": settings.cut_hints,
        "transport": report.transport,
        "published": dict(report.trainers),
        "refits": refits,
        "seconds": dict(report.seconds),
    }


def print_report(report: DemoReport, console: Console) -> None:
    """Print what moved, what it took, and what was proved."""
    settings = report.settings
    one_line = not console.is_terminal  # on a screen, wrapped between words
    console.print(
        f"Qwen3 {settings.model}, {settings.layers} layers: {settings.trainers} trainers ({settings.sharding}) -> "
        f"{settings.tensor_parallel} tensor-parallel inference ranks, over {report.transport}",
        soft_wrap=one_line,
    )
    console.print(_moved(report))
    for first in range(0, len(report.refits), COLUMNS_A_TABLE):
        console.print(_stages(report.refits[first : first + COLUMNS_A_TABLE]))
    console.print("certificate")
    for name in settings.inference_names:
        console.print(f"  {_certificate(name, report.refits[-1])}", soft_wrap=one_line)
    for refit in report.refits:
        for name, rank in refit.ranks.items():
            if rank["failovers"]:
                console.print(
                    f"step {refit.step}: {name} went on with replicas of {rank['failovers']}", soft_wrap=one_line
                )
        loss = f" (trainer's loss in the step before: {refit.loss:.4f})" if refit.loss is not None else ""
        console.print(
            f"step {refit.step}: {refit.n_elems_compared:,} elements equal, bit for bit, what the loader makes of the "
            f"checkpoint; greedy tokens equal the trainer's{loss}",
            soft_wrap=one_line,
        )
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
    console.print(f"[dim]{phases}[/dim]", soft_wrap=one_line)


def _kind(rank: Message) -> str:
    return "cold" if rank["cold"] else "warm"


def _moved(report: DemoReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="megabytes, descriptors, seconds", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("rank", "refit", "useful", "on wire", "verified", "descriptors", "GB/s", "seconds"):
        table.add_column(heading, justify="left" if heading in ("rank", "refit") else "right", no_wrap=True)
    for name in report.settings.inference_names:
        for refit in report.refits:
            rank = refit.ranks[name]
            table.add_row(
                name,
                _kind(rank),
                *(f"{_number(rank[key]) / 1e6:,.3f}" for key in ("useful_bytes", "wire_bytes", "verified_bytes")),
                f"{_number(rank['n_descriptors']):,.0f}",
                f"{_number(rank['gbps']):.2f}",
                f"{_number(rank['total_s']):.3f}",
            )
    return table


def _certificate(name: str, refit: RefitOfRanks) -> str:
    certificate = refit.ranks[name]["certificate"]
    if not isinstance(certificate, dict):
        raise TypeError(f"certificate: got {certificate!r}, expected an object")
    numbers = {key: f"{_number(value):,.0f}" for key, value in certificate.items()}
    return (
        f"{name}: each of {numbers['requested_bytes']} requested bytes is written exactly once "
        f"({numbers['filled_bytes']} of them with a constant), {numbers['unwritten_bytes']} are missing"
    )


def _stages(refits: Sequence[RefitOfRanks]) -> Table:
    from rich import box
    from rich.table import Table

    title = "milliseconds a stage, of the rank that took longest"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("stage")
    of_column: list[dict[str, float]] = []
    for refit in refits:
        table.add_column(f"{_kind(next(iter(refit.ranks.values())))}, step {refit.step}", justify="right")
        longest: dict[str, float] = {}
        for rank in refit.ranks.values():
            stages = rank["stages"]
            for stage, seconds in (stages if isinstance(stages, dict) else {}).items():
                longest[stage] = max(longest.get(stage, 0.0), _number(seconds))
        of_column.append(longest)
    for stage in dict.fromkeys(stage for longest in of_column for stage in longest):
        table.add_row(stage, *(f"{1e3 * s[stage]:.1f}" if stage in s else "-" for s in of_column))
    return table


def _number(value: JsonValue) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"got {value!r}, expected a number")
    return float(value)
