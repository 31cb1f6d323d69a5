from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt.strategy import SaveStrategy
from tests.background import jobs

if TYPE_CHECKING:
    from pathlib import Path


class _Foreground(SaveStrategy):
    backend, version = "foreground", 1

    def save(self, *_: Any) -> None:
        raise AssertionError("never called")


def test_a_request_that_is_never_scheduled_is_no_checkpoint(tmp_path: Path) -> None:
    """Planning alone leaves nothing that loads, and does not keep the next save from its place."""
    dc.save(jobs.state(5.0), tmp_path / "c", async_sharded_save=True)
    with pytest.raises(CheckpointingException):
        dc.load(jobs.state(0.0), tmp_path / "c")
    dc.save(jobs.state(6.0), tmp_path / "c")
    jobs.check(str(tmp_path / "c"), 6.0)


def test_a_strategy_that_cannot_save_behind_the_training_is_named(tmp_path: Path) -> None:
    """async_sharded_save with a plain SaveStrategy, wrapped or not, is refused by its name; nothing is made."""
    for strategy in (_Foreground(), FullyParallelSaveStrategyWrapper(_Foreground())):
        with pytest.raises(CheckpointingException, match="_Foreground saves in the foreground only"):
            dc.save(jobs.state(1.0), tmp_path / "c", strategy, async_sharded_save=True)
    assert not list(tmp_path.iterdir())


def test_replicas_that_are_not_written_are_not_staged(tmp_path: Path) -> None:
    """Only what this rank writes is copied."""
    tensor = torch.ones(1000)
    shards = {
        "mine": ShardedTensor.from_rank_offsets("mine", tensor),
        "copy": ShardedTensor.from_rank_offsets("mine", tensor, replica_id=1),
    }
    request = dc.save(shards, tmp_path / "c", async_sharded_save=True)
    assert request is not None
    assert len(request.preload_fn.__self__.prepared.work.tensors) == 1  # type: ignore[union-attr]
    request.execute_sync()


def test_a_request_is_scheduled_once(tmp_path: Path) -> None:
    """The second scheduling of a request is refused by a clear error; the first is not disturbed."""
    request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True)
    assert request is not None
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match="has been scheduled before"):
        queue.close()
    jobs.check(str(tmp_path / "c"), 1.0)


def test_content_metadata_is_that_of_the_save(tmp_path: Path) -> None:
    """What describes the content may change as soon as the save is planned, wherever it is stored."""
    content: dict[str, Any] = {"layers": [1, 2]}
    request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True, content_metadata=content)
    assert request is not None
    content["layers"].append(3)
    request.execute_sync()
    assert dc.load_content_metadata(tmp_path / "c") == {"layers": [1, 2]}
    assert dc.load_common_state_dict(tmp_path / "c")["content_metadata"] == {"layers": [1, 2]}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_torchs_own_quantized_dtypes_are_refused(tmp_path: Path) -> None:
    """Their scales lie beside their memory: neither way to save stores the integers without them."""
    shard = ShardedTensor.from_rank_offsets("w", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(ShardingError, match=r"'w'.*qint8.*dequantized"):
        dc.save({"w": shard}, tmp_path / "c")
    with pytest.raises(ShardingError, match=r"'w'.*qint8.*dequantized"), AsyncCallsQueue() as queue:  # noqa: PT012
        request = dc.save({"w": shard}, tmp_path / "c", async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    assert not list(tmp_path.iterdir())
