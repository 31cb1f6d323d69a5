from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.adapters.torch_optimizers import _USED
from shardckpt.errors import CheckpointingException
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = [torch.optim.LBFGS, torch.optim.Optimizer]


def _trained(kind: Any, *, steps: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2, bias=False)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        model.weight.grad = torch.ones(2, 3)
        if kind is torch.optim.SparseAdam:
            model.weight.grad = model.weight.grad.to_sparse()
        optimizer.step()
    return model, optimizer


def test_the_table_has_what_each_optimizer_of_torch_makes() -> None:
    """A step of each class makes the names that the table has of it, and every class of torch is in the table."""
    kinds = {each for each in vars(torch.optim).values() if isinstance(each, type)}
    assert {each for each in kinds if issubclass(each, torch.optim.Optimizer)} == {*_USED, *OTHERS}
    for kind, used in _USED.items():
        model, optimizer = _trained(kind)
        assert used & optimizer.state[model.weight].keys(), kind


@table(
    ("saved", "live", "is_said"),
    [
        (torch.optim.Adam, torch.optim.SGD, True),
        (torch.optim.Adam, torch.optim.RMSprop, True),
        (torch.optim.Adam, torch.optim.AdamW, False),
        (torch.optim.SGD, torch.optim.SGD, False),
    ],
)
def test_state_of_another_class_is_said(
    saved: Any, live: Any, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where an optimizer uses nothing of the state that was loaded, a warning says so, with the names."""
    caplog.clear()
    dist_checkpointing.save(to_sharded_state_dict(*_trained(saved)), tmp_path / "step")
    model, optimizer = _trained(live, steps=0)
    load_into(dist_checkpointing.load(to_sharded_state_dict(model, optimizer), tmp_path / "step"), model, optimizer)
    said = [text for text in caplog.messages if "does not use the loaded state" in text]
    assert len(said) == is_said
    assert all(f"optimizer 0, of the class {live.__name__}," in text for text in said)


def test_state_that_a_class_cannot_load_is_refused(tmp_path: Path) -> None:
    """SGD's state has no step, which torch's other classes look up: the error names the class and what is there."""
    dist_checkpointing.save(to_sharded_state_dict(*_trained(torch.optim.SGD)), tmp_path / "step")
    for kind in _USED.keys() - {torch.optim.SGD, torch.optim.Muon}:
        model, optimizer = _trained(kind, steps=0)
        loaded = dist_checkpointing.load(to_sharded_state_dict(model, optimizer), tmp_path / "step")
        with pytest.raises(CheckpointingException, match=rf"{kind.__name__}, cannot load .*\(momentum_buffer\)"):
            load_into(loaded, model, optimizer)
        assert all("momentum_buffer" not in state for state in optimizer.state.values())
