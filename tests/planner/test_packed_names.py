"""Names in 8-byte words: what goes in comes out, what breaks a rule is refused, and no name comes twice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.planner.errors import TableError
from reshard.planner.packed_names import PackedNames

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(st.lists(NAMES, unique=True))
@example(["e\u0301", "\u00e9"])  # N12: composed and decomposed are two names
@example(["n" * 4096, "n" * 8, "n" * 7, "n" * 9])
def test_names_come_out_as_they_went_in(names: list[str]) -> None:
    packed = PackedNames.pack(names)
    again = PackedNames(packed.blob)
    assert again.strings == names
    assert len(again) == len(names)
    assert [again.text(i) for i in range(len(names))] == names
    assert len(packed.blob) % 8 == 0


@given(st.lists(NAMES, unique=True, min_size=1), st.data())
def test_some_of_them_and_all_of_several(names: list[str], data: st.DataObject) -> None:
    packed = PackedNames.pack(names)
    rows = data.draw(st.lists(st.sampled_from(range(len(names))), unique=True))
    assert packed.take(np.array(rows, np.int64)).strings == [names[i] for i in rows]
    cut = data.draw(st.integers(0, len(names)))
    joined = PackedNames.joined([PackedNames.pack(names[:cut]), PackedNames.pack(names[cut:])], names)
    assert joined.blob == packed.blob


@given(st.lists(NAMES, unique=True, min_size=1, max_size=8), st.data())
def test_a_name_twice_is_named(names: list[str], data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(names))
    names.insert(data.draw(st.integers(0, len(names))), twice)
    with pytest.raises(TableError, match="appears twice") as caught:
        PackedNames.pack(names)
    assert caught.value.tensor == twice


@pytest.mark.parametrize("twice", [False, True])
def test_fingerprints_that_agree_only_propose(twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_alike(names: PackedNames) -> npt.NDArray[np.uint64]:
        return np.zeros(len(names), np.uint64)

    monkeypatch.setattr(PackedNames, "_fingerprints", all_alike)
    names = ["a", "b", "a"] if twice else ["a", "b", "c"]
    if twice:
        with pytest.raises(TableError, match="'a' appears twice"):
            PackedNames.pack(names)
    else:
        assert PackedNames(PackedNames.pack(names).blob).strings == names


def test_fingerprints_of_a_models_names_all_differ() -> None:
    """Else every decode of a large model would compare strings."""
    experts = [(i, j) for i in range(48) for j in range(128)]
    names = [f"model.layers.{i}.mlp.experts.{j}.{p}_proj.weight" for i, j in experts for p in ("gate", "up", "down")]
    names += [f"{p}.{i}.{j}" for i, j in experts for p in "guds"]
    names += [str(i) for i in range(100_000)]
    marks = PackedNames.pack(names)._fingerprints()
    assert len(np.unique(marks)) == len(names)


@given(st.binary(max_size=64))
@example(b"\0" * 8)
@example(b"abcdefgh")
@example(b"abc\0\0\0\0\0" * 2)
@example(b"ab\0c\0\0\0\0")
@example(b"\xc3\0\0\0\0\0\0\0\xa9\0\0\0\0\0\0\0")
def test_any_bytes_are_refused_or_names(blob: bytes) -> None:
    try:
        packed = PackedNames(blob)
    except TableError:
        return
    assert PackedNames.pack(packed.strings).blob == blob
