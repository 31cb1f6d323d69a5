from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manifest import Lineage
from shardckpt.mapping import ShardedTensor
from tests.states import error_of
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

PARENT = "0123456789abcdef" * 2
BACKENDS = pytest.mark.parametrize("backend", ["torch_dist", "safetensors"])


def make_state() -> dict[str, Any]:
    """A tensor, and common state."""
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 7}


def lineage_of(path: Path) -> Lineage:
    """What a checkpoint says; its index says the same, if it is of (safetensors, 1)."""
    with dc.open_checkpoint(path) as stored:
        found, save_id = stored.lineage, stored.save_id
    if (path / "index.safetensors").exists():
        with safe_open(path / "index.safetensors", framework="pt") as index:
            header = json.loads(index.metadata()["shardckpt"])
        assert (header["id"], header["parent"], header["step"]) == (save_id, *found)
    return found


@BACKENDS
def test_a_checkpoint_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    """Parent and step of a save, in the foreground and behind the training, are stored, inspected and converted."""
    dc.save(make_state(), tmp_path / "a", backend, parent=PARENT, step=np.int64(7))  # type: ignore[arg-type]
    with AsyncCallsQueue() as queue:
        request = dc.save(make_state(), tmp_path / "b", backend, async_sharded_save=True, parent=PARENT, step=8)
        queue.schedule_async_request(request)
    dc.save(make_state(), tmp_path / "c", backend)
    found = {name: lineage_of(tmp_path / name) for name in "abc"}
    assert found == {"a": Lineage(PARENT, 7), "b": Lineage(PARENT, 8), "c": Lineage(None, None)}
    with dc.open_checkpoint(tmp_path / "a") as stored:
        expected = f"a: {backend!r}, version 1, id {stored.save_id}, parent {PARENT}, step 7"
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(expected)
    other = {"torch_dist": "safetensors", "safetensors": "torch_dist"}[backend]
    convert_checkpoint(tmp_path / "a", tmp_path / "d", other)
    assert lineage_of(tmp_path / "d") == Lineage(PARENT, 7)


@table("wrong", [{"parent": "step-6"}, {"parent": PARENT.upper()}, {"step": -1}, {"step": True}])
def test_what_is_no_lineage_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A path in the place of an id, or a step that is none, is an error that says what is expected."""
    with pytest.raises(CheckpointingException, match=r"(parent|step)=.*: expected |is no step; give"):
        dc.save(make_state(), tmp_path / "a", **wrong)
    assert not (tmp_path / "a").exists()


def _save_with_own_step(path: str) -> None:
    dc.save(make_state(), path, step=dist.get_rank())


def test_ranks_that_disagree_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks pass the same step: else nothing is saved, and the error names the argument."""
    ((_, text),) = {*ranks.run(2, error_of, _save_with_own_step, str(tmp_path / "a"))}
    assert "ranks disagree on step: 0 on rank 0, 1 on rank 1" in text


@BACKENDS
def test_a_manager_names_the_checkpoint_that_it_resumed_from(tmp_path: Path, backend: str) -> None:
    """Every step of a run has the checkpoint from which the run went on as its parent; those of the first have none."""
    config = CheckpointConfig(folder=str(tmp_path), interval=1, strategy=backend, keep_latest_k=0)
    ids: dict[int, str] = {}
    for first, resumed_from in ((1, None), (3, 2), (5, 4), (5, 3)):
        with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager:
            assert manager.load(-1 if resumed_from is None else resumed_from) is (resumed_from is not None)
            for step in (first, first + 1):
                assert manager.save(step)
        for step in (first, first + 1):
            expected = None if resumed_from is None else ids[resumed_from]
            assert lineage_of(tmp_path / f"step-{step}") == Lineage(expected, step)
            with dc.open_checkpoint(tmp_path / f"step-{step}") as stored:
                ids[step] = stored.save_id
