"""The public API as a typed user calls it: ``mypy`` reads this file strictly, and test_api.py runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import assert_type

import shardckpt
from shardckpt import LoadContext, SaveContext, dist_checkpointing, hookimpl
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.dist_checkpointing import StrictHandling
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.local import TensorAwareStateDict
from shardckpt.manager import AsyncMode, CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedTensor
from shardckpt.strategy import LoadStrategy, SaveStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.plugins import StrategyRegistry


def describe(weight: torch.Tensor) -> dict[str, ShardedTensor | ShardedObject | int]:
    """A sharded state dict, as the user of ``dist_checkpointing`` writes one."""
    shard = ShardedTensor.from_rank_offsets("decoder.weight", weight, (0, 0, 1), replica_id=0)
    assert_type(shard, ShardedTensor)
    return {"weight": shard, "rng": ShardedObject("rng", {"seed": 3}, (1,), (0,)), "iteration": 17}


def save_and_load(folder: Path) -> torch.Tensor:
    """Save, load and look into a checkpoint."""
    weight = torch.arange(32.0).reshape(4, 8)
    done = dist_checkpointing.save(describe(weight), folder / "a", overwrite=True, content_metadata={"by": "test"})
    assert_type(done, AsyncRequest | None)
    loaded = torch.zeros(4, 8)
    dist_checkpointing.load(describe(loaded), str(folder / "a"), strict=StrictHandling.RAISE_ALL, accept=["torch_dist"])
    assert_type(dist_checkpointing.load_tensors_metadata(folder / "a"), dict[str, ShardedTensor])
    assert_type(dist_checkpointing.load_plain_tensors(folder / "a"), dict[str, torch.Tensor])
    assert_type(dist_checkpointing.load_content_metadata(folder / "a"), dict[str, Any] | None)
    with dist_checkpointing.open_checkpoint(folder / "a") as checkpoint:
        assert_type(checkpoint["decoder.weight"][1:2], torch.Tensor)
    return loaded


def save_in_background(folder: Path) -> list[int]:
    """Save behind the training."""
    with AsyncCallsQueue(persistent=False) as queue:
        request = dist_checkpointing.save(describe(torch.ones(4, 8)), folder / "b", async_sharded_save=True)
        assert_type(request, AsyncRequest)
        assert_type(queue.schedule_async_request(request), int)
        return queue.maybe_finalize_async_calls(blocking=True)


def train(folder: Path) -> list[int]:
    """A training loop with the manager."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(folder=str(folder / "steps"), interval=1, async_mode=AsyncMode.DISABLED)
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        assert_type(manager.load(), bool)
        for step in (1, 2):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            assert_type(manager.save(step, metrics={"loss": 0.5}), bool)
        return manager.steps()


def adapt(folder: Path) -> None:
    """Modules and optimizers, described and filled."""
    model = torch.nn.Linear(4, 2)
    state = to_sharded_state_dict(model)
    dist_checkpointing.save(state, folder / "c")
    load_into(dist_checkpointing.load(to_sharded_state_dict(model), folder / "c"), model)
    part, _ = TensorAwareStateDict.from_state_dict(to_sharded_state_dict(model))
    assert_type(part, TensorAwareStateDict)
    export_to_huggingface(folder / "c", folder / "hub")
    load_from_huggingface(to_sharded_state_dict(model), folder / "hub")


class MemorySave(SaveStrategy):
    """A strategy's author sees typed contexts; this one writes nothing."""

    backend = "typed"
    version = 1

    def save(self, shards: Sequence[ShardedBase], common: dict[str, Any], context: SaveContext) -> None:
        """Nothing."""


class MemoryLoad(LoadStrategy):
    """Its reader."""

    backend = "typed"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Nothing."""
        return [None for _ in wanted]

    def load_common(self, context: LoadContext) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Nothing."""
        return []


class Plugin:
    """A plugin's hooks."""

    @hookimpl
    def shardckpt_register(self, registry: StrategyRegistry) -> None:
        """Add the strategies."""
        registry.add(MemorySave)
        registry.add(MemoryLoad)


def check_errors(folder: Path) -> str:
    """All errors are of one family."""
    try:
        dist_checkpointing.load({}, folder / "absent")
    except shardckpt.CheckpointingException as exc:
        return str(exc)
    return ""
