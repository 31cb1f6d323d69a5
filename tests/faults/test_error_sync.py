"""When ranks hear of an error: before they write for long, and before some of them meet in a smaller group."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.commit import commit
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from tests import backends
from tests.faults.attempts import Attempt, attempt
from tests.faults.rank_errors import one_error, set_on_rank

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.ranks import Ranks


def _save_in_pairs(directory: str) -> Attempt:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def action(target: Path) -> None:
        saver = dist_checkpointing.get_default_save_sharded_strategy()
        shard = ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, rank // 2, 2), replica_id=rank % 2)
        with set_on_rank(1, "SHARDCKPT_IO_THREADS", "many"):
            dist_checkpointing.save({"w": shard}, target, FullyParallelSaveStrategyWrapper(saver, pairs[rank // 2]))

    return attempt(directory, action)


@backends.both_in_proof
def test_all_ranks_are_there_when_smaller_groups_meet(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that cannot begin to write leaves no partner waiting in the group that deals the shards out."""
    assert "SHARDCKPT_IO_THREADS='many'" in one_error(ranks.run(4, _save_in_pairs, str(tmp_path))).message


def test_a_discarded_directory_takes_no_more_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What another rank still writes while a failed save is cleaned up does not keep the directory alive."""
    staging = commit.create_staging(tmp_path / "ckpt", "id")
    ended = threading.Event()

    def write() -> None:
        number = 0
        while staging.exists():
            try:
                (staging / str(number)).write_bytes(b"x")
            except FileNotFoundError:
                break
            number += 1
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not any(staging.iterdir()):
        pass
    commit.discard_staging(staging)
    assert ended.wait(60)
    thread.join()
    assert not list(tmp_path.iterdir())
    assert not caplog.records
