"""Options of a strategy that must be equal on all ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.parallel.save import FullyParallelSaveStrategyWrapper
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardckpt.strategy import SaveStrategy
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


#: A strategy, an argument of it, and two values: ranks with either would call different collectives, or write one file.
_ARGUMENTS: list[tuple[Callable[..., SaveStrategy], str, object, object]] = [
    (TorchDistSaveShardedStrategy, "keep_only_main_replica", True, False),
    (SafetensorsSaveShardedStrategy, "keep_only_main_replica", True, False),
    (SafetensorsSaveShardedStrategy, "store_aliases", True, False),
    (SafetensorsSaveShardedStrategy, "layout", "boxes", "contiguous"),
    (partial(SafetensorsSaveShardedStrategy, layout="contiguous"), "max_shard_size", "5GB", 10),
    (partial(SafetensorsSaveShardedStrategy, layout="contiguous"), "prefix", None, "model."),
    (partial(SafetensorsSaveShardedStrategy, layout="contiguous"), "mapping", None, "megatron"),
    (partial(FullyParallelSaveStrategyWrapper, TorchDistSaveShardedStrategy()), "do_cache_distribution", False, True),
]


def _save_with_others(path: str) -> list[str]:
    tied = torch.ones(2, 2)
    keys = ("model.a", "model.b")
    state = {key: ShardedTensor.from_rank_offsets(key, tied, replica_id=dist.get_rank()) for key in keys}
    found = []
    for make, name, *values in _ARGUMENTS:
        with pytest.raises(CheckpointingException) as caught:
            dc.save(state, path, make(**{name: values[dist.get_rank()]}))
        found.append(str(caught.value))
    return found


def test_ranks_with_other_arguments_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """An argument of a strategy that must be equal on all ranks is named, with its values, before a file is written."""
    for found in ranks.run(2, _save_with_others, str(tmp_path / "a")):
        for message, (_, name, *_values) in zip(found, _ARGUMENTS, strict=True):
            assert f"ranks disagree on {name} of " in message
            assert message.endswith("on rank 1; pass the same on every rank")
    assert not list(tmp_path.iterdir())


def _load_with_others(path: str) -> str:
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=dist.get_rank())}
    strategy = TorchDistLoadShardedStrategy()
    given = FullyParallelLoadStrategyWrapper(strategy) if dist.get_rank() else strategy
    with pytest.raises(CheckpointingException) as caught:
        dc.load(wanted, path, sharded_strategy=given)
    return str(caught.value)


def test_ranks_that_load_by_other_classes_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """A strategy that only some ranks have wrapped is named: no error says that a rank has died."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "a")
    for text in ranks.run(2, _load_with_others, str(tmp_path / "a")):
        assert "ranks disagree on strategy_class: 'shardckpt_torch_dist.load.TorchDistLoadShardedStrategy' on " in text
        assert "'shardckpt.parallel.load.FullyParallelLoadStrategyWrapper' on rank 1; pass the same" in text
