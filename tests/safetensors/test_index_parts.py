from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.maintenance import verify_checkpoint
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Boxes
from shardckpt.storage import Columns, pack_columns
from shardckpt.testing.contract.rewriting import open_reader, reseal
from shardckpt_safetensors import SafetensorsLoadShardedStrategy, SafetensorsSaveShardedStrategy, index_parts, remove
from shardckpt_safetensors.index import read_index
from shardckpt_safetensors.index_names import FEATURE
from tests.ranks import Failure, Ranks
from tests.resources import watch_reads
from tests.safetensors.index_parts import check_content, list_parts, path
from tests.safetensors.parts import VALUES, InParts, make_state
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["path"]  # fixtures


def _save(path: str, rounds: int = 1) -> None:
    for number in range(rounds):
        dc.save(make_state(), f"{path}{number}", InParts())


def _load(path: str) -> None:
    wanted = make_state(filled=False)
    del wanted["object"]  # one for each rank that saved
    loaded = dc.load(wanted, path)
    for key, shards in make_state().items():
        if key in VALUES:
            assert all(torch.equal(a, b.data) for a, b in zip(loaded[key], shards, strict=True))
    world = dist.get_world_size()
    for key, value in VALUES.items():  # cut in another way: each rank gets a range of the first axis, or all
        size = value.shape[0] if value.dim() else 1
        low, high = dist.get_rank() * size // world, (dist.get_rank() + 1) * size // world
        part = value[low:high] if value.dim() else value
        offset = (low,) + (0,) * (value.dim() - 1) if value.dim() else ()
        wanted = ShardedTensor(f"m.{key}", None, value.dtype, tuple(part.shape), tuple(value.shape), offset, None)
        found = dc.load({"t": wanted}, path, validate_access_integrity=False)["t"]
        assert torch.equal(found, part)


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), *in_proof((1, 2), (4, 1))])
def test_ranks_make_the_index_in_parts(ranks: Ranks, tmp_path: Path, writers: int, readers: int) -> None:
    """Saved by 1, 2 and 4 ranks, a checkpoint with an index in parts is loaded by others, and the page's reader."""
    ranks.run(writers, _save, str(tmp_path / "c"))
    assert len(list_parts(tmp_path / "c0")) > 2
    ranks.run(readers, _load, str(tmp_path / "c0"))
    check_content(tmp_path / "c0")
    objects = [ShardedObject("object", None, (writers,), (rank,)) for rank in range(writers)]
    loaded = dc.load({"o": objects}, tmp_path / "c0", validate_access_integrity=False)["o"]
    assert loaded == [{"rank": rank} for rank in range(writers)]


def test_it_is_migrated_both_ways(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shardckpt migrate` reads an index in parts, and writes one where there are many boxes; the values stay."""
    assert main(["migrate", str(path), str(tmp_path / "old"), "--to", "torch_dist"]) == 0
    monkeypatch.setattr(SafetensorsSaveShardedStrategy, "gathered_bytes", 0)
    monkeypatch.setattr(SafetensorsSaveShardedStrategy, "part_rows", 2)  # each of these tensors becomes one box
    assert main(["migrate", str(tmp_path / "old"), str(tmp_path / "new"), "--to", "safetensors"]) == 0
    assert len(list_parts(tmp_path / "new")) > 1
    check_content(tmp_path / "new")
    assert main(["migrate", str(tmp_path / "new"), str(tmp_path / "again"), "--to", "torch_dist"]) == 0
    for name in ("old", "again"):
        loaded = dc.load_plain_tensors(tmp_path / name)
        assert all(torch.equal(loaded[f"m.{key}"], value) for key, value in VALUES.items())
        wanted = ShardedObject("object", None, (1,), (0,))
        assert dc.load({"o": wanted}, tmp_path / name) == {"o": {"rank": 0}, "step": 5}


def test_a_small_index_is_one_file(tmp_path: Path) -> None:
    """A save of few boxes has one index, without required features, and is loaded as one in parts is."""
    dc.save(make_state(rank=0, world=1), tmp_path / "c", SafetensorsSaveShardedStrategy())
    assert not list_parts(tmp_path / "c")
    with open_reader(tmp_path / "c") as reader:
        assert read_index(reader).header.required_features == []
    check_content(tmp_path / "c")


def _save_wrong(path: str, fault: str, strategy: type[SafetensorsSaveShardedStrategy]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = 3 if fault == "disagree" and rank == 1 else 2
    place = 0 if fault == "hole" else rank
    state = make_state()
    size = (world * rows, 4)
    state["wrong"] = ShardedTensor(
        "m.wrong", torch.ones(rows, 4), torch.float32, (rows, 4), size, (place * rows, 0), None
    )
    if fault == "same key" and rank == 1:
        state["other"] = ShardedTensor.from_rank_offsets("object/shard_0_2", torch.ones(2))
    if fault == "same key":
        del state["wrong"]
    dc.save(state, path, strategy(), validate_access_integrity=False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("disagree", "ranks disagree on it"), ("hole", "do not fill 1 tensor exactly"), ("same key", "rename one")],
)
def test_owners_refuse_what_the_main_rank_refuses(ranks: Ranks, tmp_path: Path, fault: str, message: str) -> None:
    """A hole, a shape that ranks disagree on, a key that is there twice: the same error on all ranks, either way."""
    texts = []
    for strategy in (InParts, SafetensorsSaveShardedStrategy):
        outcomes = ranks.outcomes(2, _save_wrong, str(tmp_path / "c"), fault, strategy)
        assert all(isinstance(outcome, Failure) for outcome in outcomes)
        found = [outcome.trace.strip().splitlines()[-1] for outcome in outcomes]
        assert found[0] == found[1]
        assert message in found[0]
        texts.append(found[0].partition("ShardingError")[2])
        assert not (tmp_path / "c").exists()
    assert texts[0].partition("'planning")[2] == texts[1].partition("'planning")[2]


def _tile(shape: tuple[int, ...], rng: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box in two, again and again, at random."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(40)):
        offset, extent = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape))
        if extent[axis] < 2:
            boxes.append((offset, extent))
            continue
        at = rng.randrange(1, extent[axis])
        boxes.append((offset, (*extent[:axis], at, *extent[axis + 1 :])))
        moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        boxes.append((moved, (*extent[:axis], extent[axis] - at, *extent[axis + 1 :])))
    return boxes


@table("most_pairs", [1 << 22, 0], ids=["pages", "all rows"])
def test_the_pages_of_a_region_have_all_of_its_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_pairs: int
) -> None:
    """Of tensors cut at random, the boxes that are taken for random regions are those that share elements, and few."""
    monkeypatch.setattr(index_parts, "_MOST_PAIRS", most_pairs)
    rng = random.Random(7)
    shapes = {f"t{n}": tuple(rng.randrange(1, 12) for _ in range(rng.randrange(1, 4))) for n in range(30)}
    tiles = {key: _tile(shape, rng) for key, shape in shapes.items()}
    state = {
        key: [
            ShardedTensor(key, torch.zeros(extent), torch.float32, extent, shapes[key], offset, None)
            for offset, extent in boxes
        ]
        for key, boxes in tiles.items()
    }
    dc.save(state, tmp_path / "c", InParts())
    taken = total = 0
    with open_reader(tmp_path / "c") as reader:
        index = read_index(reader)
        index.check()
        for _ in range(40):
            keys = rng.sample(sorted(shapes), 3)
            numbers = torch.tensor(sorted(index.numbers[key] for key in keys))
            boxes = Boxes()
            for place, number in enumerate(numbers.tolist()):
                shape = index.shapes[number]
                low = [rng.randrange(size) for size in shape]
                extent = [rng.randint(1, min(2, size - start)) for size, start in zip(shape, low, strict=True)]
                boxes.add(place, tuple(low), tuple(extent))
            chunks, bounds = index.select_chunks(numbers, boxes.table)
            every, _ = index.select_chunks(numbers)
            assert int(bounds[-1]) == len(chunks.box.spec)
            found = _list_touching(chunks.box, boxes)
            assert found == _list_touching(every.box, boxes)
            assert found
            taken, total = taken + len(chunks.box.spec), total + len(every.box.spec)
    assert taken < 0.8 * total if most_pairs else taken == total


def _list_touching(table: Any, boxes: Boxes) -> set[tuple[int, ...]]:
    found = set()
    rows = zip(table.spec.tolist(), table.offset.tolist(), table.extent.tolist(), strict=True)
    for spec, offset, extent in rows:
        low, size = boxes.offsets[spec], boxes.extents[spec]
        if all(a < b + c and b < a + d for a, d, b, c in zip(offset, extent, low, size, strict=False)):
            found.add((spec, *offset))
    return found


def test_a_slice_reads_few_pages(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one row of 60, the reader takes one page of its tensor's rows, and none of another tensor's."""
    with open_reader(path) as reader:
        read_index(reader)
        reads = watch_reads(monkeypatch)
        boxes = Boxes()
        boxes.add(0, (31, 0), (1, 4))
        index = read_index(reader)
        chunks, _ = index.select_chunks(torch.tensor([index.numbers["m.rows"]]), boxes.table)
    assert [31, 0] in chunks.box.offset[:, :2].tolist()
    assert len(chunks.box.spec) <= 6
    assert sum(read.nbytes for read in reads) <= 6 * 16


def _change_part(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the columns and the JSON of the part with ``m.rows``, and make right digests."""
    for name in list_parts(path):
        found = Columns((path / name).read_bytes(), name)
        names = (
            *("text", "text_end", "tensor", "tensor_dtype", "tensor_axes", "tensor_shape", "tensor_end"),
            *("tensor_reach", "page_offset", "box"),
        )
        columns: dict[str, Any] = {column: found.integers(column) for column in names}
        if b"rows" in bytes(columns["text"].tolist()):
            header = json.loads(found.metadata["shardckpt"])
            change(columns, header)
            (path / name).write_bytes(pack_columns(columns, {"shardckpt": json.dumps(header)}))
    reseal(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda columns, _: columns["page_offset"][1, 0].add_(1),
        lambda columns, _: columns["tensor_reach"][0, 0].add_(1),
        lambda columns, _: columns.update(box=columns["box"][:-1]),
        lambda columns, _: columns["tensor_end"][-1].add_(1),
        lambda _, header: header["row"].__setitem__(0, "F32"),
        lambda _, header: header.update(page=0),
        lambda columns, _: columns.update(box=columns["box"][[1, 0, *range(2, len(columns["box"]))]]),
        lambda columns, _: columns["box"][0, -2].fill_(99),  # of row 0 the file; its start is one byte behind it
    ],
    ids=["page", "reach", "row missing", "end", "dtype", "page of no rows", "order", "file"],
)
def test_a_part_that_contradicts_itself_is_refused(path: Path, change: Callable[..., None]) -> None:
    """What the head of a part says of its rows is checked with everything else; an error names the index."""
    _change_part(path, change)
    assert [result.name for result in verify_checkpoint(path) if result.fault]
    with pytest.raises(CorruptCheckpointError, match=r"index(_\d+)?\.safetensors"), open_reader(path) as reader:
        read_index(reader).check()


def test_a_part_that_is_not_what_was_written_is_named(path: Path) -> None:
    """A part that is gone or damaged is named, with and without digests; all others are fine."""
    part = path / list_parts(path)[0]
    content = part.read_bytes()
    for changed in (content[:-1], content[:9] + b"[" + content[10:], None):
        part.unlink() if changed is None else part.write_bytes(changed)
        with pytest.raises(CheckpointingException, match=part.name):
            dc.load_plain_tensors(path)
        assert [result.name for result in verify_checkpoint(path) if result.fault] == [part.name]
        with open_reader(path, with_record=False) as reader:
            found = SafetensorsLoadShardedStrategy().check_files(reader)
        assert [name for name, error in found.items() if error is not None] == [part.name]
    part.write_bytes(content)
    with open_reader(path, with_record=False) as reader:
        found = SafetensorsLoadShardedStrategy().check_files(reader)
        listed = {file.name for file in SafetensorsLoadShardedStrategy().list_files(reader)}
    assert not any(found.values())
    assert found.keys() == listed >= {*list_parts(path)}


@pytest.mark.parametrize("most", [remove.MOST_ROWS, 0], ids=["into one", "in parts"])
def test_keys_are_removed_from_an_index_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """What stays is in one file if it is small, else in the same parts, of which those without tensors go."""
    monkeypatch.setattr(remove, "MOST_ROWS", most)
    before = list_parts(path)
    dc.remove_sharded_tensors(path, "m.r")
    assert len(list_parts(path)) == (0 if most else len(before) - 1)
    loaded = dc.load_plain_tensors(path)
    assert loaded.keys() == {f"m.{key}" for key in VALUES} - {"m.rows"}
    assert all(torch.equal(loaded[f"m.{key}"], value) for key, value in VALUES.items() if key != "rows")
    assert not [result for result in verify_checkpoint(path) if result.fault]
    with open_reader(path) as reader:
        assert read_index(reader).header.required_features == ([] if most else [FEATURE])
    dc.remove_sharded_tensors(path, "m.")
    assert dc.load_plain_tensors(path) == {}
    assert dc.load({"o": ShardedObject("object", None, (1,), (0,))}, path)["o"] == {"rank": 0}


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_scalars_have_no_axes_in_numbers_of_any_width(kind: torch.dtype, count: int) -> None:
    """A part by another writer may name any integers for the axes of tensors that have none."""
    found = index_parts._from_bytes(torch.empty(count, 0, dtype=torch.uint8), kind)
    assert (found.dtype, tuple(found.shape)) == (torch.int64, (count, 0))
