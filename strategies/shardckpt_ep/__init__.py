"""(ep, 1): the format of (torch_dist, 1) for expert parallelism: each tensor holds all experts, ordered by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt_ep.layout import ExpertLayout
    from shardckpt_ep.load import EPLoadStrategy
    from shardckpt_ep.load_planner import EPLoadPlanner, LocalExpertsLoadPlanner, local_plan
    from shardckpt_ep.meshes import EP_NAMES, FSDP_NAMES, Names, find_mesh_dim, gather_experts_per_rank, has_mesh_dim
    from shardckpt_ep.models import expert_layouts, expert_parameters
    from shardckpt_ep.names import ExpertNames
    from shardckpt_ep.objects import ExpertObject, expert_object
    from shardckpt_ep.read_items import get_stored_tensor
    from shardckpt_ep.save import EPSaveStrategy
    from shardckpt_ep.save_planner import EPSavePlanner
    from shardckpt_ep.state import expert_sharded_state_dict
    from shardckpt_ep.torch_private import StridedShard

# lazy: importing this package imports no torch
__getattr__ = lazy_getattr(
    __name__,
    {
        "layout": ("ExpertLayout",),
        "load": ("EPLoadStrategy",),
        "load_planner": ("EPLoadPlanner", "LocalExpertsLoadPlanner", "local_plan"),
        "meshes": ("EP_NAMES", "FSDP_NAMES", "Names", "find_mesh_dim", "gather_experts_per_rank", "has_mesh_dim"),
        "models": ("expert_layouts", "expert_parameters"),
        "names": ("ExpertNames",),
        "objects": ("ExpertObject", "expert_object"),
        "read_items": ("get_stored_tensor",),
        "save": ("EPSaveStrategy",),
        "save_planner": ("EPSavePlanner",),
        "state": ("expert_sharded_state_dict",),
        "torch_private": ("StridedShard",),
    },
)

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
    "get_stored_tensor",
    "has_mesh_dim",
    "local_plan",
]
