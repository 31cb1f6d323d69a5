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

#: The others take as long again.
_SLOW = ("drop-after", *KILLS)
#: Fewer would mean that the save, or the proxy, is not what it was: then the points prove less than they say.
_LEAST_REQUESTS = 20


def _run(folder: Path, fault: str) -> list[dict[str, Any]]:
    spool = folder / "spool"  # killed ranks leave theirs to the next save
    spool.mkdir()
    with moto_server() as endpoint, fault_proxy(endpoint) as proxy:
        done = programs.run(
            "",
            str(folder),
            proxy.endpoint,
            fault,
            module="tests.remote.request_faults",
            environment=variables(proxy.endpoint) | {settings.REMOTE_PART_MIB: "5", settings.SPOOL_DIR: str(spool)},
            timeout=840,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) >= _LEAST_REQUESTS
    return reports


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.slow if f in _SLOW else [pytest.mark.slow, pytest.mark.long]) for f in FAULTS],
)
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
        assert "is not empty" in after["again"][1], report
        assert after["second"] == ["", ""], report
        assert after["kept"] == [], report
        # the answer to the begin of an upload was lost: nobody knows its id, and the bucket's rule removes it
        begins = [
            path for verb, path, hit in report["requests"] if hit and verb == "POST" and path.endswith("?uploads=")
        ]
        assert report["uploads"] <= len(begins), report


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", KILLS)
def test_a_save_killed_at_any_request_is_whole_or_absent(tmp_path: Path, fault: str) -> None:
    """After a kill of both ranks a load gives all or nothing, and says which; overwrite=True saves there again."""
    for report in _run(tmp_path, fault):
        after = report["after"]
        assert not report["hung"], report
        assert report["killed"] == WORLD, report
        assert after["second"] == ["", ""], report
        if "metadata.json" in after["left"]:
            assert after["load"] == ["", ""], report
            assert "is not empty" in after["again"][1], report
            continue
        assert after["load"][0] == ("IncompleteCheckpointError" if after["left"] else "NotACheckpointError"), report
        if after["left"]:
            assert after["again"] == ["", ""], report
            assert after["kept"] == [], report
