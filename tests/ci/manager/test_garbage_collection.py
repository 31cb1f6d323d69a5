from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import settings
from shardckpt.manager.garbage_collection import GarbageCollector
from tests import programs
from tests.faults.disks import make_read_only, small_disk
from tests.manager import folders
from tests.manager.garbage_collection import LATEST, collect
from tests.plugged import registered
from tests.plugins.manager import Recorder

if TYPE_CHECKING:
    from tests.backends import Backend


def test_what_cannot_be_renamed_stays_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the system refuses, the checkpoint is as it was, a warning says so, and the next collection tries again."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        folders.save_all(disk, 1, 2, 3)
        make_read_only(disk)
        collector = GarbageCollector(folders.steps_of(disk), LATEST)
        collector.submit()
        collector.close()
        assert "step 1 in" in caplog.text
        assert "Read-only file system (EROFS)" in caplog.text
        assert [found.step for found in folders.steps_of(disk).committed()] == [1, 2, 3]
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], timeout=20, check=True)
        assert collect(disk) == [1]
        assert folders.names_in(disk) == {"step-2", "step-3"}


def test_what_cannot_be_deleted_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A busy file keeps a tombstone there, and nothing else; when it is free the next collection ends the removal."""
    run = tmp_path / "run"
    folders.save_all(run, 1, 2, 3)
    with small_disk(run / "step-1/busy", "1m"), registered(Recorder()) as recorder:
        assert collect(run) == [1]
        steps = folders.steps_of(run).steps()
        (tombstone,) = run.glob(".step-1.shardckpt-removed-*")
        left = folders.names_in(tombstone)
        assert collect(run) == []
        tombstone.rename(run / "step-1")  # where it is unmounted
    assert steps == [2, 3]
    assert left == {"busy"}
    assert caplog.text.count(f"cannot remove {tombstone}, which is no longer needed") == 1
    assert "Device or resource busy" in caplog.text
    assert [event.failed_phase for event in recorder.find("failure")] == ["removing leftovers"] * 2  # what alerts see
    (run / "step-1").rename(tombstone)
    assert collect(run) == []
    assert folders.names_in(run) == {"step-2", "step-3"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone who may not rename")
def test_who_may_not_remove_is_warned() -> None:
    """In a folder of someone else's with the sticky bit, where rename is EPERM, it warns and changes nothing."""
    program = (
        "import logging, os, sys\n"
        "from shardckpt.manager.garbage_collection import collect_garbage\n"
        "from tests.manager import folders, garbage_collection\n"
        "logging.basicConfig()\n"
        "folder = folders.steps_of(sys.argv[1])\n"
        "folder.committed()\n"  # imports what nobody may not read
        "os.seteuid(65534)\n"
        "print(collect_garbage(folder, garbage_collection.LATEST))\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folders.save_all(name, 1, 2, 3)
        Path(name).chmod(0o1777)
        done = programs.run(program, name, cwd=programs.ROOT)
        assert done.stdout.strip() == "[]", done.stderr
        assert "step 1 in" in done.stderr
        assert "(EPERM)" in done.stderr
        assert folders.names_in(Path(name)) == {"step-1", "step-2", "step-3"}


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, backend: Backend
) -> list[dict[str, Any]]:
    """What the killer program found."""
    place = tmp_path_factory.mktemp("kill")
    variables = {settings.IO_THREADS: "1", settings.REMOTE_THREADS: "1", settings.SPOOL_DIR: str(place)}
    killer = "tests.manager.garbage_collection_killer"
    done = programs.run("", request.param, str(place), module=killer, environment=variables, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("backend", "reports"),
    [
        pytest.param("torch_dist", "store", marks=pytest.mark.proof),
        pytest.param("torch_dist", "links", marks=pytest.mark.proof),
        pytest.param("safetensors", "local", marks=pytest.mark.proof),
        pytest.param("torch_dist", "local", marks=pytest.mark.proof),
        pytest.param("safetensors", "store", marks=pytest.mark.proof),
    ],
    indirect=True,
    scope="module",
)
def test_a_killed_collection_leaves_nothing_that_looks_valid(reports: list[dict[str, Any]]) -> None:
    """A process that dies at any of a collection's changes leaves no part of a checkpoint, and the next one ends it.

    Some kills come before any checkpoint is gone, some between, some after all are. The links of the folder lead to
    steps that load at each moment, and to the right ones in the end.
    """
    assert len([report for report in reports if report["killed"]]) >= 8
    assert not reports[-1]["killed"]
    for report in reports:
        assert report["damaged"] == [], report
        assert set(report["counts"]) <= set(report["intact"]), report
        assert {3, 4} <= set(report["counts"]), report
        assert report["after"] == ["step-3", "step-4"], report
        assert report["intact_after"] == [3, 4], report
        assert set(report["links"].values()) <= {f"step-{step}" for step in report["intact"]}, report
        assert report["links_after"] in ({}, {"latest": "step-4", "best": "step-3"}), report
        assert report["links"].keys() == report["links_after"].keys(), report
    assert {tuple(report["counts"]) for report in reports} == {(1, 2, 3, 4), (2, 3, 4), (3, 4)}
