"""docs/transports.md: its example runs, and its tables name what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from reshard.transports import errors
from reshard.transports.hooks import Hooks
from reshard.transports.memory import MemoryTransport
from reshard.transports.nixl import NixlTransport

PAGE = Path(__file__).parents[2] / "docs" / "transports.md"


def test_the_first_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), scope)
    for name in ("reader", "owner"):
        scope[name].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("transport", [MemoryTransport, NixlTransport])
def test_every_setting_is_in_the_table(transport: type) -> None:
    table = PAGE.read_text().partition("## Settings")[2].partition("\n## ")[0]
    for name in inspect.signature(transport).parameters:
        assert f"`{name}`" in table


def test_every_error_and_every_hook_is_described() -> None:
    text = PAGE.read_text()
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type) and name.endswith("Error")]
    for name in set(kinds) - {"TransportError", "ReshardError", "MissingDependencyError"}:
        assert f"`{name}`" in text, name
    hooks = [name for name in vars(Hooks) if re.fullmatch(r"_[a-z_]+[a-z]", name) and callable(vars(Hooks)[name])]
    for name in set(hooks) - {"_register_checked", "_check_open", "_disown"}:
        assert f"`{name}(" in text, name


def test_the_backend_on_the_page_is_the_one_that_is_tested() -> None:
    code = (Path(__file__).parent / "vm_transport.py").read_text()
    page = PAGE.read_text().partition("## A backend of your own")[2]
    for line in ("peer.native = PAYLOAD.unpack(peer.endpoint.payload)", 'name = "vm"', "self._gate(peer).post()"):
        assert line in code
        assert line in page
