"""Ranks: collectives, process groups, and one error for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.distributed.comm import Comm
    from shardckpt.distributed.error_report import ErrorReport, replace_text
    from shardckpt.distributed.pickling import (
        PicklingError,
        SharedPickle,
        can_be_pickled,
        pickle_parts,
        pickle_to_compare,
        pickle_value,
        try_pickle,
        unpickle_parts,
        unpickle_trusted,
    )
    from shardckpt.distributed.routing import find_owner, join_parts, place_owner, split_parts

__getattr__ = lazy_getattr(
    __name__,
    {
        "comm": ("Comm",),
        "error_report": (
            "ErrorReport",
            "replace_text",
        ),
        "pickling": (
            "PicklingError",
            "SharedPickle",
            "can_be_pickled",
            "pickle_parts",
            "pickle_to_compare",
            "pickle_value",
            "try_pickle",
            "unpickle_parts",
            "unpickle_trusted",
        ),
        "routing": (
            "find_owner",
            "join_parts",
            "place_owner",
            "split_parts",
        ),
    },
)

__all__ = [
    "Comm",
    "ErrorReport",
    "PicklingError",
    "SharedPickle",
    "can_be_pickled",
    "find_owner",
    "join_parts",
    "pickle_parts",
    "pickle_to_compare",
    "pickle_value",
    "place_owner",
    "replace_text",
    "split_parts",
    "try_pickle",
    "unpickle_parts",
    "unpickle_trusted",
]
