"""Optimizers whose parameters a checkpoint numbers, on ranks that each have a part of them, or a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from tests.ranks import RankPool


class _Job:
    """A model that ranks shard unevenly or copy, and an optimizer with two groups, the later parameters first."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        self.model: nn.Module = self.plain
        if kind == "fsdp":
            fully_shard(self.plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            self.model = DistributedDataParallel(self.plain)
        groups = [{"params": [*part.parameters()], "lr": 0.1 * (seed + n)} for n, part in enumerate(self.plain, 1)]
        self.optimizer = torch.optim.AdamW(groups[::-1], amsgrad=True)

    def train(self, *steps: int) -> None:
        for step in steps:
            torch.manual_seed(100 * step + dist.get_rank())
            self.model(torch.randn(2, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def read(self) -> list[Any]:
        """Return a copy of all that a step changes, and the options of the groups."""
        own = [value.to_local() if hasattr(value, "to_local") else value for value in self._tensors()]
        groups = self.optimizer.state_dict()["param_groups"]
        return [[value.detach().clone().view(torch.uint8).tolist() for value in map(torch.atleast_1d, own)], groups]

    def _tensors(self) -> list[torch.Tensor]:
        params = [*self.plain.parameters()]
        slots = (slot for each in params for slot in sorted(self.optimizer.state[each].items()))
        return [*params, *(value for _, value in slots)]

    def resume(self, folder: Path, **settings: Any) -> CheckpointManager:
        config = CheckpointConfig(folder=str(folder / "steps"), initial_load_model_only=False, **settings)
        manager = CheckpointManager(config, {"model": self.model, "optimizer": self.optimizer})
        assert manager.load()
        return manager


def _go_on(kind: str, path: str) -> list[bool]:
    """Return whether runs from numbers, from the step that a manager saved then, and from a step of numbers are one."""
    folder = Path(path)
    first, second, third, fourth = (_Job(kind, seed) for seed in range(4))
    first.train(1, 2, 3)
    state = {"model": first.plain.state_dict(), "optimizer": first.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder / "numbers")
    dcp.save(state, checkpoint_id=folder / "other" / "steps" / "step-3")
    with second.resume(folder, initial_load_path=str(folder / "numbers")) as manager:
        same = [second.read() == first.read()]
        manager.save(3, force=True)
    third.resume(folder).close()
    fourth.resume(folder / "other").close()
    same += [third.read() == first.read(), fourth.read() == first.read()]
    for job in (first, second, third, fourth):
        job.train(4, 5)
    return [*same, *(job.read() == first.read() for job in (second, third, fourth))]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_go_on_from_numbered_parameters(gloo_ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """What ranks saved by ``optimizer.state_dict()``, apart or as a step, is resumed bit for bit, and saved anew."""
    assert gloo_ranks.run(2, _go_on, kind, str(tmp_path)) == [[True] * 6] * 2
