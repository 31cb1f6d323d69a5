"""Two jobs that save to one folder."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from shardckpt.commit import Owner
from shardckpt.commit.holds import make_hold
from shardckpt.commit.owner import _digest_host, _read_stat
from shardckpt.errors import OtherJobError, StorageError
from shardckpt.manager import CheckpointConfig, CheckpointManager, other_jobs
from shardckpt.testing import FaultyStore
from tests.manager import folders
from tests.manager.training import Progress
from tests.plugged import registered
from tests.plugins.manager import Recorder
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


#: Another process of this host that is alive, one that is dead, and one of another host.
ALIVE = Owner(_digest_host(), os.getppid(), int(_read_stat(str(os.getppid()))[1]))
DEAD = ALIVE._replace(start=1)
ELSEWHERE = ALIVE._replace(host=1)


def _write(folder: str, owner: Owner, seconds: float = 3600.0) -> None:
    """Write the file of another job, as its manager does after a save."""
    name, hold = make_hold("folder", "job", f"process {owner.pid} on there", seconds)
    name = name.replace(name.split(".")[2], owner.text)
    folders.steps_of(folder).holds.put(name, hold.model_copy(update={"owner": owner.text}))


def _list_owners(folder: str) -> set[str]:
    return {job.owner for job in folders.steps_of(folder).holds.find_jobs().values()}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "another job" in text]


@folders.PLACES
def test_two_jobs_are_told_of_each_other(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living job on this host is named at once and once; one of another host when it has saved again."""
    folder = place.format(tmp_path / "run")
    monkeypatch.setattr(other_jobs, "_INTERVAL", 0.0 if "://" in folder else 1e9)  # a directory costs no request
    with CheckpointManager(CheckpointConfig(folder=folder, interval=1), {"progress": Progress()}) as manager:
        manager.save(1)
        _write(folder, ALIVE)
        _write(folder, ELSEWHERE)
        manager.save(2)
        manager.save(3)
        (text,) = _warnings(caplog)
        assert re.search(rf"process {ALIVE.pid} on there, last seen at 20.* UTC\. .* a folder of its own", text)
        _write(folder, ELSEWHERE, 7200.0)
        manager.save(4)
        manager.save(5)
        assert len(_warnings(caplog)) == 2
        assert Owner.current().text in _list_owners(folder)
    assert _list_owners(folder) == {ALIVE.text, ELSEWHERE.text}


def test_each_save_that_finds_another_job_is_an_event(tmp_path: Path) -> None:
    """So that an alert goes on while the other is there, and ends after: of another host's, when it has saved again."""
    folder = str(tmp_path / "run")
    config, states = CheckpointConfig(folder=folder, interval=1), {"progress": Progress()}
    with registered(Recorder()) as recorder, CheckpointManager(config, states) as manager:
        manager.save(1)
        counts = []
        for step, owner, seconds in (
            (2, ELSEWHERE, 3600.0),
            (3, None, 0.0),
            (4, ELSEWHERE, 7200.0),
            (5, None, 0.0),
            (6, ALIVE, 3600.0),
            (7, None, 0.0),
            (8, ALIVE, -1.0),
        ):
            if owner is not None:
                _write(folder, owner, seconds)
            manager.save(step)
            counts.append(len(recorder.find("other_job")))
    assert counts == [0, 0, 1, 1, 2, 3, 3]


@folders.PLACES
def test_steps_of_a_job_that_has_ended_are_told(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saved once and closed has left no file: its step shows it, at the next save, once."""
    folder = place.format(tmp_path / "run")
    folders.save(folder, 1)
    config, states = CheckpointConfig(folder=folder, interval=1, keep_latest_k=0), {"progress": Progress()}
    with registered(Recorder()) as recorder, CheckpointManager(config, states) as manager:
        manager.save(2)
        manager.save(3)
        folders.save(folder, 9)
        manager.save(4)
        manager.save(5)
    (text,) = [text for text in caplog.messages if "were not there at the last save of this job" in text]
    assert "that it has not saved: 9. Another job saves there" in text
    assert len(recorder.find("other_job")) == 1


@folders.PLACES
def test_a_save_beside_another_job_is_refused_if_asked(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_other_job="error" nothing is saved while the other job lives; it is no failure that is tolerated."""
    folder = place.format(tmp_path / "run")
    config = CheckpointConfig(folder=folder, interval=1, on_other_job="error", max_failed_saves=5)
    with registered(Recorder()) as recorder, CheckpointManager(config, {"progress": Progress()}) as manager:
        manager.save(1)
        _write(folder, ALIVE)
        monkeypatch.setattr(other_jobs, "_INTERVAL", 0.0)  # the minute has passed
        for step in (2, 3):
            with pytest.raises(OtherJobError, match=r"another job saves to .* nothing was saved"):
                manager.save(step)
            monkeypatch.setattr(other_jobs, "_INTERVAL", 1e9)
        assert manager.steps() == [1]
    assert [event.directory for event in recorder.find("other_job")] == [folder] * 2
    with pytest.raises(OtherJobError, match="another job saves to"):
        CheckpointManager(config, {"progress": Progress()})


@table("outage, attempts", [(None, 1), (StorageError("no answer"), 0)])
def test_the_end_of_a_job_does_not_wait_for_a_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outage: Exception | None, attempts: int
) -> None:
    """Its own file is removed in one attempt, and in none after an outage that ended the job: it counts no more."""
    caplog.clear()
    store = FaultyStore(tmp_path / "store")
    with (
        suppress(StorageError),
        CheckpointManager({"folder": store.url, "interval": 1}, {"progress": Progress()}) as manager,
    ):  # type: ignore[arg-type]
        manager.save(1)
        manager.wait()
        store.forget()
        store.fails("delete", 1)
        if outage is not None:
            raise outage
    assert len(store.requests("delete")) == attempts
    assert len([text for text in caplog.messages if "cannot remove the file of a job" in text]) == attempts


def test_a_job_that_was_started_again_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a dead process, of another host's that says no more, and of a manager in this process are no jobs."""
    monkeypatch.setattr(other_jobs, "_INTERVAL", 0.0)
    config, states = CheckpointConfig(folder=str(tmp_path), interval=1), {"progress": Progress()}
    with CheckpointManager(config, states) as first, CheckpointManager(config, states) as manager:
        first.save(1)
        for owner in (DEAD, ELSEWHERE):
            _write(str(tmp_path), owner)
        for step in (2, 3):
            manager.save(step)
        assert _list_owners(str(tmp_path)) == {Owner.current().text, ELSEWHERE.text}
    assert not _warnings(caplog)


def test_later_steps_are_said_once_and_may_be_anothers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each save of the job with the lower steps would say it; what removes them is no advice where another job runs."""
    folder = str(tmp_path / "run")
    with CheckpointManager(CheckpointConfig(folder=folder, interval=1), {"progress": Progress()}) as manager:
        manager.save(100)
    _write(folder, ELSEWHERE)
    with CheckpointManager(CheckpointConfig(folder=folder, interval=1), {"progress": Progress()}) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    (text,) = [text for text in caplog.messages if "has steps after" in text]
    assert "steps after 1, the newest is 100" in text
    assert f"unless they belong to another job that saves there (process {ELSEWHERE.pid} on there)" in text
