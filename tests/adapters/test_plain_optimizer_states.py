"""State dicts of optimizers by hand, as in the habit of ``torch.save``: into fresh optimizers, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.state_dict import are_equal
from shardckpt.testing import RankError
from tests import backends
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "groups": lambda params: torch.optim.Adam(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], amsgrad=True
    ),
}


def _job(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for number in range(steps):
        _step(model, optimizer, number)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 4), number + 1.0)).square().sum().backward()
    optimizer.step()


def _state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers], "epoch": 3}


def _load(path: Path, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    loaded = dist_checkpointing.load(to_sharded_state_dict(_state(model, *optimizers)), path, on_unused="error")
    model.load_state_dict(loaded["model"])
    for optimizer, state in zip(optimizers, loaded["optimizers"], strict=True):
        optimizer.load_state_dict(state)


@backends.both
@table("kind", list(OPTIMIZERS))
def test_a_fresh_optimizer_gets_its_state(tmp_path: Path, kind: str) -> None:
    """As from ``torch.save``: state, options and the next step are those of the run that was not interrupted."""
    saved, resumed = _job(kind, 3), _job(kind, 0)
    dist_checkpointing.save(to_sharded_state_dict(_state(*saved)), tmp_path / "c")
    _load(tmp_path / "c", *resumed)
    assert repr(resumed[1].state_dict()) == repr(saved[1].state_dict())
    for job in (saved, resumed):
        _step(*job, 3)
    assert repr(resumed[0].state_dict()) == repr(saved[0].state_dict())


def test_an_optimizer_that_had_none_has_none(tmp_path: Path) -> None:
    """The state dict of an optimizer that was saved before its first step comes back as it was, unasked for, too."""
    job = _job("AdamW", 0)
    dist_checkpointing.save(to_sharded_state_dict(job[1].state_dict()), tmp_path / "c")
    for wanted in (to_sharded_state_dict(job[1].state_dict()), {}):
        assert dist_checkpointing.load(wanted, tmp_path / "c") == job[1].state_dict()


def test_a_fresh_optimizer_gets_that_of_plain_dcp(tmp_path: Path) -> None:
    """A folder that stock ``dcp.save`` wrote from the same dict."""
    saved, resumed = _job("AdamW", 3), _job("AdamW", 0)
    dcp.save(_state(*saved), checkpoint_id=tmp_path / "c", no_dist=True)
    _load(tmp_path / "c", *resumed)
    assert are_equal(resumed[1].state_dict(), saved[1].state_dict())


def test_state_by_names_is_not_taken_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """State by the names of parameters, of which the first part may be a number, is unused, and said to be."""
    saved, resumed = _job("AdamW", 3), _job("AdamW", 0)
    dist_checkpointing.save(to_sharded_state_dict(*saved), tmp_path / "c")
    wanted = {"model": resumed[0].state_dict(), "optimizer": resumed[1].state_dict()}
    loaded = dist_checkpointing.load(to_sharded_state_dict(wanted), tmp_path / "c")
    assert not loaded["optimizer"]["state"]
    assert "unused keys in the checkpoint, which nothing asks for: 13 (13 of optimizer)" in caplog.text


def _load_sharded(path: Path) -> None:
    model = fully_shard(_job("AdamW", 0)[0])
    wanted = _state(model, torch.optim.AdamW(model.parameters()))
    del wanted["optimizers"][0]["state"]
    dist_checkpointing.load(to_sharded_state_dict(wanted), path, on_unused="ignore")
    _load(path, model, torch.optim.AdamW(model.parameters()))


def test_nobody_knows_how_state_would_be_sharded(ranks: Ranks, tmp_path: Path) -> None:
    """Beside sharded parameters the error says what to give instead; without its key the rest is loaded."""
    dist_checkpointing.save(to_sharded_state_dict(_state(*_job("AdamW", 3))), tmp_path / "c")
    with pytest.raises(RankError, match=r"below 'optimizers.0.state', .* Give the optimizer itself: to_sharded_state_"):
        ranks.run(2, _load_sharded, tmp_path / "c")
