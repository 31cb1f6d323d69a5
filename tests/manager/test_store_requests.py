"""How many requests a manager sends to a store, and what it knows without any."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from obstore.store import MemoryStore

from shardckpt.errors import StorageError
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.storage import remote
from tests.remote.obstore import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "objects://bucket/run"
_CALLS = ("files", "tree", "folders", "read", "read_into", "create", "open_write", "delete", "delete_many")


@pytest.fixture
def store() -> MemoryStore:
    """The objects of objects://bucket."""
    return MemoryStore()


@pytest.fixture
def sent(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The requests that were sent to the store, by method."""
    found: Counter[str] = Counter()
    for name in _CALLS:
        monkeypatch.setattr(ObstoreFolder, name, _count(name, getattr(ObstoreFolder, name), found))
    with serving(lambda url: ObstoreFolder(url, store, url.removeprefix("objects://"))):
        yield found


def _count(name: str, call: Any, found: Counter[str]) -> Any:
    def counting(folder: ObstoreFolder, *args: Any) -> Any:
        found[name] += 1
        return call(folder, *args)

    return counting


@contextmanager
def _managing(keep: int = 4, **settings: Any) -> Iterator[CheckpointManager]:
    model = torch.nn.Linear(8, 8)
    config = CheckpointConfig(folder=FOLDER, interval=1, keep_latest_k=keep, best_metric="loss", **settings)
    with CheckpointManager(config, {"model": model}) as manager:
        yield manager


def test_what_a_manager_knows_is_not_asked_again(sent: Counter[str]) -> None:
    """A save costs as many requests with 2 steps as with 20; a step that is whole is looked at once.

    A manager that knows none of them sends two requests a step, and three for all.
    """
    costs = []
    with _managing(keep=20) as manager:
        for step in range(1, 21):
            sent.clear()
            assert manager.save(step)
            manager.wait()
            costs.append(sent.total())
        assert set(costs[1:]) == {costs[1]}
        assert costs[1] <= 24  # the step has six files; five ask whose the place is
        sent.clear()
        assert manager.steps() == list(range(1, 21))
        assert sent == {"folders": 1, "files": 1}
    with _managing(keep=20) as manager:
        sent.clear()
        assert len(manager.steps()) == 20
        assert sent == {"folders": 1, "files": 1, "tree": 1, "read_into": 40}


def test_where_all_steps_stay_each_is_looked_at_once(sent: Counter[str]) -> None:
    """Without retention, too, a save costs as many requests with 2 steps as with 20."""
    costs = []
    with _managing(keep=0) as manager:
        for step in range(1, 21):
            sent.clear()
            assert manager.save(step)
            manager.wait()
            costs.append(sent.total())
    assert set(costs[1:]) == {costs[1]}


def test_steps_that_change_after_they_are_listed_are_looked_at_again(
    sent: Counter[str], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is removed or written anew between the listing and the look at it is what it is by then."""
    with _managing(keep=4) as manager:
        for step in (1, 2, 3):
            manager.save(step)
        manager.wait()
    tree = ObstoreFolder.tree

    def list_and_change(folder: ObstoreFolder) -> dict[str, int]:
        found = tree(folder)
        if "step-2/metadata.json" in found:
            for name in found:
                if name.startswith("step-1/"):
                    store.delete(f"bucket/run/{name}")
            monkeypatch.setattr(ObstoreFolder, "tree", tree)
            model = torch.nn.Linear(16, 16)
            with CheckpointManager(CheckpointConfig(folder=FOLDER, interval=1), {"model": model}) as other:
                other.save(2)
        return found

    with _managing(keep=4) as manager:
        monkeypatch.setattr(ObstoreFolder, "tree", list_and_change)
        assert manager.steps() == [2, 3]
    assert sent["tree"]


def test_a_removal_costs_the_same_whatever_stays(sent: Counter[str]) -> None:
    """A save after which the oldest step goes costs as many requests with 3 steps as with 10."""
    costs = []
    for keep in (3, 10):
        with _managing(keep=keep) as manager:
            for step in range(1 + 100 * keep, 3 + 100 * keep + keep):
                sent.clear()
                assert manager.save(step)
                manager.wait()
            costs.append(sent.total())
            assert len(manager.steps()) == keep
    assert costs[0] == costs[1] <= 50


def test_what_has_changed_since_is_seen_before_it_counts(sent: Counter[str], store: MemoryStore) -> None:
    """The best step is looked at once more: one that another process has damaged, or saved anew, is not the best."""
    with _managing(keep=0) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            manager.save(step, metrics={"loss": loss})
        assert manager.best_step() == 2
        store.delete("bucket/run/step-2/common.pt")
        assert manager.best_step() == 3
        with _managing(keep=0) as other:
            other.save(3, metrics={"loss": 9.0})
        assert manager.best_step() == 1
    assert sent


def test_a_store_that_is_down_keeps_a_training_for_its_timeout(
    sent: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in the background is given up once SHARDCKPT_REMOTE_TIMEOUT has passed, by the name of store and setting.

    One in the foreground, for which the training waits in any case, is tried as often as ever.
    """
    now = 0.0

    def fail(*_: Any) -> None:
        nonlocal now
        now += 25
        sent["folders"] += 1
        raise ConnectionError("down")

    for mode, tries, words in (
        ("async", 3, r"objects://bucket/run in 3 attempts, while the training waits, SHARDCKPT_REMOTE_TIMEOUT=60 s: "),
        ("disabled", 5, r"objects://bucket/run in 5 attempts: "),
    ):
        with _managing(async_mode=mode) as manager, monkeypatch.context() as patch:
            patch.setattr(ObstoreFolder, "folders", fail)
            patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
            sent.clear()
            with pytest.raises(StorageError, match=words) as caught:
                manager.save(1)
        assert sent["folders"] == tries
        assert caught.value.phase == "reading the folder"


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_commit_of_the_save_before_keeps_a_training_no_longer(
    sent: Counter[str], monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """A store that goes down while a save is written costs what commits it one SHARDCKPT_REMOTE_TIMEOUT in all.

    The requests of the commit, and what would clean up after it, are not tried once the time is used up.
    """
    now = 0.0

    def fail(*_: Any) -> None:
        nonlocal now
        now += 25
        sent["failed"] += 1
        raise ConnectionError("down")

    with _managing(async_mode="async") as manager:
        assert manager.save(1)
        for thread in [each for each in threading.enumerate() if each.name == "shardckpt-background"]:
            thread.join()  # it is written, and not committed
        with monkeypatch.context() as patch:
            for name in _CALLS:
                patch.setattr(ObstoreFolder, name, fail)
            patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
            with pytest.raises(StorageError, match="objects://bucket/run"):
                (manager.maybe_wait_for_staging if is_asked else partial(manager.save, 2))()
            assert sent["failed"] == 3
        assert manager.save(3)
        manager.wait()
        assert manager.steps() == [3]
