"""Plan what a rank writes and reads: which bytes, in which files, in which order."""

from shardckpt_torch_dist.plan.file_layout import lay_out, padded_length
from shardckpt_torch_dist.plan.global_plan import build_index
from shardckpt_torch_dist.plan.load_plan import LoadPlan
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
from shardckpt_torch_dist.plan.objects import find_other_keys, pickle_objects
from shardckpt_torch_dist.plan.reads import ItemReader
from shardckpt_torch_dist.plan.regions import build_own_archive
from shardckpt_torch_dist.plan.save_planner import ShardedSavePlanner
from shardckpt_torch_dist.plan.split import set_rest_value
from shardckpt_torch_dist.plan.write_plan import WritePlan, append_archive

__all__ = [
    "ItemReader",
    "LoadPlan",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "WritePlan",
    "append_archive",
    "build_index",
    "build_own_archive",
    "find_other_keys",
    "lay_out",
    "padded_length",
    "pickle_objects",
    "set_rest_value",
]
