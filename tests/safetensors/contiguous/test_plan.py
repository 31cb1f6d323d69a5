from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import Record
from shardckpt.storage.digest import Segments
from shardckpt.testing import check_same
from tests.safetensors.contiguous import jobs
from tests.states import error_of

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks


def _check(folder: Path, change: float = 0.0) -> None:
    """Check that a folder has all tensors, for us and for others, and that it is sound."""
    expected = jobs.make_tensors(change)
    found, ours = jobs.read_like_vllm(folder), dc.load_plain_tensors(folder)
    assert found.keys() == ours.keys() == expected.keys()
    for key, tensor in expected.items():
        check_same(found[key], tensor, key)
        check_same(ours[key], tensor, key)
    assert not [result for result in verify_checkpoint(folder) if result.fault or result.foreign]


def test_the_bytes_do_not_depend_on_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """1 to 4 ranks, which cut rows or columns, evenly or not, write the same files, and the right values."""
    jobs.save(str(tmp_path / "0"))
    expected = jobs.digest_weights(tmp_path / "0")
    assert len(expected) == 4
    for world in (1, 2, 3, 4):
        ranks.run(world, jobs.save, str(tmp_path / str(world)))
        assert jobs.digest_weights(tmp_path / str(world)) == expected
        _check(tmp_path / str(world))
    assert ranks.run(3, jobs.load, str(tmp_path / "4")) == [[], [], []]


def test_inference_tools_find_nothing_strange(tmp_path: Path) -> None:
    """The files that the index names have the model's tensors alone, without padding, and all files open."""
    jobs.save(str(tmp_path / "c"))
    weight_map = json.loads((tmp_path / "c" / jobs.INDEX).read_text())["weight_map"]
    assert weight_map.keys() == jobs.make_tensors().keys()
    for file in (tmp_path / "c").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if file.name in weight_map.values():
                assert opened.metadata() == {"format": "pt"}
                assert {weight_map[name] for name in opened.keys()} == {file.name}  # noqa: SIM118 - not a dict
    index = json.loads((tmp_path / "c" / "index.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert json.loads(index["__metadata__"]["shardckpt"])["required_features"] == ["unaligned"]


def test_ranks_write_their_own_rows(ranks: Ranks, tmp_path: Path) -> None:
    """Of a tensor of full pages, each of 4 ranks writes its rows itself: the table of digests has four ranges of it."""
    ranks.run(4, jobs.save, str(tmp_path / "c"))
    record = Record.parse((tmp_path / "c" / "shardckpt.json").read_bytes())
    name = json.loads((tmp_path / "c" / jobs.INDEX).read_text())["weight_map"]["layers.0.up"]
    (file,) = (file for file in record.files if file.name == name)
    assert isinstance(file.segments, str)
    table = Segments.unpack(file.segments, file.digest, file.size, record.digest_algorithm)
    assert list(table.lengths).count(128 << 10) == 4


def test_auto_takes_what_costs_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Rows, and what one rank has, are stored contiguously; columns stay boxes, under no name of the folder."""
    for world, names in (
        (4, jobs.make_tensors().keys()),
        (2, {"count", "empty", "mask", "layers.2.norm", "layers.2.bias"}),
    ):
        path = tmp_path / str(world)
        ranks.run(world, partial(jobs.save, layout="auto"), str(path))
        assert json.loads((path / jobs.INDEX).read_text())["weight_map"].keys() == names
        ours = dc.load_plain_tensors(path)
        for key, tensor in jobs.make_tensors().items():
            check_same(ours[key], tensor, key)


@pytest.mark.parametrize(
    "way", ["any replica", "fully parallel", "store", "thread", pytest.param("process", marks=pytest.mark.ci)]
)
def test_every_way_of_saving_writes_the_same_files(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """Whoever writes a replica, in front of the training or behind it, at first and by the cached plan, on a store."""
    ranks.run(3, jobs.save_in_a_way, str(tmp_path / "c"), way)
    for number in (0, 1):
        jobs.save(str(tmp_path / str(number)), number)
        assert jobs.digest_weights(tmp_path / "c" / str(number)) == jobs.digest_weights(tmp_path / str(number))
        _check(tmp_path / "c" / str(number), number)


def test_missing_elements_fail_the_save_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A row that no rank has is an error, though nobody has validated the shards; nothing is there."""
    errors = ranks.run(4, error_of, jobs.save_partly, str(tmp_path / "c"))
    assert len(set(errors)) == 1
    assert errors[0][0] in ("StorageError", "ShardingError")
    assert "validate_access_integrity=True" in errors[0][1]
    assert not (tmp_path / "c").exists()
