"""An error on one rank is the same error on every rank, nothing is left behind, and the same processes go on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.strategy import SaveContext, SaveStrategy
from tests import backends
from tests.faults import samples
from tests.faults.attempts import BAD, Attempt, attempt, save_with
from tests.faults.rank_errors import SIZES, one_error, set_on_rank

if TYPE_CHECKING:
    from tests.backends import Backend
    from tests.ranks import Ranks


def _bad_shape(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == 1:
        state["split"].data = torch.zeros(5, 8)


def _leaves_the_whole(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == 1:
        state["split"].global_offset = (samples.ROWS, 0)


def _overlap(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == 1:
        shard = state["uneven"]
        state["uneven"] = replace(shard, global_offset=(shard.global_offset[0] - 1, 0))


def _second_main_replica(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == world - 1:
        state["half"].replica_id = 0


def _hole_in_a_regular_grid(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == world - 1:
        del state["split"]


def _hole_in_an_irregular_grid(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == world - 1:
        del state["uneven"]


def _no_main_replica(state: dict[str, Any], rank: int, world: int) -> None:
    state["layer"].replica_id = rank + 1


def _other_dtype(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == 1:
        state["half"] = ShardedTensor.from_rank_offsets("half", torch.zeros(33), replica_id=1)


def _other_global_shape(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == 1:
        state["uneven"] = replace(state["uneven"], global_shape=(samples.UNEVEN + 1, 3))


def _broken_factory(state: dict[str, Any], rank: int, world: int) -> None:
    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> Any:
        if rank == 1:
            raise ValueError("no layout for this one")
        return {"q": ShardedTensor.from_rank_offsets("q", data, (0, rank, world))}

    state["fused"] = ShardedTensorFactory("fused", torch.ones(4), build, lambda nest: nest["q"])


def _function_as_object(state: dict[str, Any], rank: int, world: int) -> None:
    if rank == 1:
        state["mine"] = ShardedObject("mine", lambda: 0, (1,), (0,))


def _function_as_common(state: dict[str, Any], rank: int, world: int) -> None:
    state["callback"] = lambda: 0


@backends.both_in_proof
@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize(
    ("spoil", "kind", "texts"),
    [
        (_bad_shape, "ShardingError", ["rank 1, in 'preparing the state dict'", "'split'", "data has shape (5, 8)"]),
        (_leaves_the_whole, "ShardingError", ["rank 1, in 'preparing the state dict'", "'split'", "leaves the global"]),
        (_overlap, "ShardingError", ["tensor 'uneven'", "main replica twice, by rank 0 and rank 1"]),
        (_second_main_replica, "ShardingError", ["tensor 'half'", "twice, by rank 0 and rank {last}", "replica_id"]),
        (_hole_in_a_regular_grid, "ShardingError", ["tensor 'split'", "no shard describes", ":12, 0:8]", "(12, 8)"]),
        (
            _hole_in_an_irregular_grid,
            "ShardingError",
            ["tensor 'uneven'", "no shard describes", ":11, 0:3]", "(11, 3)"],
        ),
        (_no_main_replica, "ShardingError", ["tensor 'layer'", "no rank holds a main replica"]),
        (_other_dtype, "ShardingError", ["'half'", "dtype", "bfloat16 on rank 0", "float32 on rank 1"]),
        (_other_global_shape, "ShardingError", ["'uneven'", "global_shape", "(11, 3) on rank 0", "(12, 3) on rank 1"]),
        (
            _broken_factory,
            "RankFailedError",
            ["rank 1, in 'preparing the state dict'", "ValueError: no layout for this"],
        ),
        (_function_as_object, "ShardingError", ["rank 1, in '{encodes} objects'", "'mine/shard_0_1'", "function"]),
        (_function_as_common, "ShardingError", ["rank 0, in '{encodes} the common state'", "['callback']"]),
    ],
)
def test_bad_state_on_one_rank(
    ranks: Ranks, tmp_path: Path, backend: Backend, world: int, spoil: Any, kind: str, texts: list[str]
) -> None:
    """A state dict that is wrong on one rank is refused on all, with rank, phase and key, before a file is left."""
    found = one_error(ranks.run(world, save_with, str(tmp_path), spoil))
    assert found.kind == kind
    for text in texts:
        assert text.format(last=world - 1, encodes=backend.save_strategy().encoding) in found.message


class QuotaError(ValueError):
    """A plugin's exception from outside the family."""


class OverQuota(SaveStrategy):
    """A strategy that fails on the last rank."""

    backend, version = "quota", 1

    def save(self, shards: Any, common: Any, context: SaveContext) -> None:
        """Fail on the last rank."""
        if context.comm.rank == context.comm.world_size - 1:
            raise QuotaError("the quota is used up")


def _save_over_quota(directory: str) -> tuple[Attempt, bool]:
    caught = False

    def action(target: Path) -> None:
        nonlocal caught
        try:
            samples.save(target, BAD, sharded_strategy=OverQuota())
        except QuotaError:
            caught = True
            raise

    return attempt(directory, action), caught


@backends.both_in_proof
@pytest.mark.parametrize("world", SIZES)
def test_a_plugins_own_exception(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """A strategy's exception of a class of its own is caught as itself and as one of the family on every rank."""
    results = ranks.run(world, _save_over_quota, str(tmp_path))
    found = one_error([found for found, _ in results])
    assert [caught for _, caught in results] == [True] * world
    assert found.kind == "QuotaError"
    where, _, text = found.message.rpartition(": ")
    assert where.startswith(f"rank {world - 1}, in 'writing', in {__name__}.OverQuota of this process, {__file__}:")
    assert text == "the quota is used up"


@backends.both_in_proof
def test_bad_shape_without_validation(ranks: Ranks, tmp_path: Path) -> None:
    """With validate_access_integrity=False a shape that is wrong on one rank is still one error on all."""
    found = one_error(ranks.run(3, _save_unvalidated, str(tmp_path)))
    assert "rank 1, in " in found.message


def _save_unvalidated(directory: str) -> Attempt:
    return save_with(directory, _bad_shape, validate_access_integrity=False)


def _save_with_bad_setting(directory: str) -> Attempt:
    def action(target: Path) -> None:
        with set_on_rank(1, "SHARDCKPT_IO_THREADS", "many"):
            samples.save(target, BAD)

    return attempt(directory, action)


@backends.both_in_proof
def test_bad_setting_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """An environment variable that is wrong on one rank is one error on all, naming the variable."""
    found = one_error(ranks.run(2, _save_with_bad_setting, str(tmp_path)))
    assert "SHARDCKPT_IO_THREADS='many'" in found.message


def _load_after(directory: str, damage: Any) -> Attempt:
    """Save, let the main rank damage it, load on all; then save and load well in the same processes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = samples.template(rank, world)
    samples.save(Path(directory) / "ckpt", BAD)
    damage(Path(directory) / "ckpt", wanted, rank, world)
    dist.barrier()
    return attempt(directory, lambda target: dist_checkpointing.load(wanted, target))


def _flip_in_last_ranks_file(target: Path, wanted: dict[str, Any], rank: int, world: int) -> None:
    if rank == 0:
        path = target / backends.current().data_file(world - 1)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)


def _cut_last_ranks_file(target: Path, wanted: dict[str, Any], rank: int, world: int) -> None:
    if rank == 0:
        os.truncate(target / backends.current().data_file(world - 1), 100)


def _lose_last_ranks_file(target: Path, wanted: dict[str, Any], rank: int, world: int) -> None:
    if rank == 0:
        (target / backends.current().data_file(world - 1)).unlink()


def _want_another_shape(target: Path, wanted: dict[str, Any], rank: int, world: int) -> None:
    if rank == world - 1:
        wanted["split"] = ShardedTensor.from_rank_offsets("split", torch.zeros(3, 8), replica_id=1)


def _want_an_unknown_key(target: Path, wanted: dict[str, Any], rank: int, world: int) -> None:
    if rank == world - 1:
        wanted["nowhere"] = ShardedTensor.from_rank_offsets("nowhere", torch.zeros(3))


@backends.both
@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize(
    ("damage", "kind", "texts"),
    [
        (
            _flip_in_last_ranks_file,
            "CorruptCheckpointError",
            ["rank {last}, in 'reading shards'", "big:", "{file}", "digest differs"],
        ),
        (
            _cut_last_ranks_file,
            "CorruptCheckpointError",
            ["rank {last}, in 'reading shards'", "{file}: it has 100 bytes"],
        ),
        (
            _lose_last_ranks_file,
            "StorageError",
            ["rank {last}, in 'reading shards'", "{file}", "No such file or directory (ENOENT)"],
        ),
        (_want_another_shape, "ShardingError", ["'split'", "global_shape", "(3, 8) on rank {last}"]),
        (_want_an_unknown_key, "KeyMismatchError", ["rank {last}, in 'comparing keys'", "nowhere"]),
    ],
)
def test_bad_load_on_one_rank(
    ranks: Ranks, tmp_path: Path, backend: Backend, world: int, damage: Any, kind: str, texts: list[str]
) -> None:
    """What one rank cannot load is the same error on all, with rank, phase, key and file; the next load is good."""
    found, *others = ranks.run(world, _load_after, str(tmp_path), damage)
    assert others == [found] * (world - 1)
    assert (found.kind, found.left, found.wrong) == (kind, ["ckpt"], [])
    for text in texts:
        assert text.format(last=world - 1, file=backend.data_file(world - 1)) in found.message
