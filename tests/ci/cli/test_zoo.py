"""The command at work in an operator's folder: 24 checkpoints of twelve origins, six damaged, and a bucket."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardckpt.cli import main
from tests.cli.zoo import DAMAGED, OTHERS, SEEN_AT_A_GLANCE, SOUND, make_zoo
from tests.remote.conftest import endpoint, s3
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["endpoint", "s3"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, which no test changes."""
    root = tmp_path_factory.mktemp("zoo")
    make_zoo(root)
    return root


@pytest.fixture
def own(zoo: Path, tmp_path: Path) -> Path:
    """A copy for a test that changes it."""
    return shutil.copytree(zoo, tmp_path / "own")


@pytest.fixture
def bucket(zoo: Path, s3: str) -> Iterator[str]:
    """A copy in a bucket."""
    # fsspec keeps clients by their arguments: another file's has the address of a server that has ended
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("team")
    files.put(f"{zoo}/", "team/zoo/", recursive=True)
    yield "s3://team/zoo"
    files.rm("team", recursive=True)


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """The exit code of a verb, and its JSON."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


#: The loose files, which are read on this machine alone.
FILES = {path: "other" for path in (*SOUND, *DAMAGED) if path.endswith((".pt", ".ckpt", ".safetensors"))}


def check_listing(rows: list[dict[str, Any]], root: str, others: dict[str, str]) -> None:
    """Compare what ls says with what was made; ``others`` are the states that are not those of a folder here."""
    found = {row["path"].removeprefix(f"{root}/"): row for row in rows}
    assert found.keys() == {*SOUND, *DAMAGED, *OTHERS}
    assert {path: row["state"] for path, row in found.items()} == (
        dict.fromkeys((*SOUND, *DAMAGED), "whole") | SEEN_AT_A_GLANCE | OTHERS | others
    )
    for path in SOUND.keys() - others.keys():
        assert (found[path]["writer"] or found[path]["library"]).startswith(SOUND[path]), path


def test_ls_lists_all_of_a_folder(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command names each checkpoint at any depth, who wrote it, and what is wrong with it at a glance."""
    code, rows = ask(capsys, "ls", "-r", zoo)
    assert code == 1
    check_listing(rows, str(zoo), {})


@table("width", [80, 120])
def test_tables_fit_a_terminal(
    zoo: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of the table of checkpoints or of verdicts is longer than the terminal is wide."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(zoo)
    for verb in ("ls", "verify"):
        main([verb, "-r", "."])
        found = capsys.readouterr().out.partition("checkpoint  ")[2].partition("\n25 checkpoints")[0].splitlines()
        assert len(found) > len(SOUND)
        assert [line for line in found if len(line) > width] == []


@pytest.mark.parametrize("where", ["folder", *in_proof("bucket")])
def test_verify_finds_all_damage(
    zoo: Path, where: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """One command reads all of it, and finds what was damaged and nothing else."""
    root = str(zoo) if where == "folder" else request.getfixturevalue("bucket")
    code, found = ask(capsys, "verify", "-r", root)
    assert code == 2  # Orbax's is one that it cannot answer for
    codes = {each["checkpoint"].removeprefix(f"{root}/"): each["exit_code"] for each in found if not each["skipped"]}
    expected = dict.fromkeys(SOUND, 0) | dict.fromkeys(DAMAGED, 1) | {"orbax": 2}
    assert codes == {path: code for path, code in expected.items() if where == "folder" or path not in FILES}


@table("path", SOUND)
def test_each_is_inspected_converted_and_compared(
    zoo: Path, tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wrote it: its tensors are listed, it becomes a checkpoint of ours, and diff finds them equal."""
    code, found = ask(capsys, "inspect", zoo / path)
    assert (code, bool(found["tensors"])) == (0, True)
    to = "torch_dist" if found["backend"] == "safetensors" else "safetensors"
    code, report = ask(capsys, "convert", zoo / path, tmp_path / path, "--to", to)
    assert (code, report["tensors"]) == (0, len(found["tensors"]))
    code, differences = ask(capsys, "diff", zoo / path, tmp_path / path, "--tensors-only")
    assert (code, differences["same"]) == (0, True)


@table("path", DAMAGED)
def test_nothing_is_made_of_what_is_damaged(
    zoo: Path, tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion of a damaged one is an error that names the file, and leaves nothing."""
    code, found = ask(capsys, "convert", zoo / path, tmp_path / "new", "--to", "safetensors")
    assert code == 2
    assert any(word in found["error"]["message"] for word in DAMAGED[path])
    assert not (tmp_path / "new").exists()


def test_steps_are_merged(zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The average of three steps of a run is one command, and sound."""
    steps = (zoo / "llama" / f"step-{step}" for step in (100, 200, 300))
    assert ask(capsys, "merge", *steps, tmp_path / "mean")[0] == 0
    assert ask(capsys, "verify", tmp_path / "mean")[0] == 0


def test_steps_of_any_name_are_pinned_and_pruned(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pinned step stays, whatever its name and whoever wrote it."""
    assert ask(capsys, "pin", own / "titan", 10, "--label", "release")[0] == 0
    assert ask(capsys, "pin", own / "megatron", "iter_0000100", "--label", "paper")[0] == 0
    assert ask(capsys, "prune", own / "llama", "--keep-latest", 2)[0] == 0
    for run in ("titan", "megatron"):
        assert ask(capsys, "prune", own / run, "--keep-latest", 1)[0] == 0
    left = {str(each.relative_to(own)) for run in ("llama", "titan", "megatron") for each in (own / run).iterdir()}
    assert {"titan/step-10", "megatron/iter_0000100", "llama/step-500", "llama/step-400"} <= left
    assert left.isdisjoint({"llama/step-100", "llama/step-200", "llama/step-300"})


@pytest.mark.parametrize("where", ["folder", *in_proof("bucket")])
def test_words_name_steps(
    zoo: Path, where: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """``FOLDER/latest`` and ``FOLDER/best`` are steps of a run, whoever wrote it, in a bucket, too."""
    root = str(zoo) if where == "folder" else request.getfixturevalue("bucket")
    for path, name in {"llama/best": "step-500", "titan/latest": "step-10", "megatron/latest": "iter_0000200"}.items():
        (row,) = ask(capsys, "ls", f"{root}/{path}")[1]
        assert row["name"] == name
    code, found = ask(capsys, "verify", f"{root}/llama/latest")
    assert (code, found[0]["checkpoint"]) == (1, f"{root}/llama/step-500")


def test_damaged_steps_are_removed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command a run: what was damaged goes, bits that changed by --verify, and all that is sound stays."""
    runs = ("llama", "titan", "megatron", "epochs", "deepspeed", "zarr")
    for run in runs:
        code, found = ask(capsys, "prune", own / run, "--damaged", "--older-than", 0, *["--verify"] * (run == "llama"))
        assert code == (1 if run == "llama" else 0)
        assert not any(each["error"] for each in found["steps"])
    left = {str(each.relative_to(own)) for run in runs for each in (own / run).glob("[!.]*") if each.is_dir()}
    expected = {path for path in SOUND if path.partition("/")[0] in runs}
    assert left == expected | {"megatron/iter_0000200"}  # it has no digest: its flipped bit is only found by verify
