"""Plan what a rank writes and reads: which bytes, in which files, in which order."""

from shardckpt_torch_dist.plan.custom_planner import check_planner, make_planner, name_planner
from shardckpt_torch_dist.plan.file_layout import lay_out, padded_length
from shardckpt_torch_dist.plan.global_plan import build_index
from shardckpt_torch_dist.plan.load_plan import LoadPlan
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
from shardckpt_torch_dist.plan.objects import find_other_keys, pickle_objects
from shardckpt_torch_dist.plan.planned_load import CheckedPlanner, PlannedLoad, make_dcp_metadata, read_items
from shardckpt_torch_dist.plan.planned_save import check_archive, check_tensor, plan_by
from shardckpt_torch_dist.plan.reads import ItemReader
from shardckpt_torch_dist.plan.regions import build_own_archive
from shardckpt_torch_dist.plan.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.plan.split import set_rest_value
from shardckpt_torch_dist.plan.write_plan import WritePlan, append_archive

__all__ = [
    "CheckedPlanner",
    "ItemReader",
    "LoadPlan",
    "PlannedLoad",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "WritePlan",
    "append_archive",
    "build_index",
    "build_own_archive",
    "check_archive",
    "check_planner",
    "check_tensor",
    "find_other_keys",
    "lay_out",
    "make_dcp_metadata",
    "make_planner",
    "name_planner",
    "padded_length",
    "pickle_objects",
    "plan_by",
    "read_items",
    "set_rest_value",
]
