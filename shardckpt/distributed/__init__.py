"""Ranks: collectives, process groups, and one error for all of them."""

from shardckpt.distributed.comm import Comm, can_be_pickled, pickled, unpickled

__all__ = [
    "Comm",
    "can_be_pickled",
    "pickled",
    "unpickled",
]
