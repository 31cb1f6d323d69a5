"""Ranks: collectives, process groups, and one error for all of them."""

from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import ErrorReport, replace_text
from shardckpt.distributed.pickling import can_be_pickled, try_pickle, unpickle_trusted
from shardckpt.distributed.routing import find_owner

__all__ = [
    "Comm",
    "ErrorReport",
    "can_be_pickled",
    "find_owner",
    "replace_text",
    "try_pickle",
    "unpickle_trusted",
]
