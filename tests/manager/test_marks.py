"""States of a step: the verdict of a verification, kept beside the checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.cli import main
from shardckpt.commit import Owner
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.manager import KeepLatest, KeepVerified, Metrics, mark_checkpoint, prune_steps
from shardckpt.manager.garbage_collection import collect_garbage, discard_steps_after
from shardckpt.manager.marks import find_mark_of, identify_save
from shardckpt.manager.retention import steps_to_remove
from shardckpt.manager.step_names import MARKS_NAME
from shardckpt.manager.step_resolution import check_step, find_newest
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from tests import backends
from tests.cli.checkpoints import save_plain_dcp
from tests.commit import owners
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


def _flip(path: Path) -> None:
    """Change a byte of the data, which only its digest shows."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _state(folder: str | Path, step: int) -> str:
    return folders.steps_of(folder).inspect_step(step).metrics.state


@backends.both_in_proof
@folders.PLACES
def test_a_failed_step_is_not_loaded(
    backend: backends.Backend, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What `verify --mark` finds damaged, which sizes do not show, is passed over by name for the step before it."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2)
    _flip(tmp_path / "run" / "step-2" / backend.data_file(0))
    assert find_newest(folders.steps_of(folder)) == 2
    assert main(["verify", folder, "--mark"]) == 1
    assert [_state(folder, step) for step in (1, 2)] == ["verified", "failed"]
    with caplog.at_level(logging.WARNING):
        assert find_newest(folders.steps_of(folder)) == 1
    (said,) = (record.getMessage() for record in caplog.records)
    assert "step 2 in" in said
    assert "is skipped, marked failed on" in said
    assert "digest differs" in said
    assert check_step(folders.steps_of(folder), 2) == 2  # who names it gets it, with the digests to check it


def test_only_failed_steps_do_not_begin_the_training_anew(tmp_path: Path) -> None:
    """Where every step failed, a load is an error, and a rewind to one of them is refused."""
    folders.save_all(tmp_path, 1, 2)
    for step in (1, 2):
        _flip(tmp_path / f"step-{step}" / backends.data_file(0))
    assert main(["verify", str(tmp_path), "--mark"]) == 1
    with pytest.raises(CorruptCheckpointError, match="2 are damaged or failed a verification"):
        find_newest(folders.steps_of(tmp_path))
    with pytest.raises(CheckpointingException, match=r"no step up to 1 .* has not failed a verification"):
        discard_steps_after(folders.steps_of(tmp_path), 1)


@folders.PLACES
def test_a_mark_is_about_one_save(tmp_path: Path, place: str) -> None:
    """Another save at the same path has no mark, and a repaired checkpoint is marked anew."""
    folder = place.format(tmp_path / "run")
    folders.save(folder, 1)
    assert main(["verify", f"{folder}/step-1", "--mark"]) == 0
    assert _state(folder, 1) == "verified"
    shutil.rmtree(tmp_path / "run" / "step-1")
    folders.save(folder, 1)
    assert _state(folder, 1) == "candidate"
    _flip(tmp_path / "run" / "step-1" / backends.data_file(0))
    assert main(["verify", f"{folder}/step-1", "--mark"]) == 1
    assert _state(folder, 1) == "failed"
    _flip(tmp_path / "run" / "step-1" / backends.data_file(0))
    assert main(["verify", f"{folder}/step-1", "--mark"]) == 0
    assert _state(folder, 1) == "verified"


def test_a_verdict_comes_too_late_after_an_overwrite(tmp_path: Path) -> None:
    """A save that replaces the checkpoint while it is verified does not get the verdict."""
    folders.save(tmp_path, 1)
    before = identify_save(tmp_path / "step-1")
    shutil.rmtree(tmp_path / "step-1")
    folders.save(tmp_path, 1)
    with pytest.raises(CheckpointingException, match="replaced by another save while it was verified"):
        mark_checkpoint(tmp_path / "step-1", before, "verified", checked="digests", files=4)
    assert not (tmp_path / MARKS_NAME).exists()


def test_what_is_no_verdict_is_an_error(tmp_path: Path) -> None:
    """A verdict that is none, and a negative number of files, are named, and nothing is marked."""
    folders.save(tmp_path, 1)
    at = tmp_path / "step-1"
    marks: list[tuple[Any, str, int]] = [("fine", "digests", 4), ("verified", "bytes", 4), ("verified", "digests", -1)]
    for verdict, checked, files in marks:
        given: Any = {"checked": checked, "files": files}
        with pytest.raises(CheckpointingException, match=r"step-1 is not marked: (verdict|checked|files): "):
            mark_checkpoint(at, identify_save(at), verdict, **given)
    assert not (tmp_path / MARKS_NAME).exists()


def test_ls_shows_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verified and failed stand in the row, and a failed one in the exit code; no mark is no word."""
    folders.save_all(tmp_path, 1, 2, 3)
    assert main(["verify", str(tmp_path / "step-1"), "--mark"]) == 0
    assert main(["ls", str(tmp_path)]) == 0
    _flip(tmp_path / "step-2" / backends.data_file(0))
    assert main(["verify", str(tmp_path / "step-2"), "--mark"]) == 1
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 1
    found = {each["step"]: each for each in json.loads(capsys.readouterr().out)}
    assert [found[step]["has_failed"] for step in (1, 2, 3)] == [False, True, False]
    assert found[1]["mark"].startswith("marked verified on ")
    assert "digest differs" in found[2]["mark"]
    assert found[3]["mark"] == ""
    folders.damage(tmp_path / "step-1")  # since it was verified
    main(["ls", str(tmp_path), "--json"])
    (row,) = (each for each in json.loads(capsys.readouterr().out) if each["step"] == 1)
    assert (row["state"], row["mark"]) == ("damaged", "")


def test_a_link_to_a_step_is_that_step(tmp_path: Path) -> None:
    """A verdict about `latest`, a link to a step beside it, is about the step."""
    folders.save(tmp_path, 1)
    (tmp_path / "latest").symlink_to("step-1")
    assert main(["verify", str(tmp_path / "latest"), "--mark"]) == 0
    assert _state(tmp_path, 1) == "verified"


def test_a_file_url_is_the_path_that_it_names(tmp_path: Path) -> None:
    """A verdict about a step, or a link to it, by a ``file://`` URL with escaped characters is about the step."""
    folders.save(tmp_path / "my run", 1)
    (tmp_path / "my run" / "latest").symlink_to("step-1")
    for name in ("latest", "st%65p-1"):
        assert main(["verify", f"file://{tmp_path}/my%20run/{name}", "--mark"]) == 0
    assert folders.names_in(tmp_path / "my run" / MARKS_NAME) == {"step-1.json"}


def test_no_mark_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that nothing tells from another save at its path is read, and not marked, which is said."""
    path = save_plain_dcp(tmp_path)
    assert main(["verify", str(path), "--mark"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "intact" in said
    assert "not marked: " in said
    assert "shardckpt convert" in said
    assert not (path.parent / MARKS_NAME).exists()
    assert main(["verify", str(path), "--mark", "--json"]) == 2
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["exit_code"]) == ("intact", 0)
    assert "another library" in row["unmarked"]


@folders.PLACES
def test_the_newest_verified_step_stays(tmp_path: Path, place: str) -> None:
    """No policy removes it, prune says why it is kept, and the marks of removed steps go with them."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2, 3, 4)
    for step in (1, 2):
        assert main(["verify", f"{folder}/step-{step}", "--mark"]) == 0
    kept = {each.step: each.kept for each in prune_steps(folder, [KeepLatest(1)], dry_run=True)}
    assert kept == {1: "", 2: "it is the newest verified one", 3: "", 4: "it is the newest, among the newest 1"}
    assert collect_garbage(folders.steps_of(folder), [KeepLatest(1)]) == [1, 3]
    assert folders.names_in(tmp_path / "run" / MARKS_NAME) == {"step-2.json"}
    assert main(["verify", f"{folder}/step-4", "--mark"]) == 0
    assert collect_garbage(folders.steps_of(folder), [KeepVerified(1)]) == [2]


def test_what_a_killed_mark_leaves_is_removed(tmp_path: Path) -> None:
    """A collection removes the half of a file whose process is dead, and the directory once it is empty."""
    folders.save_all(tmp_path, 1, 2)
    (tmp_path / MARKS_NAME).mkdir()
    (tmp_path / MARKS_NAME / f"{owners.dead().text}.{'0' * 32}.tmp").touch()
    alive = tmp_path / MARKS_NAME / f"{Owner.current().text}.{'0' * 32}.tmp"
    alive.touch()
    collect_garbage(folders.steps_of(tmp_path), [KeepLatest(2)])
    assert folders.names_in(tmp_path / MARKS_NAME) == {alive.name}
    alive.unlink()
    collect_garbage(folders.steps_of(tmp_path), [KeepLatest(2)])
    assert folders.names_in(tmp_path) == {"step-1", "step-2"}


def test_a_mark_can_be_read_whatever_the_faults_are(tmp_path: Path) -> None:
    """Long texts are cut, long lists of files left out, and bytes of names that are no text escaped."""
    folders.save_all(tmp_path, 1)
    checkpoint = tmp_path / "step-1"
    record = read_manifest(checkpoint, get_plugin_manager()).record
    for faults, damaged, kept in [
        (["\x01" * 20_000] * 9, [f"{n}{'x' * 900}" for n in range(90)], 0),
        (["\udcff"], ["\udcff.safetensors"], 1),
    ]:
        mark = mark_checkpoint(
            checkpoint, identify_save(checkpoint), "failed", checked="digests", files=9, faults=faults, damaged=damaged
        )
        assert find_mark_of(checkpoint, record) == mark
        assert len(mark.damaged) == kept


def test_a_mark_that_is_none_counts_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is no mark is named in a warning; the step is a candidate, is loaded, listed and removed like any other."""
    folders.save_all(tmp_path, 1, 2)
    assert main(["verify", str(tmp_path / "step-1"), "--mark"]) == 0
    mark = tmp_path / MARKS_NAME / "step-1.json"
    text = mark.read_text()
    at = f'"time":{json.loads(text)["time"]}'
    assert at in text
    odd = [f'"time":{value}' for value in ("NaN", "1e300", "1e999", 10**400, -1, '"0"', "true", f'0,"files":1,{at}')]
    for broken in ["{", "[]", *(text.replace(at, each) for each in odd)]:
        mark.write_text(broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert main(["ls", str(tmp_path)]) == 0, broken
            assert find_newest(folders.steps_of(tmp_path)) == 2
        assert "is not a valid mark" in caplog.text
        assert _state(tmp_path, 1) == "candidate", broken
    mark.unlink()
    mark.mkdir()
    assert _state(tmp_path, 1) == "candidate"
    assert collect_garbage(folders.steps_of(tmp_path), [KeepLatest(1)]) == [1]


STATES = st.dictionaries(st.integers(0, 50), st.sampled_from(["candidate", "verified", "failed"]), max_size=12)


@given(STATES, st.lists(st.builds(KeepLatest, st.integers(1, 3)) | st.just(lambda _: ()), min_size=1))
def test_no_policy_removes_what_a_load_needs(states: dict[int, Any], policies: list[Any]) -> None:
    """Whatever is marked, the newest step, the newest that has not failed and the newest verified one stay."""
    removed = steps_to_remove(policies, {step: Metrics({}, None, state) for step, state in states.items()})
    for wanted in (("candidate", "verified", "failed"), ("candidate", "verified"), ("verified",)):
        chosen = [step for step, state in states.items() if state in wanted]
        assert not chosen or max(chosen) not in removed
