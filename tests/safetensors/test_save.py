from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError
from shardckpt.maintenance import verify_checkpoint
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.testing import check_same
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.damage import flip
from tests.safetensors.checkpoints import BIAS, ROWS, save
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks


def _save_rows(path: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = ShardedTensor.from_rank_offsets("w", ROWS.chunk(world)[rank].clone(), (0, rank, world))
    dc.save({"w": shard, "o": ShardedObject("o", rank, (world,), (rank,))}, path, SafetensorsSaveShardedStrategy())


def test_stock_safetensors_opens_every_data_file(tmp_path: Path) -> None:
    """safe_open gives an entire tensor under its name, and each piece with its range, with the saved values."""
    save(tmp_path / "c")
    found = {}
    for file in sorted((tmp_path / "c").glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    assert torch.equal(found["layers.0.bias"], BIAS)
    for low in (0, 4, 8):
        assert torch.equal(found[f"layers.0.weight[{low}:{low + 4},0:4]"], ROWS[low : low + 4])


def test_payloads_are_aligned_and_large_ones_lie_as_in_memory(tmp_path: Path) -> None:
    """Payloads begin at multiples of 64; one of 1 MiB and more is congruent to its address modulo 4096."""
    tensors = {f"t{n}": torch.full((n,), float(n)) for n in (1, 33, 1 << 18, 5, (1 << 18) + 1)}
    dc.save(
        entire(tensors),
        tmp_path / "c",
        SafetensorsSaveShardedStrategy(),
    )
    data = (tmp_path / "c" / "rank_0_0.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in tensors.items():
        start = 8 + length + header[name]["data_offsets"][0]
        assert start % 64 == 0
        if tensor.nbytes >= 1 << 20 and tensor.data_ptr() % 64 == 0:
            assert (start - tensor.data_ptr()) % 4096 == 0
        assert torch.equal(torch.frombuffer(bytearray(data[start : start + tensor.nbytes]), dtype=tensor.dtype), tensor)


def test_several_files(tmp_path: Path) -> None:
    """With thread_count a rank writes as many files, each of which opens, and all is loaded."""
    save(tmp_path / "c", thread_count=3)
    assert len(list((tmp_path / "c").glob("rank_0_*.safetensors"))) == 3
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["layers.0.weight"], ROWS)
    with pytest.raises(CheckpointingException, match="thread_count=0"):
        SafetensorsSaveShardedStrategy(thread_count=0)


def test_ranks_write_files_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """Three ranks write a file each, and the main rank the index of all."""
    ranks.run(3, _save_rows, str(tmp_path / "c"))
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names >= {f"rank_{rank}_0.safetensors" for rank in range(3)} | {"index.safetensors", "common.safetensors"}
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], ROWS)
    objects = [ShardedObject("o", None, (3,), (rank,)) for rank in range(3)]
    assert dc.load({"o": objects}, tmp_path / "c", validate_access_integrity=False)["o"] == [0, 1, 2]


@table("key", ["", "a\0b", "x" * 4097, "\ud800"])
def test_keys_that_the_format_cannot_hold_are_refused(tmp_path: Path, key: str) -> None:
    """A key that is empty, has NUL, is too long or is not UTF-8 fails the save, and nothing is there."""
    with pytest.raises(ShardingError, match="cannot be stored"):
        dc.save(
            {"w": ShardedTensor.from_rank_offsets(key, torch.ones(2))}, tmp_path / "c", SafetensorsSaveShardedStrategy()
        )
    assert not (tmp_path / "c").exists()


def test_names_that_headers_need_for_themselves(tmp_path: Path) -> None:
    """Keys such as __metadata__, and that of another tensor's piece, are saved and loaded like any other."""
    tensors = {
        key: torch.full((2,), float(n)) for n, key in enumerate(("__metadata__", "__padding__0", "w[0:2]", "w[2:4]"))
    }
    state = entire(tensors)
    pieces = [ShardedTensor.from_rank_offsets("w", torch.full((2,), 9.0 + n), (0, n, 2)) for n in range(2)]
    dc.save({**state, "pieces": pieces}, tmp_path / "c", SafetensorsSaveShardedStrategy())
    loaded = dc.load_plain_tensors(tmp_path / "c")
    assert loaded.pop("w").tolist() == [9.0, 9.0, 10.0, 10.0]
    for key, tensor in tensors.items():
        check_same(loaded[key], tensor, key)
    with safe_open(tmp_path / "c" / "rank_0_0.safetensors", framework="pt") as opened:
        assert len(set(opened.keys())) >= 6


def test_an_object_of_another_size_is_planned_anew(tmp_path: Path) -> None:
    """A save by a cached plan whose object has grown has the new object, and the tensors behind it."""
    strategy = SafetensorsSaveShardedStrategy()
    for n in (1, 1000):
        shard = ShardedTensor.from_rank_offsets("w", torch.full((3,), float(n)))
        dc.save({"w": shard, "o": ShardedObject("o", "x" * n, (1,), (0,))}, tmp_path / f"{n}", strategy)
        loaded = dc.load(
            {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3)), "o": ShardedObject("o", None, (1,), (0,))},
            tmp_path / f"{n}",
        )
        assert loaded["o"] == "x" * n
        assert loaded["w"].tolist() == [float(n)] * 3


@table("thread_count", [1, 3])
def test_many_small_tensors_among_large_ones(tmp_path: Path, thread_count: int) -> None:
    """Small tensors, which are written by runs, have their values, in one file or in several, by a cached plan, too."""
    sizes = [*(n % 50 for n in range(400)), 40_000, 3, 300_000, *[7] * 300]
    strategy = SafetensorsSaveShardedStrategy(thread_count=thread_count)
    for step in range(2):
        tensors = {f"t{n}": torch.full((size,), float(n + step)) for n, size in enumerate(sizes)}
        tensors["t5"] = torch.randn(5, 2)[:, 0]
        state = entire(tensors)
        dc.save(state, tmp_path / f"c{step}", strategy)
        found = dc.load_plain_tensors(tmp_path / f"c{step}")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
        assert not [result.fault for result in verify_checkpoint(tmp_path / f"c{step}") if result.fault]


def test_a_damaged_small_tensor_leaves_its_neighbours(tmp_path: Path) -> None:
    """Small tensors that are written by one call have a digest each: damage is named by key and file, others load."""
    tensors = {f"t{n}": torch.full((20,), float(n)) for n in range(100)}
    dc.save(
        entire(tensors),
        tmp_path / "c",
        SafetensorsSaveShardedStrategy(),
    )
    flip(tmp_path / "c" / "rank_0_0.safetensors", tensors["t50"].numpy().tobytes())
    for key in ("t49", "t51"):
        assert torch.equal(
            dc.load({key: ShardedTensor.from_rank_offsets(key, torch.zeros(20))}, tmp_path / "c")[key], tensors[key]
        )
    with pytest.raises(CorruptCheckpointError, match=r"t50: .*rank_0_0\.safetensors.*digest differs"):
        dc.load({"t50": ShardedTensor.from_rank_offsets("t50", torch.zeros(20))}, tmp_path / "c")
