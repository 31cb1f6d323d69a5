from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from tests import backends

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _saves(folder: str) -> None:
    wrapper = FullyParallelSaveStrategyWrapper(dc.get_default_save_sharded_strategy(), do_cache_distribution=True)
    with AsyncCallsQueue() as queue:
        for step in range(3):
            state = {
                f"w{n}": ShardedTensor.from_rank_offsets(
                    f"w{n}", torch.full((100,), float(step)), replica_id=dist.get_rank()
                )
                for n in range(8)
            }
            request = dc.save(state, f"{folder}/{step}", wrapper, async_sharded_save=True)
            assert request is not None
            queue.schedule_async_request(request)


@backends.both_in_proof
def test_fully_parallel_saves_go_on_behind_the_training(ranks: Ranks, tmp_path: Path) -> None:
    """Background saves through the wrapper are dealt out: each rank writes, and each save has its own content."""
    ranks.run(4, _saves, str(tmp_path))
    for step in range(3):
        assert len(list((tmp_path / str(step)).glob(backends.current().data_files))) == 4
        assert all(tensor.eq(step).all() for tensor in dc.load_plain_tensors(tmp_path / str(step)).values())
