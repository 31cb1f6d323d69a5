"""Saves that take the place of a checkpoint, against what holds it and against its removal."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.cli import main
from shardckpt.commit import Owner
from shardckpt.commit import holds as holds_module
from shardckpt.commit.holds import Hold
from shardckpt.engine.transaction import Transaction
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manager import KeepLatest, pin_step, unpin_step
from shardckpt.manager.garbage_collection import collect_garbage
from tests import backends
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


@folders.PLACES
def test_what_is_pinned_while_a_save_is_written_stays(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save looks once more before it takes the place, and leaves nothing of itself."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2)
    write = Transaction._write_markers

    def write_late(self: Transaction, *args: Any) -> None:
        pin_step(folder, 1, "late")
        write(self, *args)

    before = {path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    monkeypatch.setattr(Transaction, "_write_markers", write_late)
    with pytest.raises(CheckpointingException, match="step-1 is pinned as 'late'"):
        folders.save(folder, 1, overwrite=True)
    unpin_step(folder, 1, "late")
    assert {path for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert folders.is_intact(f"{folder}/step-1", 1)


@backends.both_in_proof
def test_no_verb_takes_the_place_of_a_held_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversions, merges, exports, removals of keys and other saves leave what is pinned as it is, and say why."""
    folder = tmp_path / "run"
    folders.save_all(folder, 1, 2, 3)
    pin_step(folder, 1, "paper")
    step, other, third = str(folder / "step-1"), str(folder / "step-2"), str(folder / "step-3")
    other_format = next(name for name in ("torch_dist", "safetensors") if name != backends.current().name)
    verbs = [
        ["convert", other, step, "--to", other_format, "--overwrite"],
        ["convert", other, step, "--to", "hf", "--overwrite"],
        ["merge", other, third, step, "--to", backends.current().name, "--weights", "0.5,0.5", "--overwrite"],
        ["export", other, step, "--overwrite"],
        ["remove", step, "w"],
    ]
    for verb in verbs:
        assert main(verb) != 0, verb
        assert "step-1 is pinned as 'paper'" in capsys.readouterr().err, verb
    with pytest.raises(CheckpointingException, match="step-1 is pinned as 'paper'"):
        folders.save(folder, 1, overwrite=True)
    assert folders.is_intact(step, 1)
    assert folders.names_in(folder) == {"step-1", "step-2", "step-3", folders.HOLDS}


def test_an_export_to_a_url_leaves_a_held_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It deletes and writes nothing there."""
    folder = f"local://{tmp_path}/run"
    folders.save_all(folder, 1, 2)
    pin_step(folder, 1, "paper")
    before = folders.names_in(tmp_path / "run" / "step-1")
    assert main(["export", f"{folder}/step-2", f"{folder}/step-1", "--overwrite"]) != 0
    assert "step-1 is pinned as 'paper'" in capsys.readouterr().err
    assert folders.names_in(tmp_path / "run" / "step-1") == before


@folders.PLACES
def test_a_removal_gives_way_to_the_save_that_takes_the_place(tmp_path: Path, place: str) -> None:
    """Else the removal, which has looked at the old save, would remove the new one."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2)
    with folders.steps_of(folder).holds.replacing("step-1"):
        assert collect_garbage(folders.steps_of(folder), [KeepLatest(1)]) == []
    assert collect_garbage(folders.steps_of(folder), [KeepLatest(1)]) == [1]


@folders.PLACES
def test_a_save_waits_for_the_removal_of_what_it_replaces(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the removal has ended the step is free, and the save is there, whole."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2)
    steps = folders.steps_of(folder)
    write = Transaction._write_markers
    removal = contextlib.ExitStack()
    waited = []

    def wait(_: float) -> None:
        waited.append(True)
        shutil.rmtree(tmp_path / "run" / "step-1")
        removal.close()

    def write_late(self: Transaction, *args: Any) -> None:
        removal.enter_context(steps.holds.removing("step-1"))
        write(self, *args)

    monkeypatch.setattr("time.sleep", wait)
    if place == "{}":  # of a directory the moment is the commit; of a store it is the beginning
        monkeypatch.setattr(Transaction, "_write_markers", write_late)
    else:
        removal.enter_context(steps.holds.removing("step-1"))
    folders.save(folder, 1, overwrite=True)
    assert waited == [True]
    assert folders.is_intact(f"{folder}/step-1", 1)
    assert folders.names_in(tmp_path / "run") - {folders.HOLDS} == {"step-1", "step-2"}


def test_a_removal_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save names the process that removes, and the step is as it was."""
    monkeypatch.setattr(holds_module, "_PATIENCE", -1.0)
    folders.save_all(tmp_path, 1)
    with (
        folders.steps_of(tmp_path).holds.removing("step-1"),
        pytest.raises(StorageError, match="step-1 is being removed by process"),
    ):
        folders.save(tmp_path, 1, overwrite=True)
    assert folders.names_in(tmp_path) == {"step-1"}


def test_the_mark_of_a_killed_save_counts_for_nothing(tmp_path: Path) -> None:
    """The next save over the step removes it; what no step's name has is marked by none."""
    folders.save_all(tmp_path, 1)
    holds = folders.steps_of(tmp_path).holds
    mark = Hold(directory="step-1", kind="save", holder="x", until=2e9, owner=Owner.current().text)
    holds.put(f"step-1.save.{'0' * 32}.json", mark)
    assert holds.find() == {}
    folders.save(tmp_path, 1, overwrite=True)
    assert folders.names_in(tmp_path) == {"step-1"}
