"""Save strategies of Megatron's kind that do not say what they write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedTensor
from shardckpt.compat.megatron.dist_checkpointing.strategies import base
from shardckpt.errors import PluginError

if TYPE_CHECKING:
    from pathlib import Path


class _Unnamed:
    """Names no format."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        (checkpoint_dir / "rank-0.txt").write_text(" ".join(sharded_state_dict))


class _HalfNamed(_Unnamed):
    """Names its backend alone."""

    backend = "files"


class _OnBase(base.SaveShardedStrategy):
    """Does not call the constructor of its base."""

    def __init__(self) -> None:
        pass

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save."""


def _state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}


def _recorded(path: Path) -> tuple[str, int]:
    found = json.loads((path / "metadata.json").read_text())
    return found["sharded_backend"], found["sharded_backend_version"]


def test_what_it_is_recorded_as_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save by a strategy that names no format warns, with what it lacks and what the checkpoint is loaded as."""
    for strategy, lacks, recorded in (
        (_Unnamed(), "backend and no version", ("torch_dist", 1)),
        (_HalfNamed(), "version", ("files", 1)),
    ):
        caplog.clear()
        path = tmp_path / lacks
        dc.save(_state(), path, strategy)
        said = [record.getMessage() for record in caplog.records if "has no" in record.getMessage()]
        assert len(said) == 1
        assert f"{type(strategy).__name__} has no {lacks}: the checkpoint is recorded as {recorded}" in said[0]
        assert _recorded(path) == recorded


def test_one_that_is_registered_writes_that_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Registered for a format that it does not name itself, it is recorded as that, without a warning."""
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "text", 3, _Unnamed())
    dc.save(_state(), tmp_path / "c", ("text", 3))
    assert _recorded(tmp_path / "c") == ("text", 3)
    assert not [record for record in caplog.records if "has no" in record.getMessage()]


def test_one_with_a_base_is_refused(tmp_path: Path) -> None:
    """A subclass of Megatron's base that skips its constructor is an error that says what to call."""
    with pytest.raises(PluginError, match=r"_OnBase has no backend: call super\(\)\.__init__\(backend, version\)"):
        dc.save(_state(), tmp_path / "c", _OnBase())
