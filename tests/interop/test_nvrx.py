"""nvidia-resiliency-ext's own local checkpoints, saved by our queue and made of our state dicts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from shardckpt.compat.megatron.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks
    from tests.sites import Sites

#: The oldest release that needs nothing but torch for its local checkpoints.
RELEASE = "0.4.1"


def _state(rank: int, step: int) -> dict[str, Any]:
    data = torch.full((4,), float(10 * step + rank))
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, dist.get_world_size())), "step": step}


def _save_and_find(site: str, folder: str) -> None:
    """What Megatron's trainer does with ``--non-persistent-ckpt-type local --async-save``."""
    sys.path.insert(0, site)
    synchronize: Any = torch.cuda.synchronize
    vars(torch.cuda)["synchronize"] = lambda *_: None  # it synchronizes a GPU, which is not there
    try:
        from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict as Interface
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        rank = dist.get_rank()
        manager = LocalCheckpointManager(folder)
        queue = AsyncCallsQueue()
        for step in (1, 2):
            part, _ = MCoreTensorAwareStateDict.from_state_dict(_state(rank, step), algo="atomic")
            request = manager.save(part, step, is_async=True)
            assert type(request).__module__.startswith("nvidia_resiliency_ext")
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [step]
        queue.close()
        finder = LocalCheckpointManager(folder)
        assert finder.find_latest() == 2
        loaded, _ = finder.load()
        restored = loaded.to_state_dict({**_state(rank, 0)})
        assert (restored["w"].tolist(), restored["step"]) == ([20.0 + rank] * 4, 2)
        names = {name for name in vars(Interface) if not name.startswith("_")}
        assert not {name for name in names if not hasattr(MCoreTensorAwareStateDict, name)}
        assert list(loaded.values()) == [loaded.common_state_dict, loaded.sharded_state_dict]
    finally:
        vars(torch.cuda)["synchronize"] = synchronize
        sys.path.remove(site)


def test_local_checkpoints_are_saved_behind_training(ranks: Ranks, sites: Sites, tmp_path: Path) -> None:
    """The package's requests go through our queue, and its files hold state dicts that load."""
    site = sites(f"nvidia-resiliency-ext-{RELEASE}")
    ranks.run(2, _save_and_find, str(site), str(tmp_path))
    assert sorted(path.name for path in tmp_path.rglob("iter_0000002*")) == [
        "iter_0000002_0_local.pt",
        "iter_0000002_1_local.pt",
    ]
