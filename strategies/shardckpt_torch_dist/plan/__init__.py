"""Plan what a rank writes and reads: which bytes, in which files, in which order."""

from shardckpt_torch_dist.plan.file_layout import lay_out, padded_length
from shardckpt_torch_dist.plan.global_plan import merge_plans
from shardckpt_torch_dist.plan.items import Source, collect_items, pickle_objects, view_tensors
from shardckpt_torch_dist.plan.load_plan import LoadPlan
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner, check_cast
from shardckpt_torch_dist.plan.reads import ItemReader
from shardckpt_torch_dist.plan.regions import build_own_archive
from shardckpt_torch_dist.plan.requested import Region
from shardckpt_torch_dist.plan.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.plan.split import set_rest_value
from shardckpt_torch_dist.plan.write_plan import GlobalFiles, WritePlan, append_tensor

__all__ = [
    "GlobalFiles",
    "ItemReader",
    "LoadPlan",
    "Region",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "Source",
    "WritePlan",
    "append_tensor",
    "build_own_archive",
    "check_cast",
    "collect_items",
    "lay_out",
    "merge_plans",
    "padded_length",
    "pickle_objects",
    "set_rest_value",
    "view_tensors",
]
