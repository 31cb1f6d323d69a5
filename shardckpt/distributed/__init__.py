"""Ranks: collectives, process groups, and one error for all of them."""

from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import ErrorReport
from shardckpt.distributed.pickling import can_be_pickled, pickled, unpickled

__all__ = [
    "Comm",
    "ErrorReport",
    "can_be_pickled",
    "pickled",
    "unpickled",
]
