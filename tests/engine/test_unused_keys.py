"""What a checkpoint has and nothing asks for is said: layers, a forgotten state, another optimizer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt.testing import RankError
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _net(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "unused" in record.getMessage()]


def _save(path: Path) -> None:
    model = _net(4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = to_sharded_state_dict(model, optimizer)
    dist_checkpointing.save(state | {"ema": to_sharded_state_dict(model, prefix="ema.")}, path)


def test_a_load_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fewer layers than were saved, and a state that is forgotten: one line with counts and the first names."""
    _save(tmp_path / "c")
    model = _net(2)
    dist_checkpointing.load(to_sharded_state_dict(model, torch.optim.AdamW(model.parameters())), tmp_path / "c")
    (text,) = _warnings(caplog)
    assert text.startswith("unused keys in the checkpoint, which nothing asks for: 24 (8 of ema, 4 of model, 12 of opt")
    assert "ema.0.bias, ema.0.weight, ema.1.bias" in text
    assert "on_unused='ignore'" in text


def test_a_load_that_fails_has_its_error_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor of another shape, found after the keys are compared: no warning stands before its error."""
    _save(tmp_path / "c")
    wanted = {"w": ShardedTensor.from_rank_offsets("ema.0.weight", torch.zeros(3, 3))}
    with pytest.raises(CheckpointingException, match=r"ema\.0\.weight"):
        dist_checkpointing.load(wanted, tmp_path / "c")
    assert not _warnings(caplog)


def test_nothing_is_said_where_all_is_used_or_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not of a whole load, nor of the common state alone, nor on request."""
    _save(tmp_path / "c")
    model = _net(4)
    state = to_sharded_state_dict(model, torch.optim.AdamW(model.parameters()))
    dist_checkpointing.load(state | {"ema": to_sharded_state_dict(model, prefix="ema.")}, tmp_path / "c")
    dist_checkpointing.load({}, tmp_path / "c")
    dist_checkpointing.load(to_sharded_state_dict(_net(2), prefix="model."), tmp_path / "c", on_unused="ignore")
    assert not _warnings(caplog)


def test_an_error_fills_nothing(tmp_path: Path) -> None:
    """The error names the keys, and the tensors keep their values."""
    _save(tmp_path / "c")
    model = _net(2)
    before = model[0].weight.detach().clone()
    with pytest.raises(KeyMismatchError, match=r"unused keys in the checkpoint.*: 37 .*ema\.0\.bias"):
        dist_checkpointing.load(to_sharded_state_dict(model, prefix="model."), tmp_path / "c", on_unused="error")
    assert torch.equal(model[0].weight, before)
    with pytest.raises(CheckpointingException, match="on_unused='no': expected 'warn', 'error' or 'ignore'"):
        dist_checkpointing.load({}, tmp_path / "c", on_unused="no")  # type: ignore[arg-type]


def _load_own(path: Path) -> None:
    own = ShardedTensor.from_rank_offsets(f"w{torch.distributed.get_rank()}", torch.zeros(2))
    dist_checkpointing.load({"w": own}, path, on_unused="error")


def test_what_another_rank_asks_for_is_used(ranks: Ranks, tmp_path: Path) -> None:
    """Pipeline stages ask for their own layers each."""
    state = {f"w{number}": ShardedTensor.from_rank_offsets(f"w{number}", torch.ones(2)) for number in range(3)}
    dist_checkpointing.save({name: state[name] for name in ("w0", "w1")}, tmp_path / "two")
    ranks.run(2, _load_own, tmp_path / "two")
    dist_checkpointing.save(state, tmp_path / "three")
    with pytest.raises(RankError, match=r"unused keys in the checkpoint.*: 1 \(1 of w2\): w2"):
        ranks.run(2, _load_own, tmp_path / "three")


@table(
    "config, expected",
    [
        ({}, ["16 (", "12 of optimizer", "4 of model"]),
        ({"exclude_from_loading": ("ema",)}, ["16 (", "12 of optimizer", "4 of model"]),
        ({"on_unused": "ignore"}, []),
    ],
)
def test_a_manager_warns_of_its_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], expected: list[str]
) -> None:
    """Of those that it sets, not of those that are excluded."""
    caplog.clear()

    def states(layers: int) -> dict[str, Any]:
        model = _net(layers)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "ema": _net(4)}

    settings: dict[str, Any] = {"folder": str(tmp_path), "interval": 1, "last_save_model_only": False}
    with CheckpointManager(CheckpointConfig(**settings), states(4)) as manager:
        manager.save(1)
    with CheckpointManager(CheckpointConfig(**settings, **config), states(2)) as manager:
        assert manager.load()
    found = _warnings(caplog)
    assert len(found) == bool(expected)
    assert all(part in found[0] for part in expected)


@table("settings, is_said", [({}, True), ({"on_unused": "ignore"}, False), ({"initial_load_model_only": True}, False)])
def test_a_manager_names_values_that_no_state_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], is_said: bool
) -> None:
    """A scheduler's and a step's number of a folder of dcp.save are said once; not where the model alone is loaded."""
    caplog.clear()
    state = {"model": _net(2).state_dict(), "sched": {"last_epoch": 3}, "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    config = {"initial_load_path": str(tmp_path / "old"), "initial_load_model_only": False, **settings}
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "new"), **config), {"model": _net(2)}) as manager:
        assert manager.load()
    found = [
        record.getMessage() for record in caplog.records if "values of no state of this manager" in record.getMessage()
    ]
    assert ["values of no state of this manager: sched, step." in text for text in found] == [True] * is_said


def test_a_manager_names_a_forgotten_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state that was saved, and that the job that resumes does not have; nothing where the model alone is loaded."""
    config = CheckpointConfig(folder=str(tmp_path), interval=1, last_save_model_only=False)
    with CheckpointManager(config, {"model": _net(2), "ema": _net(2)}) as manager:
        manager.save(1)
    with CheckpointManager(config, {"model": _net(2)}) as manager:
        assert manager.load()
    (text,) = _warnings(caplog)
    assert "4 of ema" in text
    caplog.clear()
    initial = CheckpointConfig(folder=str(tmp_path / "new"), initial_load_path=str(tmp_path / "step-1"))
    with CheckpointManager(initial, {"model": _net(2)}) as manager:
        assert manager.load()
    assert not _warnings(caplog)
