from __future__ import annotations

import logging
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardckpt import settings
from shardckpt.commit.claim import Claim
from shardckpt.commit.commit import create_staging
from shardckpt.commit.staging_names import REPLACED, new_save_id, temporary_name
from shardckpt.errors import CheckpointingException, IncompleteCheckpointError, StorageError
from shardckpt.manager import garbage_collection, prune_steps
from shardckpt.manager.garbage_collection import GarbageCollector, discard_steps_after
from shardckpt.manager.marks import identify_save, mark_checkpoint
from shardckpt.manager.parts import Retention
from shardckpt.manager.retention import KeepLatest
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.storage.abilities import on_store
from tests import backends
from tests.commit import owners
from tests.manager import folders
from tests.manager.garbage_collection import LATEST, collect
from tests.plugged import registered
from tests.plugins.manager import Recorder
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.manager.retention import RetentionPolicy, StepMetrics
    from shardckpt.manager.step_pruning import StepResult
    from tests.clock import Clock
    from tests.remote.store import Store

KEEP_ALL: list[RetentionPolicy] = []


def _tombstone(name: str) -> str:
    return f".{name}.shardckpt-removed-{'0' * 32}"


def test_the_latest_are_kept_and_the_rest_leaves_nothing(tmp_path: Path) -> None:
    """Of four checkpoints the two with the highest steps stay, intact, whatever their times; the others are gone."""
    folders.save_all(tmp_path, 9, 10, 100, 8)
    os.utime(tmp_path / "step-8")
    os.utime(tmp_path / "step-100", (1, 1))
    assert collect(tmp_path) == [8, 9]
    assert folders.names_in(tmp_path) == {"step-10", "step-100"}
    assert folders.is_intact(tmp_path / "step-10", 10)
    assert folders.is_intact(tmp_path / "step-100", 100)


def test_a_removal_of_ones_own_is_no_interrupted_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which steps were removed, and of none that an interrupted removal had left it."""
    folders.save_all(tmp_path, 1, 2)
    with caplog.at_level(logging.INFO, "shardckpt"):
        assert collect(tmp_path, [KeepLatest(1)]) == [1]
    assert "removed step 1 from" in caplog.text
    assert "interrupted" not in caplog.text


def test_what_protects_a_step_is_said(tmp_path: Path) -> None:
    """A caller's list, or what it says of each; where there is no space, a manager names the steps of its own run."""
    folders.save_all(tmp_path, 1, 2, 3)
    for protected, why in (([1], "the caller protects it"), ({1: "the paper has it"}, "the paper has it")):
        found = {each.step: each.kept for each in prune_steps(tmp_path, [KeepLatest(1)], protected, dry_run=True)}
        assert (found[1], found[2]) == (why, "")
    retention = Retention(folders.steps_of(tmp_path), [KeepLatest(1)], None, links=False)
    retention.after_load(1)
    assert [text.partition(": ")[2] for text in retention.list_kept()][2:] == ["this job has loaded or saved it)"]


def _refuse(*_: Any, ignore_errors: bool = False) -> None:
    if not ignore_errors:
        raise PermissionError(1, "Operation not permitted")


@table(
    "failing, phase, said",
    [
        ((shutil, "rmtree"), "removing leftovers", "cannot remove {}/.step-{}."),
        ((os, "rename"), "removing a step", "step {1} in {0} is to be removed, and stays for now: "),
    ],
)
def test_what_cannot_be_removed_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: tuple[Any, str], phase: str, said: str
) -> None:
    """Each collection tries again, and is an event with a phase; the log has a line a step, and none says removed."""
    caplog.clear()
    folders.save_all(tmp_path, 1, 2, 3, 4)
    collector = GarbageCollector(folders.steps_of(tmp_path), [KeepLatest(1)])
    with pytest.MonkeyPatch.context() as patched, registered(Recorder()) as recorder:
        patched.setattr(*failing, _refuse)
        with caplog.at_level(logging.INFO, "shardckpt"):
            for _ in range(3):
                collector.submit()
            collector.close()
    lines = [text for text in caplog.messages if str(tmp_path) in text]
    assert [text[: len(said.format(tmp_path, step))] for step, text in zip((1, 2, 3), lines, strict=True)] == [
        said.format(tmp_path, step) for step in (1, 2, 3)
    ]
    assert [event.failed_phase for event in recorder.find("failure")] == [phase] * 9


def test_foreign_names_are_never_touched(tmp_path: Path) -> None:
    """Backups, replicas, exports, files and links to nowhere stay, though they hold whole checkpoints."""
    folders.save_all(tmp_path, 1, 2, 3)
    for name in folders.FOREIGN:
        folders.save(tmp_path, 50, name)
    (tmp_path / "step-55").write_text("a file")
    (tmp_path / "step-56").symlink_to(tmp_path / "nowhere")
    (tmp_path / _tombstone("notes")).mkdir()
    (tmp_path / ".step-1.shardckpt-removed-old").mkdir()
    before = folders.names_in(tmp_path)
    assert collect(tmp_path, [KeepLatest(1)]) == [1, 2]
    assert folders.names_in(tmp_path) == before - {"step-1", "step-2"}


@backends.both_in_proof
def test_what_does_not_count_is_not_removed(tmp_path: Path) -> None:
    """Damaged and unfinished steps, and those that need another plugin, displace no whole one, and stay.

    So the last checkpoint that can be loaded is never removed.
    """
    folders.save_all(tmp_path, 1, 2, 3, 4, 5, 6)
    folders.damage(tmp_path / "step-6")
    folders.lose_marker(tmp_path / "step-5")
    folders.say_backend(tmp_path / "step-4", "nobodys", 1)
    folders.damage(tmp_path / "step-1")
    before = folders.names_in(tmp_path)
    assert collect(tmp_path) == []
    assert folders.names_in(tmp_path) == before
    assert collect(tmp_path, [KeepLatest(1)]) == [2]
    assert folders.is_intact(tmp_path / "step-3", 3)


def test_a_save_under_way_neither_counts_nor_is_removed(tmp_path: Path) -> None:
    """What another process is writing, at whatever step, stays as it is."""
    folders.save_all(tmp_path, 1, 2)
    staging = create_staging(tmp_path / "step-3", new_save_id())
    (staging / backends.data_file(0)).write_bytes(b"so far")
    assert collect(tmp_path) == []
    assert collect(tmp_path, [KeepLatest(1)]) == [1]
    assert (staging / backends.data_file(0)).read_bytes() == b"so far"


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A step that is a link to another place neither counts nor is removed, nor what it points to."""
    folders.save_all(tmp_path / "elsewhere", 1, 9)
    run = tmp_path / "run"
    folders.save_all(run, 2, 3, 4)
    (run / "step-1").symlink_to(tmp_path / "elsewhere/step-1")
    (run / "step-9").symlink_to(tmp_path / "elsewhere/step-9")
    (run / "step-2/link").symlink_to(tmp_path / "elsewhere")
    assert collect(run) == [2]
    assert folders.names_in(run) == {"step-1", "step-3", "step-4", "step-9"}
    assert folders.is_intact(tmp_path / "elsewhere/step-1", 1)
    assert folders.is_intact(tmp_path / "elsewhere/step-9", 9)


def test_all_are_kept_where_nothing_is_to_be_removed(tmp_path: Path) -> None:
    """``keep_latest_k=0`` removes nothing; a folder that is not there yet is no error."""
    folders.save_all(tmp_path, 1, 2, 3)
    assert collect(tmp_path, KEEP_ALL) == []
    assert folders.names_in(tmp_path) == {"step-1", "step-2", "step-3"}
    assert collect(tmp_path / "new") == []
    assert not (tmp_path / "new").exists()


def test_what_a_crash_left_is_removed_and_is_no_checkpoint(tmp_path: Path) -> None:
    """A tombstone, whole or in part, is no step, cannot be loaded, and goes with the next collection."""
    folders.save_all(tmp_path, 1, 2)
    tombstone = tmp_path / _tombstone("step-1")
    (tmp_path / "step-1").rename(tombstone)
    with pytest.raises(IncompleteCheckpointError, match="of a checkpoint being removed"):
        read_manifest(tombstone, get_plugin_manager())
    assert folders.steps_of(tmp_path).steps() == [2]
    assert collect(tmp_path, KEEP_ALL) == []
    assert folders.names_in(tmp_path) == {"step-2"}


def test_leavings_of_killed_saves_are_removed(tmp_path: Path, clock: Clock) -> None:
    """What dead processes have left of steps goes; a living one's stays, and other hosts' until it is old."""
    folders.save(tmp_path, 1)
    dead = owners.leave(tmp_path / "step-2", owners.dead())
    owners.leave(tmp_path / "step-3", None, discarded=True)
    (tmp_path / f".{dead.name}.shardckpt-removed-{'0' * 32}").mkdir()  # as older releases removed them
    with owners.alive() as owner:
        alive = owners.leave(tmp_path / "step-4", owner)
        own = create_staging(tmp_path / "step-5", new_save_id())
        far, older = owners.leave(tmp_path / "step-6", owners.elsewhere()), owners.leave(tmp_path / "step-6", None)
        others = owners.leave(tmp_path / "other", owners.dead())
        strange = tmp_path / f"{dead.name}-mine"
        strange.mkdir()
        collector = GarbageCollector(folders.steps_of(tmp_path), KEEP_ALL)
        collector.submit()
        collector.wait()
        left = {"step-1", alive.name, own.name, others.name, strange.name}
        assert folders.names_in(tmp_path) == left | {far.name, older.name}
        clock.advance(hours=25)
        collector.submit()
        collector.close()
        assert folders.names_in(tmp_path) == left
    assert collect(tmp_path, KEEP_ALL) == []
    assert folders.names_in(tmp_path) == left - {alive.name}


@backends.both_in_proof
def test_a_checkpoint_set_aside_beside_a_whole_one_goes(tmp_path: Path) -> None:
    """Where the step is there, and whole, what an interrupted overwrite has moved aside has no use."""
    folders.save(tmp_path, 1)
    name = temporary_name("step-1", REPLACED, new_save_id(), owners.dead())
    shutil.copytree(tmp_path / "step-1", tmp_path / name)
    folders.damage(tmp_path / "step-1")
    collect(tmp_path)
    assert folders.names_in(tmp_path) == {"step-1", name}
    (tmp_path / "step-1").rename(tmp_path / "damaged")
    shutil.copytree(tmp_path / name, tmp_path / "step-1")
    collect(tmp_path)
    assert folders.names_in(tmp_path) == {"step-1", "damaged"}


def test_a_copy_set_aside_goes_before_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that is killed as it removes a step leaves no older copy of it that the next one has to keep."""
    folders.save_all(tmp_path, 1, 2, 3)
    aside = tmp_path / temporary_name("step-1", REPLACED, new_save_id(), owners.dead())
    shutil.copytree(tmp_path / "step-1", aside)
    make = garbage_collection.remove_checkpoint

    def be_killed(path: Path) -> None:
        make(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(garbage_collection, "remove_checkpoint", be_killed)
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path)
    monkeypatch.undo()
    collect(tmp_path)
    assert folders.names_in(tmp_path) == {"step-2", "step-3"}


@pytest.mark.usefixtures("no_pauses")
def test_a_checkpoint_set_aside_by_an_overwrite_stays(tmp_path: Path) -> None:
    """What an interrupted overwrite has moved aside may be the only copy: no collection removes it."""
    folders.save_all(tmp_path, 1, 2)
    aside = tmp_path / temporary_name("step-1", REPLACED, new_save_id(), owners.dead())
    (tmp_path / "step-1").rename(aside)
    collector = GarbageCollector(folders.steps_of(tmp_path), [KeepLatest(1)])
    collector.submit()
    collector.close()
    assert folders.is_intact(tmp_path / "step-2", 2)
    assert (aside / "metadata.json").exists()


def test_submitting_does_not_wait(tmp_path: Path) -> None:
    """A collection is done by another thread than that which submits it, and close() waits for all of them."""
    folders.save_all(tmp_path, 1, 2, 3)
    seen: list[str] = []
    folder = folders.steps_of(tmp_path)
    hold = threading.Event()

    class Watched(type(folder)):  # type: ignore[misc]
        def steps(self) -> list[int]:
            hold.wait(60)
            seen.append(threading.current_thread().name)
            return super().steps()  # type: ignore[no-any-return]

    collector = GarbageCollector(Watched(tmp_path, get_plugin_manager()), LATEST)
    collector.submit()
    collector.submit()
    assert seen == []
    hold.set()
    collector.close()
    assert seen == ["shardckpt-gc"] * 2
    assert folders.names_in(tmp_path) == {"step-2", "step-3"}


def test_a_long_wait_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While removals hang, and all ranks with them, a warning names the folder; a short wait says nothing."""
    folders.save_all(tmp_path, 1, 2, 3)
    begun, seen = threading.Event(), threading.Event()
    remove, texts = garbage_collection._try_to_remove, []

    def hang(*arguments: Any) -> bool:
        begun.set()
        seen.wait(60)
        return remove(*arguments)

    def warn(text: str, *arguments: object) -> None:
        texts.append(text % arguments)
        seen.set()

    monkeypatch.setattr(garbage_collection, "_try_to_remove", hang)
    monkeypatch.setattr(garbage_collection, "_PATIENCE", 0.1)
    monkeypatch.setattr(garbage_collection.logger, "warning", warn)
    collector = GarbageCollector(folders.steps_of(tmp_path), LATEST)
    collector.wait()
    collector.submit()
    assert begun.wait(60)
    collector.wait()
    collector.close()
    assert len(texts) == 1
    assert f"still waiting for old checkpoints in {tmp_path} to be removed" in texts[0]
    assert folders.names_in(tmp_path) == {"step-2", "step-3"}


def test_the_thread_survives_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A collection that fails is a warning with its reason, and each time an event; the next one works."""
    run = tmp_path / "run"
    run.write_text("a file where the folder should be")
    collector = GarbageCollector(folders.steps_of(run), [KeepLatest(1)])
    with registered(Recorder()) as recorder:
        for _ in range(3):  # it is said once
            collector.submit()
        collector.wait()
    failed = [(event.operation, event.directory, event.error_type) for event in recorder.find("failure")]
    assert failed == [("prune", str(run), "StorageError")] * 3
    assert caplog.text.count(f"cannot remove old checkpoints from {run}") == 1
    assert "Not a directory" in caplog.text
    run.unlink()
    folders.save_all(run, 1, 2)
    collector.submit()
    collector.close()
    assert folders.names_in(run) == {"step-2"}


def test_the_thread_survives_a_policy_that_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A SystemExit ends neither the thread nor, by a queue that nobody empties, the training."""

    class Exits(KeepLatest):
        def __call__(self, steps: StepMetrics) -> list[int]:
            raise SystemExit(3)

    folders.save_all(tmp_path, 1, 2)
    collector = GarbageCollector(folders.steps_of(tmp_path), [Exits(1)])
    collector.submit()
    collector.submit()
    collector.wait()
    collector.close()
    assert f"cannot remove old checkpoints from {tmp_path}: 3" in caplog.text


def test_going_back_before_a_link_removes_nothing(tmp_path: Path) -> None:
    """A later step that is a link could not be removed: that is said before any other is."""
    folders.save_all(tmp_path / "elsewhere", 3)
    run = tmp_path / "run"
    folders.save_all(run, 1, 2, 4)
    (run / "step-3").symlink_to(tmp_path / "elsewhere/step-3")
    with pytest.raises(CheckpointingException, match=r"nothing was removed.*are symbolic links.*: 3; remove"):
        discard_steps_after(folders.steps_of(run), 1)
    assert folders.names_in(run) == {"step-1", "step-2", "step-3", "step-4"}


def test_a_removal_that_fails_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be deleted of a step that is no checkpoint any more counts as a failure to prune."""
    folders.save_all(tmp_path, 1, 2)

    def fail(path: Path) -> None:
        raise StorageError(f"cannot remove {path}")

    monkeypatch.setattr("shardckpt.commit.leftovers.remove_tree", fail)
    collector = GarbageCollector(folders.steps_of(tmp_path), [KeepLatest(1)])
    with registered(Recorder()) as recorder:
        collector.submit()
        collector.close()
    assert [(event.operation, event.error_type) for event in recorder.find("failure")] == [("prune", "StorageError")]


def test_a_policy_that_raises_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says which policy raised what, and that nothing is removed, once, with a traceback."""

    def keep_good(steps: StepMetrics) -> list[int]:
        return [step for step, metrics in steps.items() if metrics["loss"]]

    folders.save_all(tmp_path, 1, 2)
    collector = GarbageCollector(folders.steps_of(tmp_path), [keep_good])
    collector.submit()
    collector.submit()
    collector.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"cannot remove old checkpoints from {tmp_path}: the retention policy {__name__}.")
    assert said.endswith("keep_good raised KeyError: 'loss'; until it returns, no checkpoint is removed")
    assert "in keep_good" in caplog.text
    assert folders.names_in(tmp_path) == {"step-1", "step-2"}


def test_closing(tmp_path: Path) -> None:
    """close() can be called twice, and without any collection; what is submitted after it is an error."""
    collector = GarbageCollector(folders.steps_of(tmp_path), LATEST)
    collector.wait()
    collector.close()
    collector.close()
    with pytest.raises(CheckpointingException, match="is closed"):
        collector.submit()
    worked = GarbageCollector(folders.steps_of(tmp_path), LATEST)
    worked.submit()
    worked.close()
    worked.close()
    worked.wait()


def test_close_does_not_wait_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A removal that hangs is left to a later collection, with a warning."""
    hold = threading.Event()

    class Hanging(type(folders.steps_of(tmp_path))):  # type: ignore[misc]
        def steps(self) -> list[int]:
            hold.wait(60)
            return super().steps()  # type: ignore[no-any-return]

    collector = GarbageCollector(Hanging(tmp_path, get_plugin_manager()), LATEST)
    collector.submit()
    collector.close(timeout=0.01)
    assert "the next run finishes them" in caplog.text
    hold.set()
    collector.wait()


def test_garbage_of_a_url_is_collected(memory: str) -> None:
    """On a store the same steps go, object by object, and others stay."""
    folders.save_all(memory, 1, 20, 3)
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/run/backup-step-100.old/metadata.json", b"x")
    files.pipe_file("/bucket/run/step-4/.shardckpt-uploading-0", b"x")
    files.pipe_file(f"/bucket/run/step-4/{backends.data_file(0)}", b"x")
    assert collect(memory) == [1]
    names = {name.split("/")[3] for name in files.find("/bucket/run")}
    assert names == {"step-3", "step-20", "step-4", "backup-step-100.old"}
    assert folders.is_intact(f"{memory}/step-20", 20)


def test_no_empty_folder_is_left(tmp_path: Path) -> None:
    """Where a store has folders, that of a removed step goes too, unless it holds what is no object of the step."""
    url = f"local://{tmp_path}/run"
    folders.save_all(url, 1, 2, 3)
    for name in ("step-1/empty/below", "step-2/below"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/step-2/below/notes").touch()
    assert collect(url, [KeepLatest(1)]) == [1, 2]
    assert folders.names_in(tmp_path / "run") - {folders.HOLDS} == {"step-2", "step-3"}
    assert folders.names_in(tmp_path / "run/step-2") == {"below"}
    assert folders.names_in(tmp_path / "run/step-2/below") == {"notes"}
    assert collect(url, [KeepLatest(1)]) == []


@backends.both_in_proof
def test_a_removal_from_a_store_that_fails_is_tried_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever request fails, what is there loads or is no checkpoint, and the next collection ends the removal."""
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    url = f"faulty://{tmp_path}/store"
    folders.save_all(url, 2, 3)
    objects = len(backends.current().shared) + 2
    for kind, number in [("put", 1), *(("delete", number) for number in range(1, objects + 1))]:
        folders.save(url, 1)
        store.forget()
        store.fails(kind, number)
        monkeypatch.setattr("shardckpt.errors._warned", set())  # said once in a process
        assert collect(url) == []
        assert f"step 1 in {url} is to be removed, and stays for now" in caplog.text
        caplog.clear()
        store.works()
        look = folders.steps_of(url).inspect_step(1)
        assert not look.is_damaged
        assert look.is_loadable == folders.is_intact(f"{url}/step-1", 1) == (number == 1)
        collect(url)
        assert folders.steps_of(url).steps() == [2, 3]


def _prune_while(folder: str, act: Callable[[], object]) -> dict[int, StepResult]:
    """What a prune that keeps the newest step says of each, if something happens between its look and its removals."""

    def keep_newest(steps: StepMetrics) -> list[int]:
        if not acted:
            acted.append(act())
        return [max(steps)]

    acted: list[object] = []
    return {result.step: result for result in prune_steps(folder, [keep_newest])}


@folders.PLACES
def test_of_two_removals_one_leaves_what_the_other_has_removed_for(tmp_path: Path, place: str) -> None:
    """A prune that keeps the newest, and a discard that keeps the oldest, do not remove each the other's."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2, 3)
    results = _prune_while(folder, lambda: discard_steps_after(folders.steps_of(folder), 1))
    assert results[1].kept == "since it was chosen, step 3, which was to stay, was removed or damaged"
    assert results[2].kept == "since it was chosen it was removed"
    assert folders.steps_of(folder).steps() == [1]
    assert folders.is_intact(f"{folder}/step-1", 1)


def test_a_removal_gives_way_to_that_of_a_step_that_is_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process removes what a removal counts on, nothing goes, and a discard says so."""
    monkeypatch.setattr(garbage_collection, "_PATIENCE", 0.0)
    folders.save_all(tmp_path, 1, 2, 3)
    holds = folders.steps_of(tmp_path).holds
    with holds.removing("step-3"):
        assert collect(tmp_path, [KeepLatest(1)]) == []
    with holds.removing("step-1"), pytest.raises(StorageError, match=r"step 3 \(step-1 is being removed by process"):
        discard_steps_after(folders.steps_of(tmp_path), 1)
    assert folders.steps_of(tmp_path).steps() == [1, 2, 3]
    assert discard_steps_after(folders.steps_of(tmp_path), 1) == [2, 3]


@folders.PLACES
@backends.both_in_proof
def test_a_step_that_is_saved_anew_after_it_was_chosen_stays(tmp_path: Path, place: str) -> None:
    """A prune removes the save that it has looked at, by no means another of the same number, and says so."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2, 3)
    results = _prune_while(folder, lambda: folders.save(folder, 2, overwrite=True))
    assert results[2].kept == "since it was chosen it was saved anew"
    assert folders.steps_of(folder).steps() == [2, 3]
    assert folders.is_intact(f"{folder}/step-2", 2)


def test_a_step_stays_if_the_newer_one_fails_a_verification_meanwhile(tmp_path: Path) -> None:
    """The newest step that has not failed is the one of the moment of the removal."""
    folders.save_all(tmp_path, 1, 2)
    newest = tmp_path / "step-2"
    save = identify_save(newest)
    results = _prune_while(str(tmp_path), lambda: mark_checkpoint(newest, save, "failed", checked="digests", files=1))
    assert results[1].kept == "since it was chosen, step 2, which was to stay, became failed"
    assert folders.steps_of(tmp_path).steps() == [1, 2]


def test_a_step_that_is_being_saved_anew_on_a_store_stays(tmp_path: Path) -> None:
    """The objects of the save are below the old one's URL: a removal would take them."""
    folder = f"local://{tmp_path}/run"
    folders.save_all(folder, 1, 2)
    remote = on_store(folders.steps_of(folder).path(1))
    assert remote is not None
    claim = Claim(remote, "0" * 32)
    claim.announce()
    assert collect(folder, [KeepLatest(1)]) == []
    assert folders.is_intact(f"{folder}/step-1", 1)
    (remote / claim.in_progress).delete()
    assert collect(folder, [KeepLatest(1)]) == [1]


def test_removals_are_logged_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who asks what became of a checkpoint finds the step and the folder in the log."""
    folders.save_all(tmp_path, 1, 2, 3)
    with caplog.at_level(logging.INFO, "shardckpt"):
        collect(tmp_path)
    assert f"removed step 1 from {tmp_path}" in caplog.text
