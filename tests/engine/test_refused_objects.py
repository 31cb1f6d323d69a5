"""Objects, given to a strategy that says that it stores none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import hookimpl
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.maintenance import convert_checkpoint
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt.strategy import SaveStrategy
from shardckpt_torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from tests.plugged import registered

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.plugins import StrategyRegistry
    from tests.ranks import Ranks


class SaveTensors(TorchDistSaveShardedStrategy):
    """Stores tensors alone."""

    supports_objects = False


class _SaveElsewhere(SaveTensors):
    backend = "tensors"


class _LoadElsewhere(TorchDistLoadShardedStrategy):
    backend = "tensors"


class _SaveInTheForeground(SaveStrategy):
    """Has neither background saves nor fingerprints."""

    backend, version = "foreground", 1

    def save(self, *_: object) -> None:
        """Write nothing: it is refused before."""


class _Plugin:
    """Has a format of its own that stores tensors alone."""

    @hookimpl
    def shardckpt_register(self, registry: StrategyRegistry) -> None:
        registry.add(_SaveElsewhere)
        registry.add(_LoadElsewhere)


def _state(*, with_object: bool) -> dict[str, object]:
    state: dict[str, object] = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=dist.get_rank())}
    return {**state, "rng": ShardedObject("rng state", {"seed": 1}, (1,), (0,))} if with_object else state


def _save(path: str, parallel: object, background: object) -> str:
    saver = SaveTensors()
    strategy = FullyParallelSaveStrategyWrapper(saver) if parallel else saver
    with pytest.raises(CheckpointingException) as caught:
        dc.save(_state(with_object=dist.get_rank() == 1), f"{path}/a", strategy, async_sharded_save=bool(background))
    dc.save(_state(with_object=False), f"{path}/b", strategy)
    return str(caught.value)


@pytest.mark.parametrize(("parallel", "background"), [("", ""), ("parallel", ""), ("", "background")])
def test_objects_are_refused_before_anything_is_written(
    ranks: Ranks, tmp_path: Path, parallel: str, background: str
) -> None:
    """One rank's object, given to a strategy without objects, is every rank's error, with key and author's class."""
    for text in ranks.run(2, _save, str(tmp_path), parallel, background):
        assert "stores no ShardedObjects (supports_objects is False), and the state dict has 1: rng state" in text
        assert f"{SaveTensors.__module__}.SaveTensors ('torch_dist', 1) of this process, {__file__}" in text
        assert "FullyParallelSaveStrategyWrapper" not in text
        assert "let the strategy store them and set supports_objects = True, or save by another strategy" in text
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_what_a_wrapped_strategy_cannot_do_is_said_of_it(tmp_path: Path) -> None:
    """Who saves through the parallel wrapper reads which strategy lacks an ability, not that the wrapper does."""
    strategy = FullyParallelSaveStrategyWrapper(_SaveInTheForeground())
    with pytest.raises(CheckpointingException, match=r"_SaveInTheForeground \('foreground', 1\) of this process"):
        dc.save({"step": 1}, tmp_path / "a", strategy, fingerprints=True)
    assert not [*tmp_path.iterdir()]


def test_the_error_is_that_of_a_state_dict(tmp_path: Path) -> None:
    """What a format cannot hold is a ShardingError."""
    with pytest.raises(ShardingError, match="rng state"):
        dc.save({"rng": ShardedObject("rng state", 1, (1,), (0,))}, tmp_path / "a", SaveTensors())


def test_a_conversion_refuses_them_before_it_writes(tmp_path: Path) -> None:
    """Objects of the source that the new format does not store are named, as in a save."""
    dc.save({"rng": ShardedObject("rng state", 1, (1,), (0,))}, tmp_path / "a")
    match = "_SaveElsewhere .*stores no ShardedObjects.*rng state"
    with registered(_Plugin()), pytest.raises(ShardingError, match=match):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", "tensors")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
