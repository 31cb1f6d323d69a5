"""Ctrl-C, and warnings of other libraries."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import pytest

from shardckpt.cli import main
from shardckpt.commit.commit import staging_path
from shardckpt.storage.journal_log import JOURNAL_NAME
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _interrupt(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Let a verb be interrupted as soon as it runs."""

    def stop(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"shardckpt.cli.{verb}.run", stop)


@table(
    "verb, said",
    [
        ("ls", "shardckpt ls: interrupted; nothing was written"),
        ("prune", "shardckpt prune: interrupted; removed steps and files are gone, and the next call goes on"),
    ],
)
def test_ctrl_c_says_what_is_left(
    verb: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and the shell's exit code, no traceback."""
    _interrupt(monkeypatch, verb)
    assert main([verb]) == 130
    assert capsys.readouterr().err == f"{said}\n"


@table("verb", ["convert", "merge", "export", "migrate"])
def test_ctrl_c_names_what_a_killed_call_has_left(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stays beside DST is said, with its end: only with a journal the same call goes on with it."""
    _interrupt(monkeypatch, verb)
    new, left = tmp_path / "new", staging_path(tmp_path / "new", "0" * 32)
    left.mkdir()
    for goes_on in (False, True):
        if goes_on:
            (left / JOURNAL_NAME).write_text("")
        assert main([verb, "old", str(new)]) == 130
        said = capsys.readouterr().err
        assert f"interrupted; {new} is unchanged; the unfinished output stays in {left.name}: " in said
        assert ("the same call goes on with it, and " in said) == goes_on
        assert f"`shardckpt prune {tmp_path}` removes it" in said
    assert main([verb, "old", str(tmp_path / "none" / "new")]) == 130
    assert capsys.readouterr().err.endswith("interrupted; nothing was written\n")


@table("verb", ["convert", "merge", "export", "migrate"])
def test_ctrl_c_after_the_end_is_no_failure(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once DST has its name, an interrupt changes nothing: 0, and what is there, also where an older one was."""
    new = tmp_path / "new"

    def publish(_: object) -> int:
        (tmp_path / "staged").mkdir()
        if new.exists():
            new.rename(tmp_path / f"old-{len([*tmp_path.iterdir()])}")
        (tmp_path / "staged").rename(new)
        raise KeyboardInterrupt

    for _ in ("absent", "replaced"):
        monkeypatch.setattr(f"shardckpt.cli.{verb}.run", publish)
        assert main([verb, "old", str(new)]) == 0
        assert capsys.readouterr().err == f"shardckpt {verb}: interrupted after its end: {new} is complete\n"
    assert main([verb, "old", str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"target": str(new), "interrupted": True}
    _interrupt(monkeypatch, verb)
    assert main([verb, "old", str(new), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["exit_code"] == 130


def test_the_help_has_the_exit_code_of_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each that main returns, but what a closed reader gets."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "130 after Ctrl-C" in " ".join(capsys.readouterr().out.split())


def test_torchs_warning_of_numpy_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where numpy is not installed torch warns, and nothing here needs it; other warnings are shown."""

    def warn(_: object) -> int:
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
        return 0

    monkeypatch.setattr("shardckpt.cli.ls.run", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["ls"]) == 0
    assert capsys.readouterr().err == ""
