from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed import long_wait
from shardckpt.mapping import ShardedTensor
from tests.distributed.long_wait import nothing_said_before

if TYPE_CHECKING:
    from tests.ranks import Ranks

__all__ = ["nothing_said_before"]  # fixtures


def _save_late(late: int, folder: str) -> tuple[str, int]:
    """Save, one rank when all others have said that they wait; what this rank said, and the keys new in the store."""
    shard = ShardedTensor.from_rank_offsets("a", torch.ones(2), replica_id=dist.get_rank())
    store: Any = dist.distributed_c10d._get_default_store()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            (Path(folder) / f"told{dist.get_rank()}").touch()
            return super().write(text)

    dist.barrier()
    before = store.num_keys()
    with mock.patch.object(long_wait, "NOTICE_AFTER", 0.0), redirect_stderr(Told()) as said:
        while dist.get_rank() == late and len(list(Path(folder).glob("told*"))) < dist.get_world_size() - 1:
            time.sleep(0.01)
        dc.save({"a": shard}, f"{folder}/dc")
    return said.getvalue(), store.num_keys() - before


def test_every_rank_that_waits_says_so_and_writes_nothing_to_the_store(ranks: Ranks, tmp_path: Path) -> None:
    """Of three gloo ranks two wait and say so; the store of the group has no key more than before."""
    results = ranks.run(3, _save_late, 2, str(tmp_path))
    assert [added for _, added in results] == [0, 0, 0]
    for rank, others in ((0, "1, 2"), (1, "0, 2")):
        first = results[rank][0].partition("\n")[0]
        assert f"rank {rank} has waited" in first
        assert " in save(), called at " in first
        assert f"one or more of ranks {others}: they have not called it" in first
