"""The examples of docs/rendezvous.md and docs/modelexpress.md run; docs/consensus.md's runs in test_consensus.py."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import numpy as np
from tests.rendezvous.support import make_part

from reshard.rendezvous import errors
from reshard.rendezvous.modelexpress import Publication, PublishedTable, read_publication, write_publication
from reshard.rendezvous.service import ServeOptions

DOCS = Path(__file__).parents[2] / "docs"


def test_the_rendezvous_page_runs() -> None:
    result = doctest.testfile(str(DOCS / "rendezvous.md"), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0


def test_the_modelexpress_page_runs() -> None:
    page = DOCS / "modelexpress.md"
    part, region_bases = make_part("mx-0"), np.array([1 << 40], np.uint64)
    blob = write_publication(Publication("mx-0", "h:1", b"meta", (PublishedTable(part, region_bases),), 3))
    scope: dict[str, object] = {
        "blob": blob,
        "found": [("node-0", blob)],
        "part": part,
        "region_bases": region_bases,
        "agent_name": "mx-0",
        "agent_metadata": b"meta",
    }
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[0], str(page), "exec"), scope)
    stamp, bases = scope["stamp"], scope["bases"]
    assert (stamp.agent_name, stamp.publisher_step, stamp.n_tensors) == ("mx-0", 3, 1)  # type: ignore[attr-defined]
    assert bases["mx-0"].tolist() == [1 << 40]  # type: ignore[index]
    exec(compile(blocks[1], str(page), "exec"), scope)
    again = read_publication(scope["blob"])  # type: ignore[arg-type]
    assert (again.publisher_step, again.metadata_endpoint) == (12, "host:port")


def test_every_setting_and_error_is_in_a_table() -> None:
    text = (DOCS / "rendezvous.md").read_text()
    for name in inspect.signature(ServeOptions).parameters:
        assert f"`{name}`" in text, name
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
    contracts = {errors.RendezvousError, errors.ContractError, errors.ContractTypeError}
    for kind in set(kinds) - contracts:
        assert f"`{kind.__name__}`" in text, kind.__name__
