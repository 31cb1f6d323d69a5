"""(ep, 1): the format of (torch_dist, 1) for expert parallelism: each tensor holds all experts, ordered by number."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt_ep.layout import ExpertLayout
    from shardckpt_ep.load import EPLoadStrategy
    from shardckpt_ep.load_planner import EPLoadPlanner, LocalExpertsLoadPlanner, local_plan
    from shardckpt_ep.meshes import (
        EP_NAMES,
        FSDP_NAMES,
        Names,
        find_mesh_dim,
        gather_experts_per_rank,
        get_local_tensor,
        get_replica_coordinates,
        has_mesh_dim,
    )
    from shardckpt_ep.models import expert_layouts, expert_parameters
    from shardckpt_ep.names import ExpertNames
    from shardckpt_ep.objects import ExpertObject, expert_object
    from shardckpt_ep.read_items import get_stored_tensor
    from shardckpt_ep.save import EPSaveStrategy
    from shardckpt_ep.save_planner import EPSavePlanner
    from shardckpt_ep.state import expert_sharded_state_dict
    from shardckpt_ep.torch_private import StridedShard

#: The module of each name, which is imported when the name is first used: importing this package imports no torch.
_MODULES = {
    "EPLoadPlanner": "load_planner",
    "EPLoadStrategy": "load",
    "EPSavePlanner": "save_planner",
    "EPSaveStrategy": "save",
    "EP_NAMES": "meshes",
    "ExpertLayout": "layout",
    "ExpertNames": "names",
    "ExpertObject": "objects",
    "FSDP_NAMES": "meshes",
    "LocalExpertsLoadPlanner": "load_planner",
    "Names": "meshes",
    "StridedShard": "torch_private",
    "expert_layouts": "models",
    "expert_object": "objects",
    "expert_parameters": "models",
    "expert_sharded_state_dict": "state",
    "gather_experts_per_rank": "meshes",
    "has_mesh_dim": "meshes",
    "get_local_tensor": "meshes",
    "local_plan": "load_planner",
    "find_mesh_dim": "meshes",
    "get_replica_coordinates": "meshes",
    "get_stored_tensor": "read_items",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "EP_NAMES",
    "FSDP_NAMES",
    "EPLoadPlanner",
    "EPLoadStrategy",
    "EPSavePlanner",
    "EPSaveStrategy",
    "ExpertLayout",
    "ExpertNames",
    "ExpertObject",
    "LocalExpertsLoadPlanner",
    "Names",
    "StridedShard",
    "expert_layouts",
    "expert_object",
    "expert_parameters",
    "expert_sharded_state_dict",
    "find_mesh_dim",
    "gather_experts_per_rank",
    "get_local_tensor",
    "get_replica_coordinates",
    "get_stored_tensor",
    "has_mesh_dim",
    "local_plan",
]
