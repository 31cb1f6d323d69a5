from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.distributed.comm import Comm
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.validation.sharding import validate_shards
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


class _Counting(Comm):
    """Counts the bytes that this rank tells others as pickles."""

    told = 0

    def gather_some(self, value: Any, *, given: bool) -> list[Any]:
        self.told += len(pickle.dumps(value)) if given else 0
        return super().gather_some(value, given=given)

    def broadcast(self, value: Any) -> Any:
        self.told += len(pickle.dumps(value)) if self.is_main else 0
        return super().broadcast(value)


def _rows(key: str, rows: int, mine: list[int], replica: int = 0) -> list[ShardedTensor]:
    """Some rows of a tensor, a shard each."""
    return [
        ShardedTensor(key, None, torch.float32, (1, 3), (rows, 3), (row, 0), None, replica_id=replica) for row in mine
    ]


def _told(rows: int) -> int:
    comm = _Counting()
    mine = list(range(comm.rank, rows, comm.world_size))
    validate_shards([shard for key in "abc" for shard in _rows(key, rows, mine)], comm)
    return comm.told


def test_what_ranks_tell_does_not_grow_with_their_shards(ranks: Ranks) -> None:
    """For the same keys a rank tells the same number of bytes, be they in 10 pieces or in 1,000."""
    few, many = ranks.run(2, _told, 10), ranks.run(2, _told, 1_000)
    assert [abs(one - other) < 10 for one, other in zip(few, many, strict=True)] == [True, True]
    assert few[1] < 100


def _broken(seed: int) -> tuple[str, str]:
    """Rows dealt out to ranks at random, and one of them lost or claimed twice; what is said, and what should be."""
    rng = random.Random(seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    owner = [rng.randrange(world) for _ in range(40)]
    row, rows = rng.randrange(40), [list[int]() for _ in range(world)]
    for number, one in enumerate(owner):
        rows[one].append(number)
    if seed % 2:
        rows[owner[row]].remove(row)
        wanted = f"no shard describes [{row}:{row + 1}, 0:3]"
    else:
        rows[(owner[row] + 1) % world].append(row)
        wanted = f"[{row}:{row + 1}, 0:3] is described as the main replica twice"
    sound = _rows("sound", 40, [n for n, one in enumerate(owner) if one == rank])
    with pytest.raises(ShardingError) as caught:
        validate_shards([*sound, *_rows("broken", 40, rows[rank])], Comm())
    return str(caught.value), wanted


@pytest.mark.parametrize("seed", [0, *in_proof(1, 2, 3)])
def test_one_wrong_row_is_named_with_its_key_on_every_rank(ranks: Ranks, seed: int) -> None:
    """However rows are dealt out, the one that is missing or there twice is named, and no sound tensor is."""
    for text, wanted in ranks.run(4, _broken, seed):
        assert f"tensor 'broken': {wanted}" in text
        assert "sound" not in text


def _disagreeing(what: str) -> str:
    rank = dist.get_rank()
    copies = _rows("k", 4, [0, 1, 2, 3], replica=rank)
    if rank == 1 and what == "dtype":
        copies = [ShardedTensor("k", None, torch.float16, (4, 3), (4, 3), (0, 0), None, replica_id=1)]
    if rank == 1 and what == "global_shape":
        copies = [ShardedTensor("k", None, torch.float32, (4, 3), (5, 3), (0, 0), None, replica_id=1)]
    with pytest.raises(ShardingError) as caught:
        validate_shards(copies, Comm())
    return str(caught.value)


@pytest.mark.parametrize("what", ["dtype", "global_shape"])
def test_copies_must_agree_too(ranks: Ranks, what: str) -> None:
    """A copy that is not stored and says something else of the whole is an error that names both ranks."""
    for text in ranks.run(2, _disagreeing, what):
        assert f"ranks disagree on its {what}" in text
        assert "on rank 0" in text
        assert "on rank 1" in text


def _names_a_key_twice(path: str) -> str:
    comm = Comm()
    state: dict[str, Any] = {"model": _rows("w", 2, [comm.rank])}
    if comm.rank == 1:
        state["ema"] = {"w": _rows("w", 2, [1])[0]}
    for shard in [*state["model"], *state.get("ema", {}).values()]:
        shard.init_data("cpu")
    with pytest.raises(ShardingError) as caught:
        dist_checkpointing.save(state, path)
    return str(caught.value)


def test_a_key_that_one_rank_names_twice_is_said_with_its_places(ranks: Ranks, tmp_path: Path) -> None:
    """Of two tensors of one rank with one key, the error says the rank, and where in its state dict both stand."""
    for found in ranks.run(2, _names_a_key_twice, str(tmp_path / "c")):
        assert "[1:2, 0:3] is described as the main replica twice, both times by rank 1, which names this key" in found
        assert "at ['model'][0] and at ['ema']['w']: give each a key of its own" in found
