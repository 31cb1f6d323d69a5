"""Saves that fail for the disk or the store, and a training that goes on without them."""

from __future__ import annotations

import errno
import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException, NotEnoughSpaceError, StorageError
from shardckpt.manager import CheckpointConfig, CheckpointManager, SaveAfter
from shardckpt.settings import SPACE_CHECK
from tests.plugins.manager import Recorder, recorder
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["recorder"]  # fixtures


def _make_manager(tmp_path: Path, states: dict[str, Any] | None = None, **options: Any) -> CheckpointManager:
    config = {"max_failed_saves": 2, **({} if "save_when" in options else {"interval": 1}), **options}
    model = torch.nn.Linear(512, 512, bias=False)  # 1 MiB
    return CheckpointManager(CheckpointConfig(folder=str(tmp_path / "run"), **config), states or {"model": model})


@table("mode, keep", [("disabled", 2), ("disabled", 1), ("async", 2)])
def test_so_many_saves_in_a_row_may_fail(
    tmp_path: Path, mode: str, keep: int, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is False, a warning and an event; older steps stay; the next one is an error that names the cause.

    Also where the error says which steps could go, since one fewer is kept.
    """
    recorder.events.clear()  # of the row before
    caplog.clear()
    manager = _make_manager(tmp_path, quota="1.5MB", async_mode=mode, keep_latest_k=keep)
    assert manager.save(1)
    manager.wait()
    assert [manager.save(2), manager.save(3)] == [False, False]
    manager.wait()
    with pytest.raises(NotEnoughSpaceError, match="quota"):
        manager.save(4)
    assert manager.steps() == [1]
    assert [event.error_type for event in recorder.find("failure")] == ["NotEnoughSpaceError"] * 3
    warned = [each.getMessage() for each in caplog.records if "max_failed_saves" in each.getMessage()]
    assert [text[:6] for text in warned] == ["step 2", "step 3", "step 4"]
    assert "the error is raised: failed save 3 in a row (max_failed_saves=2)" in warned[-1]
    manager.close()


def _refuse_space(*_: object) -> None:
    """Write nothing, as a full file system does."""
    raise OSError(errno.ENOSPC, "No space left on device")


def _block(tmp_path: Path, step: int) -> Path:
    """Let the commit of a background save fail: a file is in its place."""
    place = tmp_path / "run" / f"step-{step}"
    place.write_text("")
    return place


@table("call", ["wait", "save", "maybe_wait_for_staging"])
def test_a_failure_in_the_background_is_tolerated_where_it_surfaces(
    tmp_path: Path, call: str, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """In the call that would raise it, which goes on: the step can be saved again, and the count begins anew."""
    recorder.events.clear()  # of the row before
    caplog.clear()
    manager = _make_manager(tmp_path, async_mode="async", max_failed_saves=1)
    for step in (1, 3):
        assert manager.save(step)
        blocker = _block(tmp_path, step)
        if call == "wait":
            manager.wait()
        elif call == "save":
            assert manager.save(step + 1)
        else:
            while manager._writer.busy:  # type: ignore[union-attr]
                manager.maybe_wait_for_staging()
        blocker.unlink()
        assert manager.save(step + 1) is (call != "save")
        manager.wait()
    assert manager.steps() == [2, 4]
    assert [event.error_type for event in recorder.find("failure")] == ["StorageError"] * 2
    assert caplog.text.count("failed save 1 in a row (max_failed_saves=1)") == 2
    manager.close()


@table("mode", ["disabled", "async"])
def test_a_write_that_finds_no_space_says_what_could_go(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the ERROR line, whether the training waited for the save or not, with the phase; and in the error."""
    caplog.clear()  # of the row before
    manager = _make_manager(tmp_path / mode, async_mode=mode, keep_latest_k=2, max_failed_saves=1)

    def save(step: int) -> None:
        manager.save(step)
        manager.wait()

    save(1)
    save(2)
    advice = r"o make space: remove step 1 \(.*B\), which the retention policies will no longer keep once step {} is "
    text = rf"\(ENOSPC\)\. T{advice.format(4)}.*The file system of .* free now"
    with monkeypatch.context() as disk:
        disk.setattr("os.pwritev", _refuse_space)
        save(3)
        with pytest.raises(NotEnoughSpaceError, match=text):
            save(4)
    manager.close()
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 2
    for step, error in enumerate(errors, 3):
        assert re.search(f"step-{step} failed in 'writing shards' after .*{advice.format(step)}", error)
        assert len(re.findall(advice.format(step), caplog.text)) == 1


@table("files, said", [(30, " and no inodes (files)"), (0, "")])
def test_a_file_system_without_inodes_is_named_as_such(
    tmp_path: Path, files: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a write finds no space, and bytes are free, the error says that it is files that are not; if known."""
    found = SimpleNamespace(f_blocks=9, f_frsize=1_000_000, f_bfree=9, f_bavail=9, f_files=files, f_ffree=0, f_favail=0)
    with _make_manager(tmp_path / str(files), max_failed_saves=0) as manager, monkeypatch.context() as disk:
        disk.setattr("shardckpt.engine.space.os.statvfs", lambda _: found)
        disk.setattr("os.pwritev", _refuse_space)
        with pytest.raises(NotEnoughSpaceError) as caught:
            manager.save(1)
    assert str(caught.value).endswith(f" has 9.0 MB{said} free now.")


class _FullDisk:
    """Lets writes find no space while a folder has two steps."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self._folder, self._write = folder, os.pwritev
        self.refused = 0
        patched.setattr("os.pwritev", self._write_if_free)

    def _write_if_free(self, *arguments: Any) -> int:
        if len([*self._folder.glob("step-*")]) < 2:
            return self._write(*arguments)
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def _unforecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the write itself finds that there is no space."""
    monkeypatch.setenv(SPACE_CHECK, "0")


@pytest.mark.usefixtures("_unforecast")
def test_a_save_whose_write_found_no_space_is_pruned_for_and_written_anew(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_full="prune" it is no failed save; the log says what was removed, and why."""
    disk = _FullDisk(tmp_path / "run", monkeypatch)
    with _make_manager(tmp_path, on_full="prune", keep_latest_k=2, max_failed_saves=0) as manager:
        assert [manager.save(step) for step in (1, 2, 3)] == [True] * 3
        assert manager.steps() == [2, 3]
    assert disk.refused == 1
    assert not recorder.find("failure")
    run = tmp_path / "run"
    removed, anew = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert removed == (
        f"the file system of {run} has no space for step 3: removed before it, as on_full='prune' says: step 1"
    )
    assert re.match(rf"the save to {run}/step-3 begins anew, now that there is more space: .* \(ENOSPC\)$", anew)


@pytest.mark.usefixtures("_unforecast")
def test_a_background_save_that_found_no_space_makes_it_for_the_next(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_full="prune" it has failed, and its ERROR says that the next one has the space."""
    _FullDisk(tmp_path / "run", monkeypatch)
    with _make_manager(tmp_path, on_full="prune", keep_latest_k=2, async_mode="async") as manager:
        for step in (1, 2, 3):
            assert manager.save(step)
            manager.wait()
        assert manager.steps() == [2]
        assert manager.save(4)
        manager.wait()
        assert manager.steps() == [2, 4]
    assert [event.failed_phase for event in recorder.find("failure")] == ["writing shards"]
    (error,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "To make space: on_full='prune' has removed step 1 for the next save." in error
    assert "has no space for step 3: removed for the next save, as on_full='prune' says: step 1" in caplog.text


@pytest.mark.usefixtures("_unforecast")
@table("mode", ["disabled", "async"])
def test_a_write_that_found_no_space_is_not_repeated_where_nothing_may_go(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what keeps each step; a close raises the same."""
    with monkeypatch.context() as patched:
        disk = _FullDisk(tmp_path / mode / "run", patched)
        manager = _make_manager(tmp_path / mode, on_full="prune", keep_latest_k=3, async_mode=mode, max_failed_saves=0)
        manager.save(1)
        manager.save(2)
        with pytest.raises(NotEnoughSpaceError, match=r"'prune' was tried, and may remove none .*: step 2 .*step 1 "):
            manager.save(3) and manager.close()
        assert disk.refused == 1
        manager.close()


def test_what_no_later_save_makes_up_for_is_an_error(tmp_path: Path) -> None:
    """The last step, a step that a signal asked for, and what only close finds."""
    manager = _make_manager(tmp_path, quota="0.5MB", save_on_signals=())
    with pytest.raises(NotEnoughSpaceError):
        manager.save(1, last_step=True)
    manager.request_save()
    with pytest.raises(NotEnoughSpaceError):
        manager.save(2)
    manager.close()
    manager = _make_manager(tmp_path, async_mode="async")
    manager.save(1)
    _block(tmp_path, 1)
    with pytest.raises(StorageError):
        manager.close()


def test_an_error_that_no_retry_mends_is_raised_at_once(tmp_path: Path) -> None:
    """A program's own, in a state; wrong arguments."""

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("lr")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Take nothing."""

    with _make_manager(tmp_path, {"broken": Broken()}) as manager:
        with pytest.raises(CheckpointingException, match="lr"):
            manager.save(1)
        with pytest.raises(CheckpointingException, match="expected True or False"):
            manager.save(1, force={})  # type: ignore[arg-type]


def test_a_failed_save_by_the_clock_waits_for_the_next_time(tmp_path: Path) -> None:
    """Not for the next step: a store that is down for minutes would use up all attempts in a second."""
    with _make_manager(tmp_path, quota="0.5MB", save_when=[SaveAfter(seconds=1e-9)]) as manager:
        began = manager._clock._last
        assert not manager.save(1)
        assert manager._clock._last > began
