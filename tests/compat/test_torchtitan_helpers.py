"""torchtitan's background process and its thread that purges, driven through their queues."""

from __future__ import annotations

import logging
import queue
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing
from shardckpt.compat.torchtitan import SaveDone, Terminate, checkpoint_mp, purge_thread, save_with_gc
from shardckpt.errors import CheckpointingException
from shardckpt.manager import pin_step, remove_step

if TYPE_CHECKING:
    from pathlib import Path


def _queue(*messages: Any) -> queue.Queue[Any]:
    filled: queue.Queue[Any] = queue.Queue()
    for message in messages:
        filled.put(message)
    return filled


class _Progress:
    """A state of a training, as torchtitan's train_state is one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": torch.tensor(7)}


def test_a_state_is_saved_and_replaced(tmp_path: Path) -> None:
    """What save_with_gc writes is a whole checkpoint that DCP reads, objects with a state dict among it."""
    for value in (1.0, 2.0):
        save_with_gc(
            {"w": torch.full((3,), value), "train_state": _Progress(), "lr": 0.1},
            checkpoint_id=str(tmp_path / "step-1"),
        )
    loaded = {"w": torch.zeros(3), "train_state": {"step": torch.tensor(0)}}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "step-1"))
    assert (loaded["w"].tolist(), loaded["train_state"]["step"].item()) == ([2.0] * 3, 7)
    assert dist_checkpointing.load_common_state_dict(tmp_path / "step-1")["lr"] == 0.1


def test_the_process_saves_what_comes_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SaveDone comes at the start and after each save; Terminate ends it; the error of a save ends it, too."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    done = _queue()
    steps = [({"w": torch.full((2,), float(n))}, str(tmp_path / f"step-{n}")) for n in (1, 2)]
    checkpoint_mp(_queue(*steps, Terminate()), done)
    assert [type(done.get_nowait()) for _ in range(3)] == [SaveDone] * 3
    assert done.empty()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointingException):
        checkpoint_mp(_queue(({"w": torch.ones(1)}, str(tmp_path / "file" / "step-3"))), done)
    assert done.qsize() == 1


def test_the_thread_removes_steps_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the paths in the queue, old steps go; the newest, a pinned one and what is no step stay, with a warning."""
    for number in (1, 2, 3):
        save_with_gc({"w": torch.ones(1)}, tmp_path / f"step-{number}")
    (tmp_path / "logs").mkdir()
    pin_step(tmp_path, 2, "the paper")
    paths = [str(tmp_path / name) for name in ("step-1", "step-2", "step-3", "logs", "step-9")]
    with caplog.at_level(logging.WARNING, "shardckpt"):
        purge_thread(_queue(*paths, Terminate()))
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert {"step-2", "step-3", "logs"} <= kept
    assert "step-1" not in kept
    said = "\n".join(record.getMessage() for record in caplog.records)
    for text in (
        "the paper",
        "step-3 stays: it is the newest",
        "has no directory of a step 'logs'",
        "step-9 stays: it does not exist",
    ):
        assert text in said


def test_one_step_is_removed(tmp_path: Path) -> None:
    """The result has the step and the bytes that its removal frees, whatever way the folder names its steps."""
    for number in (3, 4):
        save_with_gc({"w": torch.ones(1)}, tmp_path / f"iter_{number:07d}")
    result = remove_step(tmp_path, 3)
    assert (result.step, result.kept, result.error, result.nbytes > 0) == (3, "", "", True)
    assert not (tmp_path / "iter_0000003").exists()
