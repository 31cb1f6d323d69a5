from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import settings
from tests import backends, programs
from tests.remote.faults import count_uploads

if TYPE_CHECKING:
    from tests.backends import Backend

#: Ranks and files of the killed save; files in folders are of a strategy of the tests, whatever the format.
_KILLS = pytest.mark.parametrize(
    ("backend", "kills"),
    [
        pytest.param("torch_dist", (2, "flat"), marks=pytest.mark.proof),
        pytest.param("torch_dist", (1, "tree"), marks=pytest.mark.proof),
        pytest.param("safetensors", (1, "flat"), marks=pytest.mark.proof),
        pytest.param("torch_dist", (1, "flat"), marks=pytest.mark.ci),
        pytest.param("torch_dist", (2, "tree"), marks=pytest.mark.proof),
        pytest.param("safetensors", (2, "flat"), marks=pytest.mark.proof),
    ],
    ids=lambda case: case if isinstance(case, str) else f"{case[0]}-{case[1]}",
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def kills(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, backend: Backend
) -> list[dict[str, Any]]:
    """What came of a save killed at every upload."""
    place = tmp_path_factory.mktemp("kills")
    spool = place / "spool"
    spool.mkdir()
    variables = {settings.SPOOL_DIR: str(spool), settings.IO_THREADS: "1", settings.REMOTE_THREADS: "1"}
    arguments = (str(place), *map(str, request.param))
    done = programs.run("", *arguments, module="tests.remote.killer", environment=variables, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@_KILLS
def test_a_killed_save_is_whole_or_absent(kills: list[dict[str, Any]]) -> None:
    """A save killed at any upload is whole if metadata.json was there, else never loads; overwrite=True saves again."""
    assert {report["killed"] for report in kills} == {True, False}
    for report in kills:
        assert not report["hung"]
        if "metadata.json" in report["left"]:
            assert report["load"] == ["", ""], report
            assert "is not empty" in report["refused"][1]
            assert report["again"] == report["after"] == ["", ""], report
            continue
        assert report["killed"]
        if report["left"]:
            assert report["load"][0] == "IncompleteCheckpointError", report
            assert "of a save that has not ended" in report["refused"][1]
        else:
            assert report["load"][0] == "NotACheckpointError", report
        assert report["again"] == ["", ""], report
        last = (report["how"], report["number"], report["files"]) == ("kill-before", count_uploads(), "flat")
        if last:  # of two ranks: the main rank, committing
            assert backends.data_file(1) in report["left"], "a rank deleted what might have been a checkpoint's"
        assert report["after"] == ["", ""], report


@_KILLS
def test_the_spool_directory_of_a_killed_save_goes_with_the_next(kills: list[dict[str, Any]]) -> None:
    """A kill leaves whole shards on the machine's disk; the next save to any URL from there removes them."""
    assert all(len(report["spools"][0]) > 0 for report in kills if report["killed"])
    assert [report["spools"][1] for report in kills] == [[]] * len(kills)
