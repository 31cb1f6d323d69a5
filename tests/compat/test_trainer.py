"""The names that Megatron's trainer imports, of 0.16.1 and later, and the calls that it makes with them.

The package on PyPI has neither the trainer nor its tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing import gpt_checkpoint_interop
from shardckpt.compat.megatron.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from shardckpt.compat.megatron.dist_checkpointing.serialization import StateDict, get_default_load_sharded_strategy
from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import _disable_gc
from shardckpt.compat.megatron.dist_checkpointing.strategies.filesystem_async import _results_queue
from shardckpt.compat.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    distribute_main_replicas_with_precomputed_distribution,
)
from shardckpt.compat.megatron.dist_checkpointing.strategies.nvrx import has_nvrx_async_support, is_nvrx_min_version
from shardckpt.compat.megatron.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from shardckpt.compat.megatron.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    get_async_strategy,
)
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _state(value: float) -> StateDict:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "model": {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value + rank), (0, rank, world))},
        "rng": [ShardedObject("rng", value + rank, (world,), (rank,))],
        "shared": ShardedTensor.from_rank_offsets("shared", torch.arange(4.0), replica_id=rank),
        "iteration": int(value),
    }


def _saves_and_loads(path: str, library: str) -> None:
    """The trainer's save with ``--async-save``, and its load, as 0.16.1 and its later releases write them."""
    if _results_queue is not None:
        _results_queue._manager.shutdown()
    _, classes = get_async_strategy(library)
    queue = classes["AsyncCallsQueue"](persistent=False)
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), dist.group.WORLD, True)
    with _disable_gc():
        request = dc.save(_state(7.0), path, saver, async_sharded_save=True, async_strategy=library)
    assert isinstance(request, classes["AsyncRequest"])
    request.add_finalize_fn(lambda: None)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    reader = TorchDistLoadShardedStrategy(cache_metadata=True, stream_ckpt_dequant=True)
    assert set(reader.load_tensors_metadata(path, metadata=dcp.FileSystemReader(path).read_metadata())) == {
        "w",
        "shared",
    }
    for base in (reader, get_default_load_sharded_strategy(path)):
        strategy = FullyParallelLoadStrategyWrapper(base, dist.group.WORLD, False)
        loaded = dc.load(_state(0.0), path, strategy, strict="return_all", async_strategy=library)
        state, missing, unexpected = loaded
        rank = dist.get_rank()
        assert (missing, unexpected) == (set(), set())
        assert (state["model"]["w"].tolist(), state["rng"], state["iteration"]) == ([7.0 + rank] * 3, [7.0 + rank], 7)
        assert state["shared"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("library", ["mcore", "nvrx"])
def test_the_trainers_calls_save_and_load(ranks: Ranks, tmp_path: Path, library: str) -> None:
    """Whichever library the trainer asks for, its calls save in the background and load on all ranks."""
    ranks.run(2, _saves_and_loads, str(tmp_path / "c"), library)


def _distributes() -> list[Any]:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=dist.get_rank())}
    group = dist.group.WORLD
    with pytest.raises(CheckpointingException, match="a group of several ranks needs one"):
        distribute_main_replicas_with_precomputed_distribution(
            state, parallelization_group=group, precomputed_distribution=None
        )
    found = determine_main_replica_uniform_distribution(state, group)
    distribute_main_replicas_with_precomputed_distribution(
        sharded_state_dict=state, parallelization_group=group, precomputed_distribution=found
    )
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    distribute_main_replicas_with_precomputed_distribution(
        state, parallelization_group=alone, precomputed_distribution=None
    )
    return [state["w"].replica_id]


def test_a_distribution_is_given_by_keyword(ranks: Ranks) -> None:
    """One rank is the main one afterwards; a group of one rank needs no distribution."""
    assert sorted(ranks.run(2, _distributes)) == [[0], [1]]


class _Writer(FileSystemWriter):
    """A writer that has written, as those of Megatron and nvidia-resiliency-ext: its results are asked for later."""

    results: Any = None

    def retrieve_write_results(self) -> Any:
        """Return what was written, or torch's form of an error."""
        return self.results


def _finalizes(path: str, broken: int) -> None:
    rank = dist.get_rank()
    writer, planner = _Writer(path), DefaultSavePlanner()
    writer.set_up_storage_writer(rank == 0)
    planner.set_up_planner({f"w{rank}": torch.full((2,), 1.0 + rank)}, None, rank == 0)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    writer.results = writer.write_data(plan, planner).wait()
    if rank == broken:
        writer.results = _wrap_exception(OSError("the disk is full"))
    save_state_dict_async_finalize(writer, metadata if rank == 0 else None, _DistWrapper(None, True, 0))
    loaded = {f"w{number}": torch.zeros(2) for number in range(len(plans))}
    dcp.load(loaded, checkpoint_id=path)
    assert [tensor.tolist() for tensor in loaded.values()] == [[1.0 + n] * 2 for n in range(len(plans))]


def test_another_librarys_writer_is_finalized(ranks: Ranks, tmp_path: Path) -> None:
    """What it has written becomes a checkpoint that DCP loads; a rank that failed is the same error on all."""
    ranks.run(2, _finalizes, str(tmp_path / "c"), -1)
    outcomes = ranks.outcomes(2, _finalizes, str(tmp_path / "d"), 1)
    assert len({(outcome.kind, outcome.message) for outcome in outcomes}) == 1
    assert "the disk is full" in outcomes[0].message
    assert not (tmp_path / "d" / ".metadata").exists()


def test_there_is_one_library_for_background_saves() -> None:
    """Either name gives our classes; other names, and classes that are not here, say what there is."""
    assert get_async_strategy("nvrx") == get_async_strategy("mcore")
    assert list(get_async_strategy("nvrx", "AsyncRequest")[1]) == ["AsyncRequest"]
    with pytest.raises(CheckpointingException, match=r"'other': expected 'mcore' or 'nvrx'"):
        get_async_strategy("other")
    with pytest.raises(CheckpointingException, match=r"AsyncCallsQueue, AsyncRequest, not 'FileSystemWriterAsync'"):
        get_async_strategy("mcore", module="FileSystemWriterAsync")
    assert not has_nvrx_async_support()
    assert not is_nvrx_min_version("999.0")


def test_functions_that_know_megatrons_models_refuse_to_be_called() -> None:
    """The trainer imports them for models that most jobs do not have: the import works, the call says what to do."""
    function: Any = gpt_checkpoint_interop.any_function
    with pytest.raises(CheckpointingException, match=r"any_function has no counterpart.*apply_prefix_mapping"):
        function({}, path="x")
    with pytest.raises(AttributeError):
        gpt_checkpoint_interop._private  # noqa: B018
