"""Options of a strategy that must be equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import TorchDistSaveShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.ranks import Ranks

#: Names that the engine compares itself.
NAMES = ("strategy", "strategy_class", "overwrite", "step", "checkpoint_dir", "also", "self")


class _Options(TorchDistSaveShardedStrategy):
    """Has options with the names of the engine's."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self._value = value

    @property
    def agreed_options(self) -> Mapping[str, object]:
        return dict.fromkeys(NAMES, self._value)


def _save(path: str) -> str:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=dist.get_rank())}
    dc.save(state, f"{path}/equal", _Options("zstd"))
    with pytest.raises(CheckpointingException) as caught:
        dc.save(state, f"{path}/other", _Options(dist.get_rank()))
    return str(caught.value)


def test_an_option_may_have_any_name(ranks: Ranks, tmp_path: Path) -> None:
    """Options with the names of the engine's own arguments are compared beside them; an error names the strategy."""
    found: list[Any] = ranks.run(2, _save, str(tmp_path))
    for message in found:
        assert "ranks disagree on strategy of _Options: 0 on rank 0, 1 on rank 1" in message
    assert [path.name for path in tmp_path.iterdir()] == ["equal"]
