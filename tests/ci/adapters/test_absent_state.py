"""Optimizer state that does not exist yet: not stored, left out of a load, and made by the optimizer in its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.adapters.absent_state import OPTIMIZERS, WIDTH, Experts, Training

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _sharded_training(optimizer: str, seed: int) -> Training:
    torch.manual_seed(seed)
    model = Experts()
    model.frozen.requires_grad_(requires_grad=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.shared, *model.experts):
        fully_shard(module, mesh=mesh)
    return Training(fully_shard(model, mesh=mesh), OPTIMIZERS[optimizer](model.parameters()))


def _run_sharded(training: Training, first: int, steps: int, *reached: int) -> list[float]:
    """Only the last rank has tokens for the experts, of the same batch everywhere."""
    losses = []
    here = dist.get_rank() == dist.get_world_size() - 1
    for number in range(first, first + steps):
        training.optimizer.zero_grad()
        batch = torch.sin(torch.arange(3.0 * WIDTH) * (number + 1)).view(3, WIDTH)
        loss = training.model(batch, reached, here=here).square().mean()
        loss.backward()
        training.optimizer.step()
        losses.append(loss.item())
    return losses


def _save_sharded(path: Path, optimizer: str) -> tuple[list[float], set[str]]:
    training = _sharded_training(optimizer, 1)
    _run_sharded(training, 0, 2, 0)
    training.save(path)
    with_state = training.with_state
    return [*_run_sharded(training, 2, 2, 0), *_run_sharded(training, 4, 2, 0, 1)], with_state


def _resume_sharded(path: Path, optimizer: str) -> tuple[list[float], set[str]]:
    training = _sharded_training(optimizer, 2)
    if dist.get_world_size() % 2 == 0:
        _run_sharded(training, 0, 1, 1)  # it has state of the expert of which the checkpoint has none
    training.load(path, strict=True)
    with_state = training.with_state
    return [*_run_sharded(training, 2, 2, 0), *_run_sharded(training, 4, 2, 0, 1)], with_state


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("world_size", [1, *(pytest.param(count, marks=pytest.mark.proof) for count in (2, 4))])
def test_fsdp2_with_an_expert_that_one_rank_reaches(
    ranks: Ranks, tmp_path: Path, optimizer: str, world_size: int
) -> None:
    """Sharded parameters of an expert reached by one rank's tokens only, and of one that no rank has reached yet."""
    saved = ranks.run(world_size, _save_sharded, tmp_path / "c", optimizer)
    loaded = ranks.run(world_size, _resume_sharded, tmp_path / "c", optimizer)
    assert loaded == saved
    assert saved[0][1] == {f"{part}.{name}" for part in ("shared", "experts.0") for name in ("weight", "bias")}
