"""Ctrl-C, and warnings of other libraries."""

from __future__ import annotations

import warnings

import pytest

from shardckpt.cli import main
from tests.tables import table


@table(
    "verb, said",
    [
        ("ls", "shardckpt ls: interrupted; nothing was written"),
        ("prune", "shardckpt prune: interrupted; what it has removed is gone, and the next call goes on"),
    ],
)
def test_ctrl_c_says_what_is_left(
    verb: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and the shell's exit code, no traceback."""

    def stop(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"shardckpt.cli.{verb}.run", stop)
    assert main([verb]) == 130
    assert capsys.readouterr().err == f"{said}\n"


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
