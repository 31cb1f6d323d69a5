from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.adapters.torch_optimizers import NEEDED, OPTIONAL
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from pathlib import Path

KINDS = [*NEEDED, *OPTIONAL]
#: Adafactor's options are no numbers, with which Muon computes.
UNFIT_OPTIONS = (torch.optim.Adafactor, torch.optim.Muon)


def _make(kind: Any, **more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2, bias=False)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind(model.parameters(), **{"lr": 0.01, **options, **more})


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    grad = torch.ones(2, 3)
    model.weight.grad = grad.to_sparse() if type(optimizer) is torch.optim.SparseAdam else grad
    optimizer.step(lambda: 1.0) if type(optimizer) is torch.optim.LBFGS else optimizer.step()  # type: ignore[arg-type]


def _save(kind: Any, path: Path) -> None:
    model, optimizer = _make(kind)
    _step(model, optimizer)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), path)


def _resume(kind: Any, path: Path, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = _make(kind, **options)
    load_into(dist_checkpointing.load(to_sharded_state_dict(model, optimizer), path), model, optimizer)
    return model, optimizer


def test_the_tables_have_every_optimizer_of_torch() -> None:
    """Each class is in one of them, with names that a step of it makes."""
    kinds = {each for each in vars(torch.optim).values() if isinstance(each, type)}
    assert {each for each in kinds if issubclass(each, torch.optim.Optimizer)} == {*KINDS, torch.optim.Optimizer}
    for kind in KINDS:
        model, optimizer = _make(kind)
        _step(model, optimizer)
        made = optimizer.state[model.weight].keys()
        assert OPTIONAL[kind] <= made if kind in OPTIONAL else any(names <= made for names in NEEDED[kind]), kind


def test_state_of_any_class_is_refused_or_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where no step could use the loaded state, an error says so before the optimizer changes; else a step succeeds."""
    for saved in KINDS:
        _save(saved, tmp_path / saved.__name__)
    refused = 0
    for saved, live in product(KINDS, KINDS):
        caplog.clear()
        model, optimizer = _make(live, lr=0.7)
        before = [set(state) for state in optimizer.state.values()]  # Adagrad has its own from the beginning
        loaded = dist_checkpointing.load(to_sharded_state_dict(model, optimizer), tmp_path / saved.__name__)
        try:
            load_into(loaded, model, optimizer)
        except CheckpointingException as error:
            if f"optimizer 0, of the class {live.__name__}, cannot use the loaded state of 'weight'" not in str(error):
                raise
            assert optimizer.param_groups[0]["lr"] == 0.7
            assert [set(state) for state in optimizer.state.values()] == before
            refused += 1
        else:
            if (saved, live) != UNFIT_OPTIONS:
                _step(model, optimizer)
        if saved is live:
            assert not caplog.messages
    assert refused > 100


def test_state_that_a_class_ignores_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SGD after Adam begins without momentum: a warning names what was ignored; the user's own entries are not said."""
    _save(torch.optim.Adam, tmp_path / "step")
    _resume(torch.optim.SGD, tmp_path / "step")
    assert "optimizer 0, of the class SGD, ignores the loaded state (exp_avg, exp_avg_sq)" in caplog.text
    caplog.clear()
    model, optimizer = _make(torch.optim.SGD, momentum=0)
    optimizer.state[model.weight]["ema"] = torch.ones(2, 3)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "own")
    _, resumed = _resume(torch.optim.SGD, tmp_path / "own", momentum=0)
    assert next(iter(resumed.state.values())).keys() == {"ema"}
    assert not caplog.messages


def test_one_parameter_without_what_the_class_needs_is_refused(tmp_path: Path) -> None:
    """AdamW after Muon for matrices and AdamW for the rest: the error names the first matrix."""
    model = torch.nn.Linear(3, 2)
    ones = [torch.optim.Muon([model.weight], lr=0.01), torch.optim.AdamW([model.bias], lr=0.01)]
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
    for each in ones:
        each.step()
    dist_checkpointing.save(to_sharded_state_dict(model, *ones), tmp_path / "step")
    live = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.01)
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, live), tmp_path / "step")
    with pytest.raises(CheckpointingException, match="AdamW, cannot use the loaded state of 'weight'"):
        load_into(loaded, model, live)
