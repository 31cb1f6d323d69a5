"""Checkpoints that releases of shardckpt wrote load in every later one; ``tests.golden.write_own`` made them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from obstore.store import MemoryStore
from safetensors.torch import load_file

from shardckpt import ShardedObject, ShardedTensor, dist_checkpointing
from shardckpt.local import load_local
from shardckpt.maintenance import verify_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.state_dict import nested_values
from tests.golden.write_own import COMMON, CONTENT, describe, make_tensors, serving_store, train
from tests.golden_checkpoints import same_tensor
from tests.tables import table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

RELEASES = sorted(path.name for path in GOLDEN.glob("shardckpt-*"))
#: Checkpoints of the same state, and the files that a copy may have lost.
STATES = {
    "torch_dist": ("shardckpt-index.safetensors", "shardckpt.json"),
    "ep": ("shardckpt-index.safetensors", "shardckpt.json"),
    "fingerprints": ("shardckpt-index.safetensors", "shardckpt.json"),
    "safetensors": ("shardckpt.json",),
    "contiguous": ("shardckpt.json", "model.safetensors.index.json"),
    "index_in_parts": ("shardckpt.json", "model.safetensors.index.json"),
    "integrity": ("integrity.json", "shardckpt-index.safetensors", "shardckpt.json"),
}
STEPS = ("manager-torch_dist", "manager-safetensors")


@pytest.mark.parametrize("release", RELEASES)
@table("name", STATES)
def test_a_state_loads_at_any_number_of_ranks(ranks: Ranks, release: str, name: str) -> None:
    """Every tensor bit for bit, every object and common value, by 1, 2 and 3 ranks."""
    for world in (1, 2, 3):
        ranks.run(world, _load, str(GOLDEN / release / name))


@pytest.mark.parametrize("release", RELEASES)
@table(("name", "lost"), [(name, lost) for name, files in STATES.items() for lost in files])
def test_a_copy_without_an_optional_file_loads(tmp_path: Path, release: str, name: str, lost: str) -> None:
    """It loads as the whole one does: what the file says stands elsewhere, too."""
    copy = tmp_path / name
    shutil.copytree(GOLDEN / release / name, copy)
    (copy / lost).unlink()
    _load(str(copy))


@pytest.mark.parametrize("release", RELEASES)
def test_an_index_in_parts_keeps_what_refers_to_other_parts(release: str) -> None:
    """Tied tensors, scales and contiguous tensors at odd bytes, of an index of three parts."""
    with dist_checkpointing.open_checkpoint(GOLDEN / release / "index_in_parts") as stored:
        assert stored["model.scaled"].block_scales == ("model.scales", (1, 32))
        assert same_tensor(stored["model.tied"][...], make_tensors()["model.layer0.weight"])
        assert torch.equal(stored["model.mask"][...], make_tensors()["model.mask"])


@pytest.mark.parametrize("release", RELEASES)
def test_an_overwritten_url_loads(release: str) -> None:
    """The objects of a URL whose second save is in a folder of its own, which the marker names."""
    root, store = GOLDEN / release / "generation", MemoryStore()
    for path in root.rglob("*"):
        if path.is_file():
            store.put(f"c/{path.relative_to(root).as_posix()}", path.read_bytes())
    with serving_store(store) as url:
        assert [each for each in verify_checkpoint(url) if each.fault] == []
        _load(url, writers=1)


@pytest.mark.parametrize("release", RELEASES)
@table("name", STEPS)
def test_a_step_of_a_manager_resumes(release: str, name: str) -> None:
    """Model, optimizer and schedule are as they were saved, and the metrics are there."""
    wanted = train()
    model, optimizer, schedule = train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    schedule.last_epoch = 0
    config = CheckpointConfig(folder=GOLDEN / release / name, load_only=True)
    with CheckpointManager(config, {"model": model, "optimizer": optimizer, "scheduler": schedule}) as manager:
        assert manager.load()
        assert manager.loaded_step == 2
        assert manager.metrics(2)["loss"] == 0.25
    for parameter, other in zip(model.parameters(), wanted[0].parameters(), strict=True):
        assert torch.equal(parameter, other)
        moments, others = optimizer.state[parameter], wanted[1].state[other]
        assert moments.keys() == others.keys()
        assert all(same_tensor(moments[key], others[key]) for key in others)
    assert optimizer.param_groups[0]["lr"] == wanted[1].param_groups[0]["lr"]
    assert schedule.last_epoch == 2


@pytest.mark.parametrize("release", RELEASES)
def test_local_and_exported_ones_are_read(release: str) -> None:
    """What a node kept, and what was exported for other tools."""
    weights = dict(train()[0].named_parameters())
    exported = load_file(GOLDEN / release / "exported" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[key], weights[key]) for key in weights)
    local = load_local(GOLDEN / release / "local")
    shards = {shard.key: shard for shard in nested_values(local.sharded_state_dict)}
    assert all(same_tensor(shards[key].data, tensor) for key, tensor in make_tensors().items())
    scaled = shards["model.scaled"]
    assert isinstance(scaled, ShardedTensor)
    assert scaled.block_scales == ("model.scales", (1, 32))


@pytest.mark.parametrize("release", RELEASES)
def test_no_file_of_them_is_damaged(release: str) -> None:
    """Nobody has changed them."""
    folders = [*STATES, *(f"{name}/step-2" for name in STEPS), "local"]
    faults = [each for name in folders for each in verify_checkpoint(GOLDEN / release / name) if each.fault]
    assert faults == []


def _load(path: str, writers: int = 2) -> None:
    """Load a state, as ranks that have other values, and compare everything."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wanted, blank = describe(rank, world, make_tensors()), describe(rank, world, make_tensors())
    for value in blank.values():
        if isinstance(value, ShardedTensor) and value.data is not None:
            value.data = torch.zeros_like(value.data)
    blank["rng"] = [ShardedObject("rng", None, (writers,), (number,), replica_id=rank) for number in range(writers)]
    loaded: dict[str, Any] = dist_checkpointing.load(blank, path)
    for key, value in wanted.items():
        if isinstance(value, ShardedTensor):
            assert same_tensor(loaded[key], value.data), key
    for number, found in enumerate(loaded["rng"]):
        assert found["rank"] == number
        assert torch.equal(found["state"], torch.arange(4) + 10 * number)
    assert {key: loaded[key] for key in COMMON} == COMMON
    assert dist_checkpointing.load_content_metadata(path)["writer"] == CONTENT["writer"]
