"""Stored tensors that differ cannot have one destination: a checkpoint of untied weights in a model that ties them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import KeyMismatchError
from shardckpt.huggingface import load_from_huggingface, save_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


class _Net(nn.Module):
    def __init__(self, *, is_tied: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, dtype=dtype)
        self.head = nn.Linear(4, 6, bias=False, dtype=dtype)
        if is_tied:
            self.head.weight = self.embed.weight


def _load(model: nn.Module, path: Path) -> None:
    load_into(dist_checkpointing.load(to_sharded_state_dict(model), path), model)


@table("backend", ["torch_dist", "safetensors"])
def test_weights_that_differ_are_not_tied(tmp_path: Path, backend: str) -> None:
    """The error names both; with the same values the model loads."""
    model, tied = _Net(is_tied=False), _Net(is_tied=True)
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "c", backend)
    with pytest.raises(KeyMismatchError, match=r"'embed\.weight' and 'head\.weight' have one destination"):
        _load(tied, tmp_path / "c")
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "equal", backend)
    _load(tied, tmp_path / "equal")
    assert torch.equal(tied.head.weight, model.embed.weight)


def test_tied_weights_load_in_either_way(tmp_path: Path) -> None:
    """Tied ones into tied ones, into separate ones, and into those of another dtype."""
    tied = _Net(is_tied=True)
    dist_checkpointing.save(to_sharded_state_dict(tied), tmp_path / "c")
    for model in (_Net(is_tied=True), _Net(is_tied=False), _Net(is_tied=True, dtype=torch.bfloat16)):
        _load(model, tmp_path / "c")
        assert torch.equal(model.head.weight, tied.embed.weight.to(model.head.weight.dtype))
        assert torch.equal(model.embed.weight, model.head.weight)


def test_a_manager_refuses_them_too(tmp_path: Path) -> None:
    """A resume says it, and does not take either."""
    config = CheckpointConfig(folder=str(tmp_path), interval=1)
    with CheckpointManager(config, {"model": _Net(is_tied=False)}) as manager:
        manager.save(1)
    with (
        CheckpointManager(config, {"model": _Net(is_tied=True)}) as manager,
        pytest.raises(KeyMismatchError, match=r"'model\.embed\.weight' and 'model\.head\.weight' have one destination"),
    ):
        manager.load()


def test_a_hugging_face_folder_with_both_is_refused(tmp_path: Path) -> None:
    """A folder of a model that does not tie its head, in one that does; a folder that lacks the head loads."""
    model, tied = _Net(is_tied=False), _Net(is_tied=True)
    tmp_path.joinpath("both").mkdir()
    save_state_dict(model.state_dict(), tmp_path / "both" / "model.safetensors")
    with pytest.raises(KeyMismatchError, match=r"'embed\.weight' and 'head\.weight' have one destination"):
        load_from_huggingface(to_sharded_state_dict(tied), tmp_path / "both")
    tmp_path.joinpath("one").mkdir()
    save_state_dict({"embed.weight": model.embed.weight.detach()}, tmp_path / "one" / "model.safetensors")
    load_into(load_from_huggingface(to_sharded_state_dict(tied), tmp_path / "one"), tied)
    assert torch.equal(tied.head.weight, model.embed.weight)
