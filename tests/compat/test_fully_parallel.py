"""Megatron's fully parallel wrappers, as a user of Megatron writes the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from shardckpt.async_save import release_memory
from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from shardckpt.compat.megatron.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from shardckpt.compat.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    distribute_main_replicas_with_precomputed_distribution,
)
from shardckpt.compat.megatron.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from shardckpt.errors import CheckpointingException, RankFailedError
from tests.engine.plan_cache.saves import Plans
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


def _state() -> dict[str, Any]:
    """Of two tensor-parallel parts, each rank has one; the ranks of a data-parallel group have the same."""
    data, part = divmod(dist.get_rank(), 2)
    return {
        key: ShardedTensor.from_rank_offsets(
            key, torch.full((4, 3), float(10 * number + part)), (0, part, 2), replica_id=data
        )
        for number, key in enumerate("abcd")
    }


def _data_parallel_group() -> Any:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


def _wanted() -> dict[str, Any]:
    return {key: shard.without_data() for key, shard in _state().items()}


class _CountingLoad(TorchDistLoadShardedStrategy):
    """Notes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def load(self, sharded_state_dict: Any, context: Any, async_strategy: Any = None) -> Any:
        """Read."""
        self.read += [(shard.key, tuple(shard.global_offset), None) for shard in sharded_state_dict]
        return super().load(sharded_state_dict, context, async_strategy)


def _reads_what_it_wrote(path: str) -> Any:
    group, base = _data_parallel_group(), TorchDistSaveShardedStrategy("torch_dist", 1)
    saver = FullyParallelSaveStrategyWrapper(base, group, do_cache_distribution=True)
    assert saver.base_strategy is base
    assert saver.cached_distribution is None
    dc.save(_state(), path, saver)
    found = saver.cached_distribution
    assert found is not None
    assert set(found.shard_to_metadata) == found.shards_in_this_group == set(found.all_ranks_for_shard)
    assert set(map(tuple, found.all_ranks_for_shard.values())) == {(0, 1)}
    state = _state()
    distribute_main_replicas_with_precomputed_distribution(state, group, found)
    mine = sorted(number for number, rank in found.main_rank_for_shard.items() if rank == dist.get_rank(group))
    assert [key for key, shard in state.items() if is_main_replica(shard.replica_id)] == [key for key, *_ in mine]

    loader = FullyParallelLoadStrategyWrapper(_CountingLoad(), group)
    assert loader.cached_global_metadata is None
    loaded = dc.load(_wanted(), path, loader)
    assert all(torch.equal(loaded[key], shard.data) for key, shard in _state().items())
    metadata = loader.cached_global_metadata
    assert isinstance(metadata, Metadata)
    assert set(metadata.state_dict_metadata) >= set("abcd")
    base.cached_global_metadata = metadata  # as Megatron's trainer hands it on
    dc.save(_state(), path, saver)
    return mine, sorted(loader.base_strategy.read)


def test_a_data_parallel_group_reads_what_it_wrote(ranks: Ranks, tmp_path: Path) -> None:
    """Each group writes and reads its half, each shard by one of its ranks; the distribution says which."""
    reports = ranks.run(4, _reads_what_it_wrote, str(tmp_path / "c"))
    for part in range(2):
        written = sorted(number for mine, _ in reports[part::2] for number in mine)
        read = sorted(number for _, mine in reports[part::2] for number in mine)
        assert written == read == [(key, (4 * part, 0), None) for key in "abcd"]
        assert [len(each) for report in reports[part::2] for each in report] == [2] * 4


def _changes(path: str) -> Any:
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), None, True)
    plain = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    dc.save(_state(), path, plain)
    assert plain.cached_distribution is None
    seen = []
    for keys in ("ab", "ab", "abc"):
        dc.save({key: shard for key, shard in _state().items() if key in keys}, path, saver)
        assert saver.cached_distribution is not None
        seen.append(saver.cached_distribution)
    assert seen[0] is seen[1]
    return [sorted({key for key, *_ in found.shards_in_this_group}) for found in seen]


def test_a_distribution_is_kept_while_it_is_right(ranks: Ranks, tmp_path: Path) -> None:
    """It is the same object until the shards change, and then that of the new ones; else there is none."""
    expected = [["a", "b"], ["a", "b"], ["a", "b", "c"]]
    assert ranks.run(2, _changes, str(tmp_path / "c")) == [expected] * 2


_STRATEGIES: dict[str, Callable[[], Any]] = {
    "torch_dist": lambda: TorchDistSaveShardedStrategy("torch_dist", 1),
    "safetensors": lambda: dc.serialization.get_default_save_sharded_strategy("safetensors", 1),
}


@table("name", [*_STRATEGIES])
@table("wrap", [lambda strategy: strategy, FullyParallelSaveStrategyWrapper], ids=["alone", "fully parallel"])
def test_equal_saves_are_planned_once(tmp_path: Path, name: str, wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By Megatron's names, too, saves of the same shards are planned once, and no warning says what to set."""
    release_memory()
    with Plans() as plans:
        for step in range(3):
            state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(step)))}
            dc.save(state, str(tmp_path / str(step)), wrap(_STRATEGIES[name]()))
    assert plans.count == 1
    assert "caches_plan" not in caplog.text
    assert dc.load_plain_tensors(str(tmp_path / "2"))["w"].tolist() == [2.0] * 4


class _Refused(Exception):
    """An error of a user's own."""


def _write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        torch.save(tensor, directory / f"{key}.{dist.get_rank() % 2}.pt")


class _Save(AsyncSaveShardedStrategy):
    """A strategy of Megatron's kind: a file for each main replica."""

    error: type[Exception] | None = None

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Plan."""
        main = {key: shard.data for key, shard in sharded_state_dict.items() if is_main_replica(shard.replica_id)}
        self.written = sorted(main)
        return AsyncRequest(_write, (checkpoint_dir, main), [self._finalize])

    def _finalize(self) -> None:
        if self.error is not None and dist.get_rank() == 1:
            raise self.error("no quota left")


class _Load(LoadShardedStrategy):
    """Reads those files."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Read."""
        self.read = sorted(sharded_state_dict)
        return {key: torch.load(checkpoint_dir / f"{key}.{dist.get_rank() % 2}.pt") for key in sharded_state_dict}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        """List nothing: the index beside the files does."""


def _wraps_megatrons(path: str) -> Any:
    group, base, reader = _data_parallel_group(), _Save("files", 1), _Load()
    saver = FullyParallelSaveStrategyWrapper(base, group)
    assert saver.base_strategy is base
    queue, written = AsyncCallsQueue(), []
    for number in range(3):
        if number == 0:
            dc.save(_state(), path, saver)
        elif number == 1:
            saver.save(_state(), path)
        else:
            queue.schedule_async_request(dc.save(_state(), path, saver, async_sharded_save=True))
            queue.close()
        written.append(base.written)
    assert written[1:] == written[:-1]
    loader = FullyParallelLoadStrategyWrapper(reader, group)
    loaded = dc.load(_wanted(), path, loader)
    assert all(torch.equal(loaded[key], shard.data) for key, shard in _state().items())
    assert (loader.base_strategy, loader.cached_global_metadata) == (reader, None)
    return written[0], reader.read


def test_megatrons_strategies_save_and_load_below_the_wrappers(ranks: Ranks, tmp_path: Path) -> None:
    """By path, by save() and behind the training, each rank of a group writes its half, and reads one."""
    reports = ranks.run(4, _wraps_megatrons, str(tmp_path / "c"))
    for part in range(2):
        for each in zip(*reports[part::2], strict=True):
            assert sorted(key for keys in each for key in keys) == ["a", "b", "c", "d"]
            assert [len(keys) for keys in each] == [2, 2]


def _fails(path: str, error: type[Exception], wrapped: bool) -> Any:
    base = _Save("files", 1)
    base.error = error
    saver = FullyParallelSaveStrategyWrapper(base) if wrapped else base
    queue = AsyncCallsQueue()
    queue.schedule_async_request(dc.save(_state(), path, saver, async_sharded_save=True))
    with pytest.raises(error, match="no quota left") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value, CheckpointingException)
    queue.close()
    request = AsyncRequest(None, (), [base._finalize])
    with pytest.raises(error, match="no quota left"):
        request.execute_sync()


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_a_finalize_function_keeps_its_class(ranks: Ranks, tmp_path: Path, wrapped: bool) -> None:
    """What it raises on one rank all ranks raise, by the user's class, and nothing of the save is left."""
    ranks.run(2, _fails, str(tmp_path / "c"), _Refused, wrapped)
    assert not list(tmp_path.iterdir())


def _fails_by_pythons_own(path: str) -> tuple[str, bool]:
    base = _Save("files", 1)
    base.error = OSError
    queue = AsyncCallsQueue()
    queue.schedule_async_request(dc.save(_state(), path, base, async_sharded_save=True))
    with pytest.raises(RankFailedError, match=r"rank 1.*OSError: no quota left") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return str(caught.value), error is not None


def test_pythons_own_error_of_a_finalize_function_is_named_by_its_class(ranks: Ranks, tmp_path: Path) -> None:
    """An OSError arrives as a RankFailedError with the same text on all ranks; where it was raised, it is a cause."""
    first, second = ranks.run(2, _fails_by_pythons_own, str(tmp_path / "c"))
    assert first[0] == second[0]
    assert (first[1], second[1]) == (False, True)
    assert not list(tmp_path.iterdir())
