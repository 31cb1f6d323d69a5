"""Megatron's legacy checkpoints, which nothing here reads as a whole; a listing names them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.errors import format_many, name_call

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

#: The folders of ranks in Megatron's legacy format, and the file in each.
_LEGACY_RANK = re.compile(r"mp_rank_\d+(_\d+)*")
_LEGACY_FILE = "model_optim_rng.pt"


def describe_legacy_megatron(directory: Path, names: Collection[str]) -> str:
    """Describe a legacy checkpoint of Megatron, and name the command that reads it; ``""`` for any other folder."""
    ranks = sorted(filter(_LEGACY_RANK.fullmatch, names))
    if not ranks:
        return ""
    call = name_call("convert", directory / ranks[0] / _LEGACY_FILE, "NEW")
    advice = f"{call} writes a checkpoint of it, which loads"
    if len(ranks) > 1:
        advice = (
            "nothing here joins the shards of ranks: load it with Megatron, and save it in a distributed format; "
            f"{call} writes one rank's shards"
        )
    return f"a legacy checkpoint of Megatron (--ckpt-format torch) of {format_many(len(ranks), 'rank')}: {advice}"
