"""What a CheckpointManager does with what trainings do wrong, or do anew."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.cli import main
from shardckpt.errors import (
    CheckpointingException,
    ConfigurationError,
    KeyMismatchError,
    NotACheckpointError,
    RefusedByPolicyError,
)
from shardckpt.manager import CheckpointConfig, CheckpointManager, garbage_collection
from shardckpt.manager.garbage_collection import GarbageCollector
from shardckpt.manager.reader import StepReader
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


def _progress(step: int = 0) -> Progress:
    state = Progress()
    state.step = step
    return state


def _saved(manager: CheckpointManager, state: Progress, *steps: int) -> None:
    for step in steps:
        state.step = step
        assert manager.save(step, force=True)


@pytest.fixture
def wait_for_removal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that waits until a removal has begun, which goes on when somebody waits for it."""
    begun, go_on = threading.Event(), threading.Event()
    remove, wait = garbage_collection._try_to_remove, GarbageCollector.wait

    def remove_late(*arguments: Any) -> bool:
        begun.set()
        assert go_on.wait(60)
        return remove(*arguments)

    def wait_and_let_go_on(collector: GarbageCollector) -> None:
        if begun.is_set():
            go_on.set()
        wait(collector)

    def wait_until_begun() -> None:
        assert begun.wait(60)

    monkeypatch.setattr(garbage_collection, "_try_to_remove", remove_late)
    monkeypatch.setattr(GarbageCollector, "wait", wait_and_let_go_on)
    return wait_until_begun


def test_a_step_is_saved_anew_after_a_rewind(tmp_path: Path) -> None:
    """A run that goes back within a process saves again the step that it had saved last."""
    state = _progress()
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=2), {"train_state": state}) as manager:
        _saved(manager, state, 2, 4)
        assert manager.load(2)
        state.history = [9]
        assert manager.save(4)
        assert manager.load(4)
    assert state.history == [9]


def test_the_last_step_without_a_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where no state is called model, the last save has all states, with a warning, and not nothing."""
    state = _progress(5)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"train_state": state}) as manager:
        assert manager.save(5, last_step=True)
        state.step = 0
        assert manager.load()
    assert state.step == 5
    assert "no state is named 'model'" in caplog.text


def test_garbage_collection_leaves_what_is_saved_anew(tmp_path: Path, wait_for_removal: Callable[[], None]) -> None:
    """A step that garbage collection has chosen to remove, and that is saved again before it is removed, stays."""
    state = _progress()
    with CheckpointManager(CheckpointConfig(folder=tmp_path, keep_latest_k=0), {"train_state": state}) as manager:
        _saved(manager, state, 2, 4, 6, 8)
    with CheckpointManager(CheckpointConfig(folder=tmp_path, keep_latest_k=2), {"train_state": state}) as manager:
        assert manager.load(2)
        _saved(manager, state, 3)
        wait_for_removal()
        _saved(manager, state, 4)
        manager.wait()
        assert manager.steps() == [3, 4, 6, 8]


def test_a_load_waits_for_removals(tmp_path: Path, wait_for_removal: Callable[[], None]) -> None:
    """No checkpoint is removed while it is read: one that is to go is gone before the load looks for it."""
    state = _progress()
    with CheckpointManager(CheckpointConfig(folder=tmp_path, keep_latest_k=2), {"train_state": state}) as manager:
        _saved(manager, state, 2, 4, 6)
        wait_for_removal()
        with pytest.raises(CheckpointingException, match="step 2 cannot be loaded"):
            manager.load(2)
        assert manager.load()
        assert manager.loaded_step == 6


def test_a_policy_that_fails_removes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A function that raises, or returns no steps, is named in a warning; every checkpoint stays, and saves go on."""
    answers: list[Any] = [lambda _: 1 / 0, lambda _: None, lambda steps: [max(steps)]]

    def policy(steps: Any) -> Any:
        return answers[0](steps)

    config = CheckpointConfig(folder=tmp_path, retention=[policy])
    state = _progress()
    with CheckpointManager(config, {"train_state": state}) as manager:
        for step, text in ((1, "ZeroDivisionError"), (2, "returned None: return the steps to keep")):
            _saved(manager, state, step)
            manager.wait()
            assert text in caplog.text
            assert answers.pop(0)
        assert manager.steps() == [1, 2]
        _saved(manager, state, 3)
        manager.wait()
        assert manager.steps() == [3]


def _unlike(folder: str, what: str) -> str:
    rank = dist.get_rank()
    options: dict[str, Any] = {
        "interval": {"interval": 1 + rank},
        "load_only": {"load_only": bool(rank)},
        "save_on_sigterm": {"save_on_sigterm": bool(rank)},
    }.get(what, {})
    states: dict[str, Any] = {"train_state": _progress()}
    if rank and what == "states":
        states["more"] = _progress()
    if rank and what == "wrong":
        states["train_state"] = object()
    with pytest.raises(CheckpointingException) as caught:
        CheckpointManager(CheckpointConfig(folder=folder, **options), states)
    return str(caught.value)


@pytest.mark.parametrize("what", ["interval", "load_only", "save_on_sigterm", "states", "wrong"])
def test_ranks_must_be_told_the_same(ranks: Ranks, tmp_path: Path, what: str) -> None:
    """Ranks with other configurations or states are told when the manager is made: later they would not meet."""
    (message,) = set(ranks.run(2, _unlike, str(tmp_path), what))
    assert ("is an object of type object" if what == "wrong" else f"disagree on {what}") in message


def test_a_manager_is_made_by_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """One that was made before the process group is told so, instead of every rank taking itself for the only one."""
    (message,) = set(ranks.run(2, _made_too_early, str(tmp_path)))
    assert "after torch.distributed.init_process_group" in message


def _made_too_early(folder: str) -> str:
    manager = CheckpointManager(CheckpointConfig(folder=folder), {"train_state": _progress()})
    manager._world_size = 1  # as it is without a group
    with manager, pytest.raises(CheckpointingException) as caught:
        manager.save(1, force=True)
    return str(caught.value)


def test_what_was_loaded_is_told(tmp_path: Path) -> None:
    """A loop that does not count its steps itself asks the manager which step it goes on from."""
    state = _progress()
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"train_state": state}) as manager:
        _saved(manager, state, 3, 5)
        assert manager.loaded_step is None
        assert manager.load()
        assert manager.loaded_step == 5
        assert manager.load(3)
        assert manager.loaded_step == 3


def test_steps_that_lie_ahead_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who saves a step before others that are there is told once that a later load takes the newest."""
    state = _progress()
    config = CheckpointConfig(folder=tmp_path, keep_latest_k=0)
    with CheckpointManager(config, {"train_state": state}) as manager:
        _saved(manager, state, 2, 30)
    assert "a later load takes" not in caplog.text
    with CheckpointManager(config, {"train_state": state}) as manager:
        assert manager.load(2)
        _saved(manager, state, 3, 4)
    assert caplog.text.count("the newest is 30: a later load takes that one") == 1
    assert "manager.discard_after(3) removes them" in caplog.text


@table("damage", ["marker", "bytes", "mark"])
def test_later_steps_that_no_load_takes_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Who has fallen back from a damaged step, or from one marked as failed, is not told that it lies ahead."""
    config, states = CheckpointConfig(folder=tmp_path, keep_latest_k=0), {"model": torch.nn.Linear(64, 64)}
    with CheckpointManager(config, states) as manager:
        for step in (50, 60):
            manager.save(step, force=True)
    if damage == "marker":
        (tmp_path / "step-60" / "metadata.json").unlink()
    else:
        for path in (tmp_path / "step-60").glob("*.distcp"):
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    if damage == "mark":
        assert main(["verify", str(tmp_path), "--mark"]) == 1
    with CheckpointManager(config, states) as manager:
        assert manager.load()
        assert manager.loaded_step == 50
        manager.save(55, force=True)
    assert "a later load takes" not in caplog.text


def test_what_does_not_fit_names_the_checkpoint(tmp_path: Path) -> None:
    """Another shape is an error with the path and what to do about it."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"model": torch.nn.Linear(2, 2)}) as manager:
        manager.save(1, force=True)
    with (
        CheckpointManager(CheckpointConfig(folder=tmp_path), {"model": torch.nn.Linear(2, 3)}) as manager,
        pytest.raises(CheckpointingException, match=r"step-1 does not fit the states: (.|\n)*exclude_from_loading"),
    ):
        manager.load()


def test_where_to_begin_is_a_checkpoint(tmp_path: Path) -> None:
    """A folder of steps is an error that names one."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path / "a"), {"model": torch.nn.Linear(2, 2)}) as manager:
        manager.save(1, force=True)
    config = CheckpointConfig(folder=tmp_path / "b", initial_load_path=tmp_path / "a")
    with (
        CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager,
        pytest.raises(CheckpointingException, match=r"a folder of 1 checkpoint: give one, such as .*/step-1"),
    ):
        manager.load()


class TiedKeysError(KeyMismatchError):
    """A plugin's class whose constructor takes no text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second} are one")


class MountError(NotACheckpointError):
    """Another one."""

    def __init__(self, *, host: str) -> None:
        super().__init__(f"{host} has no disk")


@table(
    ("method", "error", "text"),
    [
        ("fetch", TiedKeysError("a", "b"), "does not fit the states: a and b are one\n"),
        ("read", MountError(host="h"), "initial_load_path: h has no disk; of a folder of steps give one"),
    ],
)
def test_a_plugins_error_keeps_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: CheckpointingException, text: str
) -> None:
    """An error of a class whose constructor takes other arguments is raised as itself, with what to do about it."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(StepReader, method, fail)
    config = CheckpointConfig(folder=tmp_path, initial_load_path=tmp_path / "a")
    with CheckpointManager(config, {"train_state": _progress()}) as manager, pytest.raises(type(error), match=text):
        manager.load()


def test_a_manager_loads_what_its_setting_accepts(tmp_path: Path) -> None:
    """Steps, an initial checkpoint and a Hub folder of a format that ``accept`` leaves out are errors that name it."""
    state = _progress()
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "a")), {"progress": state}) as manager:
        _saved(manager, state, 1)
    model, accept = {"model": torch.nn.Linear(2, 2)}, ("safetensors", ("ep", 1))
    for config in (
        {"folder": tmp_path / "a"},
        {"folder": tmp_path / "b", "initial_load_path": tmp_path / "a" / "step-1", "initial_load_model_only": False},
        {"folder": tmp_path / "b", "initial_load_path": tmp_path, "initial_load_in_hf": True},
    ):
        states = model if "initial_load_in_hf" in config else {"progress": state}
        with (
            CheckpointManager({**config, "accept": accept, "strategy": "safetensors"}, states) as manager,
            pytest.raises(RefusedByPolicyError, match=r"; CheckpointConfig\.accept allows 'safetensors', 'ep@1'"),
        ):
            manager.load()
    with CheckpointManager({"folder": tmp_path / "a", "accept": "torch_dist"}, {"progress": state}) as manager:
        assert manager.load() == 1
    with pytest.raises(ConfigurationError, match=r"accept: a strategy is named as 'backend'.*not 'a@b'"):
        CheckpointConfig(accept="a@b")
