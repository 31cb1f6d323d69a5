"""Tensors that are not dense, or of which several elements are one place in memory: right, or an error by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import ShardingError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors.memory import overlaps_itself
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _State:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _module(value: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    module.register_buffer("value", value)
    return module


def _by_adapters(saved: torch.Tensor, live: torch.Tensor, path: Path) -> torch.Tensor:
    dc.save(to_sharded_state_dict(_module(saved)), path)
    module = _module(live)
    load_into(dc.load(to_sharded_state_dict(module), path), module)
    assert module.value is live
    return live


def _by_an_optimizer(saved: torch.Tensor, live: torch.Tensor, path: Path) -> torch.Tensor:
    def make(value: torch.Tensor) -> tuple[nn.Module, Any]:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["value"] = value
        return module, optimizer

    dc.save(to_sharded_state_dict(*make(saved)), path)
    module, optimizer = make(live)
    load_into(dc.load(to_sharded_state_dict(module, optimizer), path), module, optimizer)
    found: torch.Tensor = optimizer.state[module.weight]["value"]
    return found


def _by_a_manager(saved: torch.Tensor, live: torch.Tensor, path: Path) -> torch.Tensor:
    with CheckpointManager(CheckpointConfig(folder=str(path)), {"model": _module(saved)}) as manager:
        manager.save(1, force=True)
    with CheckpointManager(CheckpointConfig(folder=str(path)), {"model": _module(live)}) as manager:
        manager.load()
    return live


def _as_a_state(saved: torch.Tensor, live: torch.Tensor, path: Path) -> torch.Tensor:
    with CheckpointManager(CheckpointConfig(folder=str(path)), {"value": _State(saved)}) as manager:
        manager.save(1, force=True)
    state = _State(live)
    with CheckpointManager(CheckpointConfig(folder=str(path)), {"value": state}) as manager:
        manager.load()
    return state.value


DOORS = [_by_adapters, _by_an_optimizer, _by_a_manager, _as_a_state]
#: Each with what a fresh job has there.
SHARING = {
    "expanded": (torch.tensor([3.0]).expand(5), torch.zeros(1).expand(5)),
    "expanded, with nan": (torch.tensor([[1.0], [float("nan")]]).expand(2, 3), torch.zeros(2, 1).expand(2, 3)),
    "windows": (torch.arange(5.0).unfold(0, 3, 1), torch.zeros(5).unfold(0, 3, 1)),
    "expanded since": (torch.full((5,), 2.0), torch.zeros(1).expand(5)),
}


@table("door, name", [(door, name) for door in DOORS for name in SHARING])
def test_elements_of_one_place_come_back(tmp_path: Path, door: Callable[..., torch.Tensor], name: str) -> None:
    """A model with an expanded buffer resumes into its own memory, and so does whatever else shares its elements."""
    saved, like = SHARING[name]
    loaded = door(saved, like, tmp_path / "c")
    assert torch.equal(loaded.nan_to_num(7.0), saved.nan_to_num(7.0))
    if door is not _as_a_state:
        assert loaded.data_ptr() == like.data_ptr()


@table("door, live", [(door, live) for door in DOORS[:3] for live in ("expanded", "windows")])
def test_different_values_for_one_place_are_refused(
    tmp_path: Path, door: Callable[..., torch.Tensor], live: str
) -> None:
    """The error names the key, and the tensor keeps what it had: no value is lost to its neighbour."""
    into = torch.zeros(1).expand(9) if live == "expanded" else torch.zeros(5).unfold(0, 3, 1)
    saved = torch.arange(9.0).view(into.shape)
    with pytest.raises(ShardingError, match=r"value': its destination is expanded, or overlaps itself.*clone"):
        door(saved, into, tmp_path / "c")
    assert not into.any()


def test_a_load_into_data_that_overlaps_is_refused(tmp_path: Path) -> None:
    """A ShardedTensor whose data is a view of windows is an error by its key before anything is filled."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3, 3))}, tmp_path / "c")
    data = torch.zeros(5).unfold(0, 3, 1)
    with pytest.raises(ShardingError, match=r"'w': its data is expanded, or overlaps itself"):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", data)}, tmp_path / "c")
    assert not data.any()


SPARSE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:.*beta state:UserWarning")
@table(
    "door, name", [(door, name) for door in DOORS for name in SPARSE if (door, name) != (_by_an_optimizer, "jagged")]
)
def test_what_is_not_dense_is_refused_at_the_save(tmp_path: Path, door: Callable[..., torch.Tensor], name: str) -> None:
    """The error names the key, and says what can be stored instead."""
    with pytest.raises(ShardingError, match=r"value'.*(give|dense)"):
        door(SPARSE[name](), torch.zeros(3, 3), tmp_path / "c")


@table("door", DOORS)
def test_a_sparse_destination_is_no_place_for_dense_values(tmp_path: Path, door: Callable[..., torch.Tensor]) -> None:
    """What was dense when it was saved does not load into a sparse tensor: an error by name, or a dense one instead."""
    if door is _as_a_state:
        assert torch.equal(door(torch.eye(3), torch.zeros(3, 3).to_sparse(), tmp_path / "c"), torch.eye(3))
        return
    with pytest.raises(ShardingError, match=r"value': its data is sparse .* which cannot be filled"):
        door(torch.eye(3), torch.zeros(3, 3).to_sparse(), tmp_path / "c")


@table(
    "shape, stride, overlaps",
    [
        ((3, 3), (3, 1), False),
        ((3, 3), (1, 3), False),
        ((2, 2), (4, 1), False),
        ((2, 3), (3, 2), False),  # each at a place of its own, between the others
        ((0, 3), (0, 0), False),
        ((1, 3), (0, 1), False),
        ((3,), (0,), True),
        ((3, 3), (1, 1), True),
        ((2, 2), (3, 3), True),
        ((2, 3), (2, 1), True),
    ],
)
def test_an_overlap_is_seen(shape: tuple[int, ...], stride: tuple[int, ...], overlaps: bool) -> None:
    """Whatever the strides, two elements of one place are found, and none where there are none."""
    assert overlaps_itself(torch.zeros(20).as_strided(shape, stride)) == overlaps
