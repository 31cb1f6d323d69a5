"""An open checkpoint lists what can be read of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.engine.locations import locate
from shardckpt.maintenance.sources import Reading, open_source
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager

if TYPE_CHECKING:
    from pathlib import Path


class _Names(tuple[str, ...]):
    """Names that are not looked through."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return pytest.fail(f"all names were compared with {name}")


def test_damaged_names_are_left_out_of_the_index_in_linear_time(tmp_path: Path) -> None:
    """A lost file may have most of a million tensors: each is looked up, and not compared with all others."""
    dc.save({key: ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in "abc"}, tmp_path / "c")
    plugins = get_plugin_manager()
    with open_source(locate(tmp_path / "c", plugins), plugins, Reading()) as opened:
        rest = replace(opened, damaged=_Names(("a", "c")))
        assert [shard.key for shard in rest.index()] == rest.columns().keys == ["b"]
