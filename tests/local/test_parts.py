from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.local import parts
from shardckpt.local.parts import PartFolder, PartId, SaveId
from shardckpt.plugins.resolver import read_manifest
from tests.local.disks import save_steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_saves = st.builds(SaveId, st.integers(0, 10**18 - 1), st.integers(0, 2**64 - 1), st.integers(1, 10**6))
_parts = st.builds(PartId, _saves, st.integers(0, 10**6))


@given(_parts)
def test_names_say_which_part(part: PartId) -> None:
    """A part's name gives the part back."""
    assert PartId.parse(part.name) == part


@given(_parts, st.sampled_from(["x", " ", "0", "-", "/", "\n", "1", "٣"]))
def test_names_are_matched_whole(part: PartId, more: str) -> None:
    """With anything in front, and with what is no digit behind, a name is no part's."""
    assert PartId.parse(more + part.name) is None
    assert PartId.parse(part.name.replace("step-", "step-0", 1)) is None or part.save.step == 0
    assert PartId.parse(part.name + more) is None or more in "01"


@pytest.mark.parametrize("what", ["the part", "its marker"])
def test_what_vanishes_while_it_is_listed_is_not_there(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A part that another rank of the node removes at that moment is left out; one that loses a file is damaged."""
    ranks.run(1, save_steps, str(tmp_path), None, [1])
    folder = PartFolder(tmp_path / "node0")
    (part,) = folder.list_parts().parts

    def reading_late(path: Path, plugins: Any) -> Any:
        if what == "the part":
            shutil.rmtree(path)
        else:
            (path / "metadata.json").unlink()
        return read_manifest(path, plugins)

    monkeypatch.setattr(parts, "read_manifest", reading_late)
    found = folder.list_parts().parts
    assert list(found) == ([] if what == "the part" else [part])
    assert all(found.values())
