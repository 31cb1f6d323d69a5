"""A save of 2 ranks to S3 that fails, or is killed, at each of its requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import settings
from tests import programs
from tests.remote.fault_proxy import FAULTS, KILLS
from tests.remote.request_faults import WORLD
from tests.remote.servers import fault_proxy, moto_server, variables

if TYPE_CHECKING:
    from pathlib import Path

#: Fewer would mean that the save, or the proxy, is not what it was: then the points prove less than they say.
_LEAST_REQUESTS = 20


def _run(folder: Path, fault: str, case: str = "new", step: int = 1) -> list[dict[str, Any]]:
    spool = folder / "spool"  # killed ranks leave theirs to the next save
    spool.mkdir()
    with moto_server() as endpoint, fault_proxy(endpoint) as proxy:
        done = programs.run(
            "",
            str(folder),
            proxy.endpoint,
            fault,
            case,
            str(step),
            module="tests.remote.request_faults",
            environment=variables(proxy.endpoint) | {settings.REMOTE_PART_MIB: "5", settings.SPOOL_DIR: str(spool)},
            timeout=840,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) * step >= _LEAST_REQUESTS
    return reports


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_with_a_fault_at_any_request_is_whole(tmp_path: Path, fault: str) -> None:
    """One request that fails or is not answered is sent again, and the save loads; or all ranks fail, and none does."""
    for report in _run(tmp_path, fault):
        after = report["after"]
        assert [request[2] for request in report["requests"]].count(fault) == 1, report
        assert not report["hung"], report
        cut = [
            path
            for _, path, hit in report["requests"]
            if hit == "truncate" and ("?uploads=" in path or "?uploadId=" in path)
        ]
        if cut and report["errors"] != [["", ""]] * WORLD:
            # obstore does not repeat the begin or the end of an upload whose answer was cut
            assert report["errors"] == [report["errors"][0]] * WORLD, report
            assert report["errors"][0][0] == "StorageError", report
            assert after["left"] == [], report
            assert after["load"][0] == "NotACheckpointError", report
            assert after["again"] == after["second"] == ["", ""], report
            continue
        assert report["errors"] == [["", ""]] * WORLD, report
        assert after["load"] == ["", ""], report
        assert after["again"] == after["second"] == ["", ""], report
        assert after["kept"] == [], report
        # the answer to the begin of an upload was lost: nobody knows its id, and the bucket's rule removes it
        begins = [
            path for verb, path, hit in report["requests"] if hit and verb == "POST" and path.endswith("?uploads=")
        ]
        assert report["uploads"] <= len(begins), report


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "step"), [("kill-after", 6), *(pytest.param(fault, 1, marks=pytest.mark.proof) for fault in KILLS)]
)
def test_a_save_killed_at_any_request_is_whole_or_absent(tmp_path: Path, fault: str, step: int) -> None:
    """After a kill of both ranks a load gives all or nothing; overwrite=True saves there again; a prune clears it."""
    for report in _run(tmp_path, fault, step=step):
        after = report["after"]
        assert not report["hung"], report
        assert report["killed"] == WORLD, report
        assert after["second"] == ["", ""], report
        marks = [name for name in after["left"] if name.startswith(".shardckpt")]
        assert [each[1:] for each in after["pruned"]["found"]] == [["", ""]] * bool(marks), report
        if "metadata.json" in after["left"]:
            assert after["pruned"]["rest"] == [name for name in after["left"] if name not in marks], report
            assert after["pruned"]["load"] == ["", ""], report
            assert after["load"] == after["again"] == ["", ""], report
            continue
        assert after["pruned"]["rest"] == [], report
        assert after["load"][0] == ("IncompleteCheckpointError" if after["left"] else "NotACheckpointError"), report
        if after["left"]:
            assert after["again"] == ["", ""], report
            assert after["kept"] == [], report


def _check_overwrite(report: dict[str, Any]) -> None:
    """What a load finds is the old save or the new, as does one of a copy that was pruned, which has nothing else."""
    after, loads = report["after"], ("load", "old")
    assert not report["hung"], report
    assert [after[name] for name in loads].count(["", ""]) == 1, report
    assert [after["pruned"][name] for name in loads] == [after[name] for name in loads], report
    rest = after["pruned"]["rest"]
    folders = {name.partition("/")[0] for name in rest if name.startswith("generation-")}
    assert not [name for name in rest if ".shardckpt-" in name], report
    # all in one generation, and the marker that names it; or all of a first save
    assert len(folders) == 1 if any("/" in name for name in rest) else "shardckpt.json" in rest, report
    assert len([name for name in rest if name.endswith("shardckpt.json")]) == 1, report
    assert after["again"] == after["second"] == ["", ""], report
    assert after["kept"] == [], report
    assert len({name.partition("/")[0] for name in after["rest"]}) == 2, report


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", KILLS)
@pytest.mark.parametrize("case", ["overwrite-first", "overwrite"])
def test_an_overwrite_killed_at_any_request_is_old_or_new(tmp_path: Path, fault: str, case: str) -> None:
    """After a kill of both ranks a load gives the old save or the new; a prune or an overwrite clears the rest."""
    for report in _run(tmp_path, fault, case):
        assert report["killed"] == WORLD, report
        _check_overwrite(report)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_overwrite_with_a_fault_at_any_request_is_old_or_new(tmp_path: Path, fault: str) -> None:
    """One request that fails or is not answered is sent again, and the new save loads; or all fail: the old does."""
    for report in _run(tmp_path, fault, "overwrite-first"):
        _check_overwrite(report)
        failed = report["errors"] != [["", ""]] * WORLD
        if failed:
            assert report["errors"] == [report["errors"][0]] * WORLD, report
            assert report["errors"][0][0] == "StorageError", report
            assert fault == "truncate", report
        assert report["after"]["old" if failed else "load"] == ["", ""], report
