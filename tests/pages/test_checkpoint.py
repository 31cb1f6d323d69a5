"""What a page has of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.maintenance.sources import open_any
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.pages.checkpoint import describe_checkpoint, describe_layouts
from shardckpt.strategy import StoredBox
from tests.backends import Backend, both
from tests.cli.checkpoints import copy_golden, save_plain_dcp
from tests.torch_checkpointing.golden import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HEADER = {"name": "c", "backend": "torch_dist", "version": 1}


def _describe(path: Path, prefix: str = "") -> dict[str, Any]:
    with dc.open_checkpoint(path) as checkpoint:
        return describe_checkpoint(checkpoint, HEADER, prefix)


def _list_boxes(data: dict[str, Any], key: str) -> list[tuple[int, ...]]:
    """The boxes of a tensor, as the page's script cuts them: file, offsets, extents."""
    number = data["keys"].index(key)
    row, width = data["layouts"][data["layout"][number]], 1 + 2 * len(data["shapes"][data["shape"][number]])
    return [tuple(row[at : at + width]) for at in range(0, len(row), width)]


@both
def test_a_page_has_each_box_with_its_file(backend: Backend, tmp_path: Path) -> None:
    """Tensors, boxes, files with ranks and sizes, objects and common state of a checkpoint are in columns."""
    halves = [ShardedTensor.from_rank_offsets("m.w", torch.ones(2, 3), (0, n, 2)) for n in range(2)]
    state: dict[str, Any] = {"w": halves, "s": ShardedTensor.from_rank_offsets("m.s", torch.tensor(1.0))}
    dc.save(state | {"o": ShardedObject("rng", 1, (1,), (0,)), "iteration": 3}, tmp_path / "c")
    data = _describe(tmp_path / "c")
    assert data["keys"] == ["m.s", "m.w"]
    assert data["nbytes"] == [4, 48]
    assert [data["shapes"][n] for n in data["shape"]] == [[], [4, 3]]
    (one,), two = _list_boxes(data, "m.s"), _list_boxes(data, "m.w")
    assert {box[1:] for box in two} == {(0, 0, 2, 3), (2, 0, 2, 3)}
    assert {data["fileRank"][box[0]] for box in [one, *two]} == {0}
    assert {data["boxFiles"][box[0]] for box in two} <= set(data["files"])
    assert all(size > 0 for size in data["fileBytes"])
    assert (data["objects"], data["common"], data["boxesFault"]) == (["rng/shard_0_1"], ["iteration"], "")
    assert _describe(tmp_path / "c", "m.w")["keys"] == ["m.w"]


def test_a_page_of_other_libraries_checkpoints_says_what_they_do_not(tmp_path: Path) -> None:
    """Boxes and files come from the index; ranks and timings are unknown, and nothing is made up."""
    for place in (copy_golden("0.12.3", tmp_path), save_plain_dcp(tmp_path)):
        data = _describe(place)
        assert set(data["fileRank"]) == {-1}
        assert data["timings"] is None
        assert -1 not in data["layout"]
        assert dict(zip(data["files"], data["fileBytes"], strict=True)) == {
            name: (place / name).stat().st_size for name in data["files"]
        }


def test_a_page_names_what_it_shows_of_a_file_that_was_cut(tmp_path: Path) -> None:
    """Of a file that was cut, tensors and objects of the page are named and counted, not those of other libraries."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "o": ShardedObject("rng", 1, (1,), (0,))}
    dc.save({**state, "plain": PlainObject("lr", 0.5)}, tmp_path / "c", "torch_dist")
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1])
    (fault,) = _describe(tmp_path / "c")["incomplete"]
    assert (sorted(fault["keys"]), fault["keyCount"]) == (["rng/shard_0_1", "w"], 2)
    (fault,) = _describe(tmp_path / "c", "w")["incomplete"]
    assert (fault["keys"], fault["keyCount"]) == (["w"], 1)


def test_a_page_of_a_folder_or_file_of_other_libraries_has_its_boxes(tmp_path: Path) -> None:
    """torch_checkpointing's pieces, Hugging Face's files and one file of torch.save are drawn as boxes, too."""
    save_file({"w": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    torch.save({"model": {"w": torch.ones(4, 2)}, "step": 3}, tmp_path / "state.pt")
    cut = _describe(GOLDEN / "mesh-4")
    assert cut["boxesFault"] == ""
    assert {len(_list_boxes(cut, key)) for key in cut["keys"] if key.endswith("0.weight")} == {4}
    for place, key in ((tmp_path, "w"), (tmp_path / "state.pt", "model.w")):
        with open_any(place) as checkpoint:
            data = describe_checkpoint(checkpoint, HEADER)
        ((file, *box),) = _list_boxes(data, key)
        assert data["boxFiles"][file] == ("state.pt" if place.suffix else "model.safetensors")
        assert box == [0, 0, 4, 2]


def test_tensors_that_are_cut_alike_share_a_layout() -> None:
    """A page of many layers has each layout once; too many boxes are left out, and counted."""
    boxes = [StoredBox(f"layers.{n}.w", (row, 0), (1, 8), f"f{row}") for n in range(100) for row in range(4)]
    boxes.append(StoredBox("other", (0,), (8,), "f9"))
    keys = [*(f"layers.{n}.w" for n in range(100)), "other"]
    found = describe_layouts(boxes, keys, ["f0", "f1"])
    assert len(found["layouts"]) == 2
    assert found["layout"] == [0] * 100 + [1]
    assert found["boxFiles"] == ["f0", "f1", "f2", "f3", "f9"]
    cut = describe_layouts(boxes, keys, [], most=4)
    assert cut["layout"] == [0] * 100 + [-1]
    assert cut["boxesLeftOut"] == 1


def test_boxes_that_cannot_be_listed_leave_a_page_without_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that does not list boxes has a page, which says why it has no maps."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, tmp_path / "c")
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        monkeypatch.setattr(checkpoint, "list_boxes", lambda: None)
        data = describe_checkpoint(checkpoint, HEADER)
    assert data["layout"] == [-1]
    assert "does not say which file" in data["boxesFault"]


def test_a_page_has_the_largest_number(tmp_path: Path) -> None:
    """A page with statistics of the largest float64, which five digits would round to infinity, is written."""
    value = torch.finfo(torch.float64).max
    w = torch.tensor([-value, value], dtype=torch.float64)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", w)}, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c"), "--stats", "--html", str(tmp_path / "page.html")]) == 0
    assert '"minimum":[-1.7976931348623157e+308]' in (tmp_path / "page.html").read_text()
