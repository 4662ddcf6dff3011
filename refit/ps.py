"""What does `reshard ps` show, once or live? What the rendezvous describes: workers, versions, leases, lags.

Live, a terminal shows one screen that is drawn anew; anything else gets the same text again and again, or with JSON one
document a line. An outage while it watches is shown, never taken for an empty rendezvous, and watching goes on.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.planner.errors import ReshardError, require

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous
    from reshard.rendezvous.descriptions import Description
    from reshard.rendezvous.types import TLSFiles

__all__ = ["read_token", "show", "tls_files"]

_KINDS = ("workers", "versions", "leases", "transactions", "groups")


def show(
    address: str, token: str | None, tls: TLSFiles | None, *, as_json: bool, timeout_s: float, watch_s: float = 0.0
) -> None:
    """Print what the rendezvous at `address` describes; every `watch_s` seconds if that is over 0, until interrupted.

    Raises
    ------
    RendezvousError
        It is not reached, or refuses; while watching, only the first time.
    """
    from reshard.rendezvous import Rendezvous

    with Rendezvous.connect(address, token=token, tls=tls) as client:
        first = client.describe(timeout_s=timeout_s)
        if not watch_s:
            print(_as_json(first, indent=2) if as_json else _as_text(address, first))
            return
        try:
            frames = _frames(client, address, first, as_json=as_json, timeout_s=timeout_s, watch_s=watch_s)
            if as_json or not sys.stdout.isatty():
                for frame in frames:
                    print(frame, flush=True)
            else:
                _draw(frames)
        except KeyboardInterrupt:
            return


def _frames(
    client: Rendezvous, address: str, first: Description, *, as_json: bool, timeout_s: float, watch_s: float
) -> Iterator[str]:
    """Yield what to show, now and then every `watch_s` seconds."""
    description: Description | None = first
    error = ""
    while True:
        if as_json:
            yield _as_json(description) if description is not None else json.dumps({"error": error})
        else:
            said = _as_text(address, description) if description is not None else f"rendezvous {address}: {error}"
            yield f"{time.strftime('%H:%M:%S')} {said}"
        time.sleep(watch_s)
        try:
            description = client.describe(timeout_s=timeout_s)
        except ReshardError as failure:
            description, error = None, _printable(f"{type(failure).__name__}: {failure}")


def _draw(frames: Iterator[str]) -> None:
    """Show one frame after another on a terminal's alternate screen."""
    require("rich", extra="cli")
    from rich.live import Live
    from rich.text import Text

    with Live(Text(""), screen=True, auto_refresh=False) as live:
        for frame in frames:
            live.update(Text(frame), refresh=True)


def _as_json(description: Description, indent: int | None = None) -> str:
    from reshard.rendezvous.codec import to_plain

    return json.dumps(to_plain(description), indent=indent)


def _as_text(address: str, description: Description) -> str:
    lines = [f"rendezvous {address}: store {description.store}, server {description.server_id}"]
    for kind in _KINDS:
        rows = getattr(description, kind)
        lines.append(f"{kind}: {len(rows)}")
        for row in rows:
            fields = ((field.name, getattr(row, field.name)) for field in dataclasses.fields(row))
            lines.append("  " + _printable(" ".join(f"{name}={_brief(value)}" for name, value in fields)))
    return "\n".join(lines)


def _printable(text: str) -> str:
    """Escape what would end a line or steer a terminal: names are whatever their workers said."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _brief(value: object) -> str:
    """Show a field in one word: an enum by its value, a tuple by its entries."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return "[" + ",".join(_brief(entry) for entry in value) + "]"
    if slot := getattr(value, "slot", ""):
        return f"{slot}:{getattr(value, 'state', '')}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def read_token(path: str) -> str | None:
    """Return the first word of a token file; None if no path is given.

    Raises
    ------
    RendezvousError
        It cannot be read, is empty, or holds what no header may carry.
    """
    from reshard.rendezvous.errors import RendezvousError

    if not path:
        return None
    try:
        words = Path(path).read_bytes().split()
    except OSError as error:
        raise RendezvousError(f"token file {path}: {error.strerror}") from error
    if not words:
        raise RendezvousError(f"token file {path} is empty; expected a bearer token")
    if any(not 0x21 <= byte <= 0x7E for byte in words[0]):
        raise RendezvousError(f"token file {path}: a bearer token is printable ASCII, this one is not")
    return words[0].decode("ascii")


def tls_files(ca: str, cert: str, key: str, *, tls: bool) -> TLSFiles | None:
    """TLS if it is asked for, or any file of it is given; without a CA the system's roots are trusted.

    Raises
    ------
    InvalidRequestError
        A certificate without its key, or a key without its certificate.
    """
    from reshard.rendezvous.errors import InvalidRequestError
    from reshard.rendezvous.types import TLSFiles

    if bool(cert) != bool(key):
        raise InvalidRequestError("tls_key", "--tls-cert and --tls-key go together")
    return TLSFiles(ca or None, cert or None, key or None) if tls or ca or cert else None
