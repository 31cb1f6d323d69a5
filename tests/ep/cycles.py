"""A state saved as one layout of experts and loaded as another, on all ranks of the running job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing
from shardckpt_ep import EPLoadStrategy, EPSaveStrategy, expert_sharded_state_dict
from tests.ep.live import FQN, Case, Meshes, check, expected, layout, state

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from shardckpt_ep import ExpertLayout


def layouts(case: Case, mesh: DeviceMesh, held: dict[str, Any]) -> dict[str, ExpertLayout]:
    """Of the parameter in a state that :func:`tests.ep.live.state` made."""
    return {FQN: layout(case, mesh, held["model"][FQN])}


def save(case: Case, meshes: Meshes, path: Path) -> None:
    """The state as the case lays it out, by the EP strategy."""
    held = state(case, meshes.of(case))
    given = layouts(case, meshes.of(case), held)
    dist_checkpointing.save(expert_sharded_state_dict(held, given), path, EPSaveStrategy(given))


def load(case: Case, meshes: Meshes, path: Path) -> None:
    """Into the case's layout; raise unless every rank has its own part, in place."""
    held = state(case, meshes.of(case), empty=True)
    given = layouts(case, meshes.of(case), held)
    wanted = expert_sharded_state_dict(held, given)
    loaded = dist_checkpointing.load(wanted, path, EPLoadStrategy(given), strict=True)
    check(case, meshes.of(case), loaded)
    check(case, meshes.of(case), held)  # in place


def check_whole(experts: int, path: Path) -> None:
    """Plain DCP, in one process, reads all experts in true order."""
    if dist.get_rank() == 0:
        wanted = expected(experts)
        found = {key: torch.zeros_like(value) for key, value in wanted.items()}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        for key, value in wanted.items():
            assert torch.equal(found[key], value), key
