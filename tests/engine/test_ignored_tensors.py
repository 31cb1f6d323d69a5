"""Tensors that no shard describes: a load that fills none of them, and a save that stores them as settings, say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import KeyMismatchError, ShardingError, UnsafePickleError
from tests.logs import collect_warnings
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _sharded(size: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def _load_dtensors(path: Path) -> None:
    model = _sharded(4)
    dist_checkpointing.save(to_sharded_state_dict(model, prefix="model."), path)
    with pytest.raises(ShardingError, match=r"\['model'\]\['weight'\] is a DTensor, of which each rank has a part"):
        dist_checkpointing.load({"model": model.state_dict()}, path)


def test_dtensors_are_refused_by_loads_as_by_saves(tmp_path: Path, ranks: Ranks) -> None:
    """The state dict of an FSDP2 model is no destination: its weights would stay as they are."""
    ranks.run(2, _load_dtensors, tmp_path / "c")


def _load_plain(path: Path) -> list[str]:
    dist_checkpointing.save(to_sharded_state_dict({"weight": torch.zeros(4, 4)}, prefix="model."), path)
    own = {"weight": torch.ones(4, 4)} if torch.distributed.get_rank() else {}
    before = own.get("weight", torch.ones(4, 4)).clone()
    with collect_warnings() as said:
        assert not dist_checkpointing.load({"model": own}, path).get("model")
    with pytest.raises(KeyMismatchError, match="no shard describes 1 tensor of the state dict to load"):
        dist_checkpointing.load({"model": own}, path, on_unused="error")
    dist_checkpointing.load({"model": own}, path, on_unused="ignore")
    assert torch.equal(own.get("weight", before), before)
    return said


def test_plain_tensors_that_are_not_filled_are_said(tmp_path: Path, ranks: Ranks) -> None:
    """Once, by the main rank, even where another rank alone has them; or they are an error on every rank."""
    said = ranks.run(2, _load_plain, tmp_path / "c")
    assert ["['model']['weight']" in text for text in said[0]] == [True]
    assert said[1] == []


def test_a_save_warns_of_large_tensors_in_the_common_state(tmp_path: Path) -> None:
    """A model that nothing describes is stored as settings are; a few numbers may be."""
    values = {"model": {"weight": torch.ones(600, 600), "bias": torch.ones(600)}, "epoch": torch.tensor(1)}
    with collect_warnings() as said:
        dist_checkpointing.save({"epoch": torch.tensor(1), "rng": torch.ones(5000)}, tmp_path / "small")
        dist_checkpointing.save(values, tmp_path / "large")
    (text,) = said
    assert text.startswith("no shard describes 3 tensors of 1.4 MB, in the common state then")
    assert "['model']['weight'], ['model']['bias'], ['epoch']" in text
    with collect_warnings() as said:
        found = dist_checkpointing.load(values, tmp_path / "large")  # it has all that was asked for
    assert torch.equal(found["model"]["weight"], torch.ones(600, 600))
    assert said == []


def test_a_sparse_tensor_in_the_common_state_is_refused_by_its_place(tmp_path: Path) -> None:
    """Its bytes cannot be counted: the error is of the allow-list, with the place and the way out."""
    with pytest.raises(UnsafePickleError, match=r"the common state\['a'\]\['b'\].*_rebuild_sparse_tensor"):
        dist_checkpointing.save({"a": {"b": torch.eye(3).to_sparse()}}, tmp_path / "c")


@table("what", ["model", "optimizer"])
def test_modules_and_optimizers_are_refused(tmp_path: Path, what: str) -> None:
    """What dcp.save and dcp.load take is no state dict here: without a word nothing would be loaded."""
    model = nn.Linear(2, 2)
    state = {what: {"model": model, "optimizer": torch.optim.SGD(model.parameters())}[what]}
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "c")
    match = rf"\['{what}'\] is a .*nothing describes: give the result of .*to_sharded_state_dict"
    for call, place in ((dist_checkpointing.load, "c"), (dist_checkpointing.save, "d")):
        with pytest.raises(ShardingError, match=match):
            call(state, tmp_path / place)
    assert not (tmp_path / "d").exists()
