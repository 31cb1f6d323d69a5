"""Fingerprints of stored checkpoints: those of the values, whatever the format, the sharding and the memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.dist_checkpointing import remove_sharded_tensors
from shardckpt.engine import transaction
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import convert_checkpoint, verify_checkpoint
from shardckpt.maintenance.verify import INTACT, get_exit_code
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manifest.names import FINGERPRINTS_NAME
from shardckpt.mapping import ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.shared import shared_by_ranks
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _state() -> dict[str, ShardedTensor]:
    values = {
        "w": torch.arange(70.0 * 300).view(70, 300).sin(),
        "small": torch.tensor(3),
        "empty": torch.ones(0, 4),
        "half": torch.arange(999.0).bfloat16(),
    }
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}


@table("backend", ["torch_dist", "ep", "safetensors"])
def test_it_has_the_fingerprints_of_the_values(tmp_path: Path, backend: str) -> None:
    """A checkpoint of each backend has the fingerprints of the state that was saved, also read in little memory."""
    dist_checkpointing.save(_state(), tmp_path / "step", backend)
    expected = shardckpt.fingerprint(_state())
    with dist_checkpointing.open_checkpoint(tmp_path / "step") as checkpoint:
        assert checkpoint.compute_fingerprints() == expected
        assert checkpoint.compute_fingerprints(memory=4096) == expected
        assert checkpoint.compute_fingerprints(["w"]) == {"w": expected["w"]}


def test_a_key_that_is_not_stored_is_an_error(tmp_path: Path) -> None:
    """A caller who asks for a key that is not there learns which are, and gets no fingerprint of less."""
    dist_checkpointing.save(_state(), tmp_path / "step", "safetensors")
    with (
        dist_checkpointing.open_checkpoint(tmp_path / "step") as checkpoint,
        pytest.raises(CheckpointingException, match=r"no tensor 'v' is stored \(keys: .*small"),
    ):
        checkpoint.compute_fingerprints(["w", "v"])


def _cut_rows(key: str, value: torch.Tensor, axis: int, world: int, rank: int) -> ShardedTensor:
    if value.dim() <= axis:
        return ShardedTensor.from_rank_offsets(key, value, replica_id=rank)
    return ShardedTensor.from_rank_offsets(key, value.chunk(world, axis)[rank], (axis, rank, world))


#: The sums of all ranks are too many for one rank.
_MANY_SUMS = shared_by_ranks(partial(mock.patch.object, transaction, "INLINE_TABLES", 1))


def _save_all(folder: str) -> None:
    """Save with every backend and layout, in the foreground and behind the training, cut along either axis."""
    world, rank = dist.get_world_size(), dist.get_rank()
    values = {"w": torch.arange(70.0 * 300).view(70, 300).sin(), "small": torch.tensor(3), "tied": torch.ones(8)}
    values["tied2"] = values["tied"]
    strategies = {
        0: {"rows-whole": SafetensorsSaveShardedStrategy(layout="contiguous"), "rows-ep": "ep"},
        1: {
            "torch_dist": "torch_dist",
            "boxes": "safetensors",
            "contiguous": SafetensorsSaveShardedStrategy(layout="contiguous"),
        },
    }
    for axis, some in strategies.items():
        state = {key: _cut_rows(key, value, axis, world, rank) for key, value in values.items()}
        for name, strategy in some.items():
            dist_checkpointing.save(state, f"{folder}/{name}", strategy, fingerprints=True)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        dist_checkpointing.save(state, f"{folder}/later", async_sharded_save=True, fingerprints=True)
    )
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    with _MANY_SUMS():
        dist_checkpointing.save(state, f"{folder}/owners", fingerprints=True)


@pytest.mark.parametrize("world", [2])
def test_all_saves_of_several_ranks_store_the_same(ranks: Ranks, world: int, tmp_path: Path) -> None:
    """All backends and layouts, rows or columns, foreground or background: the fingerprints of the whole tensors."""
    ranks.run(world, _save_all, str(tmp_path))
    values = {"w": torch.arange(70.0 * 300).view(70, 300).sin(), "small": torch.tensor(3), "tied": torch.ones(8)}
    expected = shardckpt.fingerprint({**values, "tied2": values["tied"]})
    found = sorted(tmp_path.iterdir())
    assert len(found) == 7
    for path in found:
        with dist_checkpointing.open_checkpoint(path) as checkpoint:
            assert checkpoint.fingerprints == expected, path
            assert checkpoint.compute_fingerprints() == expected, path


def test_a_save_stores_none_unless_it_is_asked(tmp_path: Path) -> None:
    """Fingerprints take time: a plain save has no file of them, and says so by having none."""
    dist_checkpointing.save(_state(), tmp_path / "step")
    assert not (tmp_path / "step" / FINGERPRINTS_NAME).exists()
    with dist_checkpointing.open_checkpoint(tmp_path / "step") as checkpoint:
        assert checkpoint.fingerprints == {}


def test_removed_keys_lose_their_fingerprints(tmp_path: Path) -> None:
    """What is removed from a checkpoint has no fingerprint any more; the checkpoint is intact."""
    dist_checkpointing.save(_state(), tmp_path / "step", fingerprints=True, verify_integrity=True)
    remove_sharded_tensors(tmp_path / "step", "w")
    expected = shardckpt.fingerprint(_state())
    del expected["w"]
    with dist_checkpointing.open_checkpoint(tmp_path / "step") as checkpoint:
        assert checkpoint.fingerprints == expected
    assert get_exit_code(verify_checkpoint(tmp_path / "step")) == INTACT


@table("mode", ["disabled", "async"])
def test_a_manager_stores_them_if_it_is_asked(tmp_path: Path, mode: str) -> None:
    """With the option, the steps of a manager have fingerprints, written in the foreground or behind the training."""
    config = CheckpointConfig(folder=str(tmp_path), interval=1, fingerprints=True, async_mode=mode)
    model = torch.nn.Linear(3, 4)
    with CheckpointManager(config, {"model": model}) as manager:
        manager.save(1)
    (path,) = tmp_path.glob("step-*")
    with dist_checkpointing.open_checkpoint(path) as checkpoint:
        assert checkpoint.fingerprints == checkpoint.compute_fingerprints() != {}


def test_a_strategy_that_computes_none_is_refused(tmp_path: Path) -> None:
    """A caller who asks for fingerprints gets them, or an error that says how else: before anything is written."""

    class Other(SafetensorsSaveShardedStrategy):
        computes_fingerprints = False

    with pytest.raises(CheckpointingException, match=r"Other .*computes none"):
        dist_checkpointing.save(_state(), tmp_path / "step", Other(), fingerprints=True)
    assert not (tmp_path / "step").exists()


@table("to", ["torch_dist", "ep"])
def test_a_conversion_stores_those_of_its_proof(tmp_path: Path, to: str) -> None:
    """What was converted is compared without reading it: also with a cast, of whose values the fingerprints are."""
    dist_checkpointing.save(_state(), tmp_path / "step", "safetensors")
    convert_checkpoint(tmp_path / "step", tmp_path / "new", to)
    convert_checkpoint(tmp_path / "step", tmp_path / "cast", to, dtype="bfloat16")
    for name in ("new", "cast"):
        with dist_checkpointing.open_checkpoint(tmp_path / name) as checkpoint:
            assert checkpoint.fingerprints == checkpoint.compute_fingerprints(), name
            assert (checkpoint.fingerprints == shardckpt.fingerprint(_state())) == (name == "new")
        assert get_exit_code(verify_checkpoint(tmp_path / name)) == INTACT
