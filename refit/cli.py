"""The command line: `reshard demo | serve | ps | doctor | version`.

Each command imports what it needs when it runs. The commands are defined inside `_application`, because `typer`
belongs to an extra and this module imports without it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from reshard.planner.errors import ReshardError, require

if TYPE_CHECKING:
    from reshard.rendezvous.service import ServeOptions

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error of ours is printed without a trace, and the exit status is 1."""
    try:
        _application()()
    except ReshardError as error:
        sys.exit(f"reshard: {type(error).__name__}: {error}")


def _application() -> Callable[[], object]:
    typer = require("typer", extra="cli")
    app = typer.Typer(
        name="reshard",
        help="Move a model's weights from the ranks that train it into the ranks that serve it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def demo(
        transport: str = typer.Option(
            "auto", help="nixl, ucx, memory; auto takes what fits this machine (see reshard doctor)."
        ),
        trainers: int = typer.Option(4, help="FSDP2 trainer processes."),
        sharding: str = typer.Option("fsdp", help="fsdp, hsdp (two replicas) or fsdp+tp (pairs split the attention)."),
        tp: int = typer.Option(2, help="Tensor-parallel inference processes."),
        layers: int = typer.Option(4, help="Decoder layers."),
        model: str = typer.Option("moe", help="moe (Qwen3-MoE, 6 experts) or dense (Qwen3, tied embeddings)."),
        refits: int | None = typer.Option(
            None,
            help="Refits, with an optimizer step before each but the first.",
            show_default="3; 2 without cut hints",
        ),
        cut_hints: bool | None = typer.Option(
            None,
            "--cut-hints/--no-cut-hints",
            help="From the second version on, lay buffers out by what the ranks read.",
            show_default="yes; no with --kill",
        ),
        kill: str = typer.Option("", help="Kill this trainer (e.g. trainer-2) in the middle of the second refit."),
        keep: Path | None = typer.Option(None, help="Leave checkpoints, parameters and logs in this folder."),  # noqa: B008
        json_file: Path | None = typer.Option(None, "--json", help="Write the report to this file as JSON."),  # noqa: B008
        timeout: float = typer.Option(300.0, help="Deadline of the whole run, in seconds."),
    ) -> None:
        """Refit a small real model from FSDP2 trainers into tensor-parallel ranks thrice, and compare every byte."""
        _demo(
            transport=transport,
            trainers=trainers,
            sharding=sharding,
            tensor_parallel=tp,
            layers=layers,
            model=model,
            refits=refits,
            cut_hints=cut_hints,
            kill=kill,
            keep=keep,
            json_file=json_file,
            timeout_s=timeout,
        )

    def serve(
        listen: str = typer.Option("127.0.0.1:7077", help="host:port; port 0 takes a free one."),
        store: str = typer.Option("memory", help="memory, or redis://host:port/db."),
        tls_cert: str = typer.Option("", help="PEM file of the server's certificate."),
        tls_key: str = typer.Option("", help="PEM file of its key."),
        client_ca: str = typer.Option("", help="PEM file: clients must show a certificate that it signed."),
        token_file: str = typer.Option("", help="File with one bearer token a line."),
        insecure: bool = typer.Option(False, "--insecure", help="Allow a bind outside loopback without the above."),
        metrics: str = typer.Option("", help="host:port of Prometheus metrics; empty: none."),
        retry: str = typer.Option("", help="Suggest to receivers how to try again: attempts=5,backoff_s=0.1,..."),
    ) -> None:
        """Serve the rendezvous until interrupted; each finished call is one JSON object on stderr."""
        from reshard.rendezvous.retries import RetryHint
        from reshard.rendezvous.service import ServeOptions

        files = (tls_cert or None, tls_key or None, client_ca or None, token_file or None)
        hint = RetryHint.parse(retry) if retry else None
        _serve(ServeOptions(listen, store, *files, insecure, metrics, hint))

    def ps(
        address: str = typer.Argument(help="host:port of the rendezvous."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        watch: float = typer.Option(0.0, min=0.0, help="Show it again every so many seconds; 0: once."),
        timeout: float = typer.Option(5.0, help="Seconds to wait for the service."),
        token_file: str = typer.Option("", help="File whose first line is the bearer token."),
        tls: bool = typer.Option(False, "--tls", help="Speak TLS; without --tls-ca the system's roots are trusted."),
        tls_ca: str = typer.Option("", help="PEM file of the roots to trust; speaks TLS."),
        tls_cert: str = typer.Option("", help="PEM file of the client's certificate."),
        tls_key: str = typer.Option("", help="PEM file of its key."),
    ) -> None:
        """Show the workers, versions, leases, transactions and groups of a rendezvous."""
        from reshard.refit.ps import read_token, show, tls_files

        files = tls_files(tls_ca, tls_cert, tls_key, tls=tls)
        show(address, read_token(token_file), files, as_json=as_json, timeout_s=timeout, watch_s=watch)

    def doctor() -> None:
        """Say which transports work on this machine, how fast, and why the others do not."""
        _doctor()

    def version() -> None:
        """Print the version."""
        import reshard

        print(reshard.__version__)

    for command in (demo, serve, ps, doctor, version):
        app.command()(command)
    run: Callable[[], object] = app
    return run


def _demo(
    *,
    transport: str,
    trainers: int,
    sharding: str,
    tensor_parallel: int,
    layers: int,
    model: str,
    refits: int | None,
    cut_hints: bool | None,
    kill: str,
    keep: Path | None,
    json_file: Path | None,
    timeout_s: float,
) -> None:
    require("rich", extra="viz")
    from rich.console import Console

    from reshard.refit.demo.report import as_json, print_report, progress_bar
    from reshard.refit.demo.run import run_demo
    from reshard.refit.demo.settings import DemoError, DemoSettings

    cut_hints = not kill if cut_hints is None else cut_hints
    refits = (3 if cut_hints else 2) if refits is None else refits
    settings = DemoSettings(
        transport=transport,
        trainers=trainers,
        sharding=sharding,
        tensor_parallel=tensor_parallel,
        layers=layers,
        model=model,
        refits=refits,
        cut_hints=cut_hints,
        kill=kill,
        keep=keep,
        timeout_s=timeout_s,
    )
    if json_file is not None and not json_file.parent.is_dir():
        raise DemoError(f"--json {json_file}: {json_file.parent} is no folder")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console(highlight=False)
    with progress_bar(console) as progress:
        report = run_demo(settings, progress)
    print_report(report, console)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(report), indent=2) + "\n")


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through the `finally` clauses, so that a run that is told to end removes its files too."""
    sys.exit(128 + number)


def _serve(options: ServeOptions) -> None:
    from reshard.rendezvous.service import serve

    _log_calls()
    server = serve(**{field.name: getattr(options, field.name) for field in dataclasses.fields(options)})
    print(f"serving the rendezvous on {server.address}", flush=True)
    if server.metrics_address:
        print(f"metrics on {server.metrics_address}", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        ended.wait()
    finally:
        server.close(grace_s=2.0)


def _log_calls() -> None:
    """Write the access log to stderr as it is, one JSON object a line, and what else is worth saying in words."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("reshard.rendezvous.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False


def _doctor() -> None:
    from reshard.transports.doctor import report

    print(report())
