"""A process that dies in a save leaves the old or the new checkpoint, at any file system call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from shardckpt.storage.direct import bypasses_cache
from tests import backends, folders
from tests.faults.kill import CASES, kill
from tests.faults.programs import ask, needs_strace
from tests.names import MARKERS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends import Backend

pytestmark = needs_strace

FEW = 12  # proof kills the same cases at every call


@backends.both_in_proof
@pytest.mark.parametrize(("scenario", "case", "allowed"), [("foreground", *CASES[0]), ("request", *CASES[1])])
def test_killed_save_leaves_nothing_or_the_whole(disk: Path, scenario: str, case: str, allowed: set[str]) -> None:
    """After a kill at any of 12 calls of a first save, or of a request, old or new is there, and nothing in the way."""
    report = kill(scenario, disk, case, FEW, allowed)
    assert sum(bool(outcome["left"]) for outcome in report["outcomes"]) > FEW // 4


@backends.both_in_proof
def test_killed_overwrite_leaves_old_or_new(disk: Path) -> None:
    """After a kill at any of 12 calls of an overwrite, old or new is there bit for bit, other people's files too."""
    report = kill("foreground", disk, "existing", FEW, {"old", "new"})
    assert sum(bool(outcome["left"]) for outcome in report["outcomes"]) > FEW // 4


@pytest.mark.parametrize(
    ("case", "allowed", "count"),
    [("existing", {"old", "new"}, FEW), *(pytest.param(*each, 120, marks=pytest.mark.proof) for each in CASES)],
)
def test_killed_save_of_a_tree_leaves_old_or_new(disk: Path, case: str, allowed: set[str], count: int) -> None:
    """The same holds where the files are in folders, some of which have other people's files, too."""
    lines = [point["line"] for point in kill("tree", disk, case, count, allowed)["points"]]
    assert any("fsync" in line and "/arrays/w0/c>" in line for line in lines)


@pytest.fixture(scope="module")
def trace(backend: Backend) -> list[str]:
    """The calls of an undisturbed first save by a format, in order."""
    with folders.on_disk() as folder:
        points = ask("killer", "foreground", folder, "fresh", 0)["points"]
    return [point["line"].replace("RUN/jobs/.ckpt.shardckpt-staging-*-*", "STAGING") for point in points]


@backends.both
def test_order_of_calls(trace: list[str], backend: Backend) -> None:
    """Data is durable before what names it, that before the directory, that before the rename; the parent last."""
    synced = {number: found[1] for number, line in enumerate(trace) if (found := re.match(r"fsync\(\d+<(.*)>\)", line))}
    paths = list(synced.values())
    assert paths[0] == "RUN"  # holds the new directory above the target
    data = {f"STAGING/{name}" for name in (*backend.shared - MARKERS, backend.data_file(0))}
    markers = {f"STAGING/{name}" for name in MARKERS}
    assert set(paths[1 : 1 + len(data)]) == data
    assert set(paths[1 + len(data) : -2]) == markers
    assert len(paths) == 1 + len(data) + len(markers) + 2
    assert paths[-2:] == ["STAGING", "RUN/jobs"]
    (renamed,) = (number for number, line in enumerate(trace) if line.startswith("rename("))
    *_, staging, parent = synced
    assert staging < renamed < parent


@backends.both
def test_files_are_written_before_their_fsync(trace: list[str], backend: Backend) -> None:
    """No byte of a file is written, and no size set, after its one fsync; every file that is created is fsynced."""
    written, synced, created = {}, {}, set()
    for number, line in enumerate(trace):
        path = re.search(r"<(STAGING[^>]*)>", line)
        if line.startswith(("pwrite", "fallocate", "ftruncate")) and path:
            written[path[1]] = number
        elif line.startswith("fsync") and path:
            synced[path[1]] = number
        elif "O_CREAT" in line and (opened := re.search(r'"(STAGING[^"]*)"', line)):
            created.add(opened[1])
    assert created == {f"STAGING/{name}" for name in (*backend.shared, backend.data_file(0))}
    assert created == written.keys()
    assert all(synced[path] > written[path] for path in created)


@backends.both
def test_large_tensors_are_written_directly(trace: list[str], disk: Path, backend: Backend) -> None:
    """Among the calls that are killed are those that allocate a file ahead and write past the page cache."""
    if not bypasses_cache(disk):
        pytest.skip("the file system of the tests has no direct writes")
    data = [line for line in trace if backend.data_file(0) in line]
    (opened,) = (line for line in data if "O_DIRECT" in line)
    descriptor = opened.rpartition(" = ")[2].partition("<")[0]
    assert "fallocate" in {line.partition("(")[0] for line in data}
    assert any(line.startswith("pwrite") and f"({descriptor}<" in line for line in data[data.index(opened) :])
