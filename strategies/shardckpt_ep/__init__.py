"""(ep, 1): the bytes of (torch_dist, 1) with expert parallelism understood: tensors hold all experts, in true order."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt_ep.layout import ExpertLayout
    from shardckpt_ep.load import EPLoadStrategy
    from shardckpt_ep.load_planner import EPLoadPlanner
    from shardckpt_ep.meshes import gather_experts_per_rank
    from shardckpt_ep.models import expert_layouts
    from shardckpt_ep.objects import ExpertObject, expert_object
    from shardckpt_ep.save import EPSaveStrategy
    from shardckpt_ep.save_planner import EPSavePlanner
    from shardckpt_ep.state import expert_sharded_state_dict

_HOMES = {
    "EPLoadPlanner": "load_planner",
    "EPLoadStrategy": "load",
    "EPSavePlanner": "save_planner",
    "EPSaveStrategy": "save",
    "ExpertLayout": "layout",
    "ExpertObject": "objects",
    "expert_layouts": "models",
    "expert_object": "objects",
    "expert_sharded_state_dict": "state",
    "gather_experts_per_rank": "meshes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "EPLoadPlanner",
    "EPLoadStrategy",
    "EPSavePlanner",
    "EPSaveStrategy",
    "ExpertLayout",
    "ExpertObject",
    "expert_layouts",
    "expert_object",
    "expert_sharded_state_dict",
    "gather_experts_per_rank",
]
