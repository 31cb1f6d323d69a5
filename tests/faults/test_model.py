"""The commit protocols, searched through: two saves and a load interleaved, kills, a power cut; and real traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from obstore.store import MemoryStore

from shardckpt.integrations.obstore.folder import ObstoreFolder
from tests.faults.model import directory, overwrite, store
from tests.faults.model.directory import explore_directory
from tests.faults.model.overwrite import explore_overwrites
from tests.faults.model.store import explore_store
from tests.faults.model.traces import name_overwrite, name_requests
from tests.remote import jobs
from tests.remote.obstore import serving
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable


def without(steps: tuple[str, ...], *left_out: str) -> tuple[str, ...]:
    """The steps but for some."""
    assert set(left_out) <= set(steps)
    return tuple(step for step in steps if step not in left_out)


@pytest.mark.parametrize(
    ("rules", "states"),
    [
        (directory.Rules(), 20_000),
        (directory.Rules(overwrite=False), 5_000),
        pytest.param(directory.Rules(can_exchange=False), 50_000, marks=pytest.mark.ci),
    ],
)
def test_directories_are_whole_after_anything(rules: directory.Rules, states: int) -> None:
    """No interleaving, kill or power cut shows half a checkpoint, loses a reported one, or blocks the next save."""
    found = explore_directory(rules)
    assert (found.broken, found.path) == ("", ())
    assert found.states > states


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        *((without(directory.STEPS, step), "the target is not whole") for step in directory.STEPS[1:6]),
        (without(directory.STEPS, "sync parent", "remove old"), "a save that reported success is lost"),
        (without(directory.STEPS, "sync parent"), "the target is not whole"),
        ((*directory.STEPS[:5], "commit", "sync staging", *directory.STEPS[7:]), "the target is not whole"),
        ((*directory.STEPS[:2], "commit", *directory.STEPS[2:6], *directory.STEPS[7:]), "the target is not whole"),
        ((*directory.STEPS[:7], "remove old", "sync parent"), "the target is not whole"),
        (("make staging", "sync data", "write data", *directory.STEPS[3:]), "the target is not whole"),
    ],
)
def test_a_wrong_order_in_a_directory_is_found(steps: tuple[str, ...], broken: str) -> None:
    """Each fsync that is left out or comes too late, and a rename that comes too early, breaks an invariant."""
    assert explore_directory(directory.Rules(steps=steps)).broken == broken


def test_a_reader_holds_the_directory_or_compares() -> None:
    """A load that opens by path and compares nothing mixes two saves; one that holds the directory does not."""
    assert explore_directory(directory.Rules(digests=False)).broken == ""
    assert explore_directory(directory.Rules(holds=False, digests=False)).broken == "a mixture was loaded"


@table("is_conditional", [True, False])
def test_stores_are_whole_after_anything(is_conditional: bool) -> None:
    """No interleaving of requests, nor a kill, shows a mixture, two winners, or leftovers that block the next save."""
    found = explore_store(store.Rules(is_conditional=is_conditional))
    assert (found.broken, found.path) == ("", ())
    assert found.states > 500


@table(
    ("rules", "broken"),
    [
        (store.Rules(without(store.STEPS, "look again")), "a marker without its data"),
        (store.Rules(without(store.STEPS, "look again"), is_conditional=False), "a marker without its data"),
        (
            store.Rules(without(store.STEPS, "put in-progress", "look again")),
            "what a killed save left blocks the next one",
        ),
        (
            store.Rules((*store.STEPS[:4], "create marker", "put data", *store.STEPS[7:])),
            "a marker without its data",
        ),
        # what the error says that overwrite=True is not for: a save that goes on
        (store.Rules(is_patient=False), "a marker without its data"),
    ],
)
def test_a_wrong_order_on_a_store_is_found(rules: store.Rules, broken: str) -> None:
    """A step that is left out, a marker that comes too early, an overwrite of a save that goes on: each is found."""
    found = explore_store(rules)
    assert found.broken == broken
    assert found.path


def test_one_condition_is_enough_where_saves_look_again() -> None:
    """Without a claim, on a store that ignores conditions, the in-progress objects alone prevent a mixture."""
    steps = without(store.STEPS, "create claim", "delete claim")
    assert explore_store(store.Rules(steps, is_conditional=False)).broken == ""
    blind = without(steps, "look again", "check")
    assert explore_store(store.Rules(blind, is_conditional=False)).broken != ""


@pytest.mark.parametrize(
    "rules",
    [
        overwrite.Rules(),
        overwrite.Rules(is_conditional=False),
        overwrite.Rules(knows_processes=False),
    ],
)
def test_overwrites_on_stores_are_whole_after_anything(rules: overwrite.Rules) -> None:
    """Two overwrites, a prune and kills in any order: the marker names a whole save, nothing is lost."""
    found = explore_overwrites(rules)
    assert (found.broken, found.path) == ("", ())
    assert found.states > 10_000


@table(
    ("rules", "broken"),
    [
        (
            overwrite.Rules((*overwrite.STEPS[:4], "switch marker", "put data", *overwrite.STEPS[7:])),
            "the marker names what is not whole",
        ),
        (
            overwrite.Rules((*overwrite.STEPS[:6], "delete old", "switch marker", *overwrite.STEPS[8:])),
            "the marker names what is not whole",
        ),
        (
            overwrite.Rules((*overwrite.STEPS[:7], "delete claim", "delete in-progress", "delete old")),
            "what is left is not found by a prune",
        ),
        (overwrite.Rules(without(overwrite.STEPS, "put in-progress", "delete in-progress")), "a save alone fails"),
        (
            overwrite.Rules(without(overwrite.STEPS, "look again", "check"), is_conditional=False),
            "a checkpoint was replaced that its successor had not seen",
        ),
        # why a save deletes what it has replaced, and not whatever is there
        (overwrite.Rules(knows_processes=False, deletes="others"), "the marker names what is not whole"),
        # what the README says: without conditions a save must not be overruled while it goes on elsewhere
        (
            overwrite.Rules(knows_processes=False, is_conditional=False),
            "a checkpoint was replaced that its successor had not seen",
        ),
    ],
)
def test_a_wrong_overwrite_on_a_store_is_found(rules: overwrite.Rules, broken: str) -> None:
    """A step that is left out, comes too early or deletes too much breaks an invariant."""
    found = explore_overwrites(rules)
    assert found.broken == broken
    assert found.path


#: Calls of a store's folder, and what they ask of the store.
REQUESTS = {
    "replace": "replace",
    "tree": "list",
    "files": "list",
    "create": "create",
    "upload": "put",
    "open_write": "put",
    "delete": "delete",
    "delete_many": "delete",
}


class Recorder(ObstoreFolder):
    """A store in memory that notes what is asked of it."""

    def __init__(self, url: str, requests: list[tuple[str, str]], memory: MemoryStore) -> None:
        below = url.removeprefix("objects://bucket")
        super().__init__(url, memory, f"model{below}")
        self._below = f"{below[1:]}/" if below else ""
        self._requests = requests
        for name, request in REQUESTS.items():
            setattr(self, name, self._noting(request, getattr(self, name)))

    def _noting(self, request: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            names = args[0] if args else ""
            for name in [names] if isinstance(names, str) else names:
                self._requests.append((request, f"{self._below}{name}"))
            return call(*args)

        return noted


def test_a_real_save_to_a_store_is_a_path_of_the_model() -> None:
    """The requests of a real save are the model's steps in the model's order."""
    requests: list[tuple[str, str]] = []
    memory = MemoryStore()
    with serving(lambda url: Recorder(url, requests, memory)) as url:
        jobs.save(url, 1.0)
    assert tuple(name_requests(requests)) == store.STEPS


def test_a_real_overwrite_on_a_store_is_a_path_of_the_model() -> None:
    """The requests of a real overwrite are the model's steps in the model's order, of the first save and of another."""
    requests: list[tuple[str, str]] = []
    memory = MemoryStore()
    with serving(lambda url: Recorder(url, requests, memory)) as url:
        jobs.save(url, 1.0)
        for value in (2.0, 3.0):
            requests.clear()
            jobs.save(url, value, overwrite=True)
            assert tuple(name_overwrite(requests)) == overwrite.STEPS
            jobs.check(url, value)
