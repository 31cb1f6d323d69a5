from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import parallel
from shardckpt.compat.megatron.dist_checkpointing.strategies import fully_parallel as megatron
from shardckpt.distributed.comm import Comm
from shardckpt.engine import PlanCache
from shardckpt.errors import CheckpointingException, PluginError
from shardckpt.manifest import Record
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.parallel import FullyParallelSaveStrategyWrapper, assign_main_replicas
from shardckpt_torch_dist import TorchDistLoadShardedStrategy
from tests import backends

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _state(*, filled: bool = True) -> dict[str, Any]:
    """Tensor parallel 2, data parallel 2: every shard has two copies, rank = dp * 2 + tp."""
    tp, dp = dist.get_rank() % 2, dist.get_rank() // 2
    state: dict[str, Any] = {}
    for number in range(12):
        half = torch.full((64, 32), float(number * 2 + tp)) if filled else torch.zeros(64, 32)
        state[f"w{number}"] = ShardedTensor.from_rank_offsets(f"w{number}", half, (0, tp, 2), replica_id=dp)
    part = slice(tp * 6, tp * 6 + 6)
    data = torch.arange(12.0)[part].clone()
    state["flat"] = ShardedTensor.from_rank_offsets_flat("flat", data, (3, 4), flattened_range=part, replica_id=dp)
    copies = dist.get_rank()
    state["objects"] = [ShardedObject("o", n if filled else None, (8,), (n,), replica_id=copies) for n in range(8)]
    return state


def _save(path: str, grouped: bool) -> list[Any]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2] if grouped else None
    state = _state()
    strategy = FullyParallelSaveStrategyWrapper(dc.get_default_save_sharded_strategy(), group)
    dc.save(state, path, strategy)
    return [shard.replica_id for shard in (state["w0"], state["flat"])]


def _load(path: str) -> None:
    expected, loaded = _state(), dc.load(_state(filled=False), path)
    for key in [*(f"w{n}" for n in range(12)), "flat"]:
        assert torch.equal(loaded[key], expected[key].data)
    assert loaded["objects"] == list(range(8))


def _bytes_by_rank(path: Path) -> dict[int, int]:
    record = Record.model_validate_json((path / "shardckpt.json").read_text())
    return {file.rank: file.size for file in record.files if fnmatch(file.name, backends.current().data_files)}


@backends.both_in_proof
def test_copies_share_the_writing(ranks: Ranks, tmp_path: Path) -> None:
    """With the wrapper all four ranks write about the same, without it two; the content and the caller's ids stay."""
    for grouped in (False, True):
        path = tmp_path / f"parallel-{grouped}"
        assert ranks.run(4, _save, str(path), grouped) == [[rank // 2, rank // 2] for rank in range(4)]
        sizes = _bytes_by_rank(path)
        assert len(sizes) == 4
        assert max(sizes.values()) < 1.2 * min(sizes.values())
        ranks.run(4, _load, str(path))


def _disagree(path: str) -> None:
    state = _state()
    if dist.get_rank() == 3:
        state["w0"].global_offset = (1, 0)
    strategy = FullyParallelSaveStrategyWrapper(dc.get_default_save_sharded_strategy())
    dc.save(state, path, strategy)


@backends.both_in_proof
def test_errors_are_everyones_here_too(ranks: Ranks, tmp_path: Path) -> None:
    """A rank whose shard does not fit is the same error on all, before anything is written."""
    outcomes = ranks.outcomes(4, _disagree, str(tmp_path / "c"))
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "w0" in outcomes[0].message
    assert not list(tmp_path.iterdir())


def _objects() -> int:
    shards = [ShardedObject("o", n, (8,), (n,), replica_id=dist.get_rank()) for n in range(8)]
    return sum(is_main_replica(shard.replica_id) for shard in assign_main_replicas(shards, Comm()))


@backends.both_in_proof
def test_objects_are_assigned_too(ranks: Ranks) -> None:
    """Objects of which all ranks have copies are not left to the main rank."""
    assert ranks.run(4, _objects) == [2, 2, 2, 2]


def _with_extra(number: int) -> dict[str, Any]:
    """The state of save ``number``; from the third on, rank 3 alone has a tensor more, and one of another size."""
    state = _state()
    if number >= 2 and dist.get_rank() == 3:
        state["extra"] = ShardedTensor.from_rank_offsets("extra", torch.full((5,), float(number)))
    if number >= 3:
        copies = dist.get_rank()
        state["grown"] = ShardedTensor.from_rank_offsets("grown", torch.full((9,), float(number)), replica_id=copies)
    return state


def _save_again_and_again(path: str) -> None:
    strategy = FullyParallelSaveStrategyWrapper(dc.get_default_save_sharded_strategy(), do_cache_distribution=True)
    for number in range(5):
        dc.save(_with_extra(number), f"{path}/{number}", strategy)


@backends.both_in_proof
def test_a_changed_structure_is_saved_in_full(ranks: Ranks, tmp_path: Path) -> None:
    """With a kept assignment, what one rank has anew is in the checkpoint, and what all have is still there once."""
    ranks.run(4, _save_again_and_again, str(tmp_path))
    for number in range(5):
        ranks.run(4, _load, str(tmp_path / str(number)))
        tensors = dc.load_plain_tensors(tmp_path / str(number))
        assert ("extra" in tensors, "grown" in tensors) == (number >= 2, number >= 3)
        assert all(torch.all(tensors[key] == number) for key in ("extra", "grown") if key in tensors)


class _CountingComm(Comm):
    gathers = 0

    def all_gather(self, value: Any) -> Any:
        self.gathers += 1
        return super().all_gather(value)


def _gathers() -> list[int]:
    comm, cache = _CountingComm(), PlanCache[Any](1)
    counts = []
    for number in range(5):
        shards = [leaf for leaf in _with_extra(number).values() if isinstance(leaf, ShardedTensor)]
        assigned = assign_main_replicas(shards, comm, cache)
        again = assign_main_replicas(shards, Comm())
        assert [shard.replica_id for shard in assigned] == [shard.replica_id for shard in again]
        counts.append(comm.gathers)
    return counts


@backends.both_in_proof
def test_an_unchanged_structure_is_not_gathered(ranks: Ranks) -> None:
    """Saves of the same structure send no gather; any rank's change makes all assign anew."""
    assert ranks.run(4, _gathers) == [[1, 1, 2, 3, 3]] * 4


@backends.both_in_proof
def test_megatrons_arguments_are_checked() -> None:
    """Backend and version may be repeated, not changed; an assignment from a file that nothing checks is not taken."""
    strategy = dc.get_default_save_sharded_strategy()
    same = FullyParallelSaveStrategyWrapper(strategy, None, False, strategy.backend, strategy.version)
    assert (same.backend, same.version) == (strategy.backend, strategy.version)
    with pytest.raises(CheckpointingException, match="not those of the wrapped strategy"):
        FullyParallelSaveStrategyWrapper(strategy, backend="zarr")
    with pytest.raises(TypeError, match="pg_cache_path"):
        FullyParallelSaveStrategyWrapper(strategy, pg_cache_path="x")  # type: ignore[call-arg]


def test_a_strategy_of_the_other_kind_is_refused() -> None:
    """A wrapper of saves takes no load strategy, one of loads no save strategy, and neither a class, by any name."""
    saver: Any = dc.get_default_save_sharded_strategy()
    loader: Any = TorchDistLoadShardedStrategy()
    for names in (parallel, megatron):
        for given in (loader, type(saver), None):
            with pytest.raises(PluginError, match="wraps an instance of a save strategy, not "):
                names.FullyParallelSaveStrategyWrapper(given)
        for given in (saver, type(loader), "torch_dist"):
            with pytest.raises(PluginError, match="wraps an instance of a load strategy, not "):
                names.FullyParallelLoadStrategyWrapper(given)
