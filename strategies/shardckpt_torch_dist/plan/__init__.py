"""Plan what a rank writes and reads: which bytes, in which files, in which order."""

from shardckpt_torch_dist.plan.file_layout import lay_out, padded_length
from shardckpt_torch_dist.plan.global_plan import LocalPlan, merge_plans, pack_plan
from shardckpt_torch_dist.plan.items import Source, collect_items, pickle_objects, view_tensors
from shardckpt_torch_dist.plan.load_plan import LoadPlan, to_dcp_tensor
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner, check_cast
from shardckpt_torch_dist.plan.reads import ItemReader
from shardckpt_torch_dist.plan.regions import build_own_archive, read_object
from shardckpt_torch_dist.plan.requested import Region
from shardckpt_torch_dist.plan.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.plan.split import set_rest_value
from shardckpt_torch_dist.plan.write_plan import GlobalFiles, WritePlan, append_tensor

__all__ = [
    "GlobalFiles",
    "ItemReader",
    "LoadPlan",
    "LocalPlan",
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
    "pack_plan",
    "padded_length",
    "pickle_objects",
    "read_object",
    "set_rest_value",
    "to_dcp_tensor",
    "view_tensors",
]
