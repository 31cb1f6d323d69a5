"""An error on one rank is the same error on every rank, nothing is left behind, and the same processes go on."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing, hookimpl, settings
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.strategy import SaveContext, SaveStrategy
from tests import backends
from tests.faults import samples
from tests.faults.attempts import BAD, Attempt, attempt, save_with
from tests.faults.disks import small_disk
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends import Backend
    from tests.ranks import RankPool, Ranks

SIZES = (3, *in_proof(2, 4))


def one_error(attempts: list[Attempt]) -> Attempt:
    """The attempt of all ranks, after checking that they agree, left nothing behind, and then went on."""
    assert all(found.family for found in attempts), attempts
    assert len({(found.kind, found.message) for found in attempts}) == 1, attempts
    assert [found.left for found in attempts] == [[]] * len(attempts)
    assert [found.wrong for found in attempts] == [[]] * len(attempts)
    return attempts[0]


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


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save_with_limited_files(directory: str, victim: int) -> Attempt:
    def action(target: Path) -> None:
        with file_size_limit(10_000 if dist.get_rank() == victim else 1 << 30):
            samples.save(target, BAD)

    return attempt(directory, action)


@pytest.mark.ci
@backends.both
@pytest.mark.parametrize("world", SIZES)
def test_file_too_large_on_one_rank(gloo_ranks: RankPool, tmp_path: Path, backend: Backend, world: int) -> None:
    """A write that the system cuts short on one rank ends the save on all, naming file, offset and reason."""
    victim = world - 1
    found = one_error(gloo_ranks.run(world, _save_with_limited_files, str(tmp_path), victim))
    assert found.kind == "StorageError"
    for text in (f"rank {victim}, in 'writing shards'", backend.data_file(victim), "at offset 10000", "EFBIG"):
        assert text in found.message


def _fill(state: dict[str, Any], rank: int, world: int) -> None:
    state["filler"] = ShardedTensor.from_rank_offsets("filler", torch.ones(2_000_000 // world), (0, rank, world))


def _save_without_forecast(directory: str) -> Attempt:
    with patch.dict(os.environ, {settings.SPACE_CHECK: "0"}):
        return save_with(directory, _fill)


@backends.both_in_proof
@pytest.mark.parametrize("world", SIZES)
@pytest.mark.ci
def test_full_disk(ranks: Ranks, tmp_path: Path, backend: Backend, world: int) -> None:
    """A disk that fills up in a save is one error on all ranks; its space is free again, and a smaller save fits."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        found = one_error(ranks.run(world, _save_without_forecast, str(disk)))
    assert found.kind == "StorageError"
    assert any(backend.data_file(rank) in found.message for rank in range(world))
    for text in ("in 'writing shards'", "No space left on device (ENOSPC)"):
        assert text in found.message


def _overwrite_on_full_disk(directory: str) -> tuple[Attempt, list[str]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    target = Path(directory) / "ckpt"
    samples.save(target, 3)
    wrong: list[str] = []

    def action(target: Path) -> None:
        state = samples.state_dict(BAD, rank, world)
        _fill(state, rank, world)
        try:
            dist_checkpointing.save(state, target, overwrite=True)
        finally:
            wrong.extend(samples.find_wrong(target, 3))

    with patch.dict(os.environ, {settings.SPACE_CHECK: "0"}):
        return attempt(directory, action), wrong


@backends.both_in_proof
@pytest.mark.ci
def test_full_disk_leaves_the_previous_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """An overwrite that fails for space leaves the old checkpoint whole, and nothing else."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        results = ranks.run(2, _overwrite_on_full_disk, str(disk))
    for found, wrong in results:
        assert (found.kind, found.left, found.wrong, wrong) == ("StorageError", ["ckpt"], [], [])


class BrokenListener:
    """A plugin whose event hook fails on one rank."""

    @hookimpl
    def shardckpt_event(self, event: Any) -> None:
        """Fail when rank 1 begins to write."""
        if event.rank == 1 and event.phase == "writing":
            raise ConnectionError("the metrics server is away")


def _save_with_broken_listener(directory: str) -> tuple[Attempt, int]:
    listener = BrokenListener()
    get_plugin_manager().register(listener)
    try:
        found = save_with(directory, lambda *_: None)
    finally:
        get_plugin_manager().unregister(listener)
    return found, len(found.left)


@pytest.mark.ci
@backends.both_in_proof
def test_broken_listener_on_one_rank(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """An event hook that raises on one rank neither fails a save nor leaves the other ranks waiting."""
    for found, left in gloo_ranks.run(3, _save_with_broken_listener, str(tmp_path)):
        assert (found.kind, found.message, found.wrong, left) == ("", "", [], 1)


@contextmanager
def set_on_rank(rank: int, name: str, value: str) -> Iterator[None]:
    """An environment variable that is so on one rank."""
    before = os.environ.get(name)
    if dist.get_rank() == rank:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


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
