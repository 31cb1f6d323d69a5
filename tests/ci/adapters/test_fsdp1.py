"""State of optimizers of FSDP1, of which torch makes and gathers the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_CPU = torch.device("cpu")


def _make(kind: Any, *sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(size, size) for size in sizes]
    model = nn.Sequential(*(FullyShardedDataParallel(each, use_orig_params=True, device_id=_CPU) for each in layers))
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=_CPU)
    return model, kind(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state_dict = to_sharded_state_dict(model, optimizer)
    load_into(dist_checkpointing.load(state_dict, path, on_unused="error"), model, optimizer)


def _load_twice(path: Path) -> list[bool]:
    job = _make(torch.optim.Adafactor, 1)
    _step(*job)
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    fresh = _make(torch.optim.Adafactor, 1)
    _load(path, *fresh)
    _load(path, *job)
    has_elements = any(param.numel() for param in job[0].parameters())
    return [bool(job[1].state) == bool(fresh[1].state) == has_elements, has_elements]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_rank_may_have_no_elements(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that have no elements of a parameter, or of any, load its state with the others, fresh or after steps."""
    assert sorted(ranks.run(3, _load_twice, tmp_path / "c")) == [[True, False], [True, True], [True, True]]


def _load_over_partial_state(path: Path) -> bool:
    job = _make(torch.optim.AdamW, 4, 4)
    _step(*job)
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    model, optimizer = _make(torch.optim.AdamW, 4, 4)
    model(torch.ones(2, 4)).sum().backward()
    for param in list(model.parameters())[2:]:
        param.grad = None
    optimizer.step()
    optimizer.zero_grad()
    _load(path, model, optimizer)
    _step(*job)
    _step(model, optimizer)
    return all(map(torch.equal, job[0].parameters(), model.parameters()))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_state_is_loaded_that_only_some_parameters_have(ranks: Ranks, tmp_path: Path) -> None:
    """A load has the stored state of parameters that have none yet, where the optimizer has that of others."""
    assert ranks.run(2, _load_over_partial_state, tmp_path / "c") == [True, True]
