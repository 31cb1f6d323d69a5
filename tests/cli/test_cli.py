"""The command: its help, its verbs, and how it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import __version__, hookimpl
from shardckpt.cli import _VERBS, demo, export, inspect, ls, main, merge, migrate, prune, remove, strategies, verify
from tests.plugged import registered
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@table("arguments", [["--help"], ["--version"], ["strategies", "--help"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every verb, the version is the package's."""
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    out = capsys.readouterr().out
    expected = {
        "--help": ("demo", "strategies", "ls", "inspect", "verify", "merge", "migrate", "remove", "prune", "export"),
        "--version": (__version__,),
    }
    assert all(text in out for text in expected.get(arguments[0], ("usage",)))


@table("verb", [demo, strategies, ls, inspect, verify, merge, migrate, remove, prune, export])
def test_the_help_of_a_verb_explains_it(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the verb does, changes and returns: its module's docstring."""
    monkeypatch.setenv("COLUMNS", "1000")  # argparse breaks lines in the middle of options
    with pytest.raises(SystemExit, match="0"):
        main([verb.__name__.rpartition(".")[2], "--help"])
    words = capsys.readouterr().out.split()
    assert " ".join(str(verb.__doc__).split()) in " ".join(words)


@table("verb", ["", *_VERBS])
def test_every_help_page_fits_the_terminal(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 80 columns no line of a help page is longer, the lists of docstrings and alternatives in the usage neither."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*filter(None, [verb]), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    if verb == "merge":  # a row goes on below its text
        assert "  --linear T         two: 1 - T and T" in lines
        assert any(line.startswith(f"{' ' * 21}rate, linear, cosine or 1-sqrt, the oldest SRC") for line in lines)


@table("verb", ["convert", "export", "merge"])
def test_the_help_names_every_dtype_of_a_cast(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --dtype takes, float64 too."""
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    assert "cast floating-point tensors to float64, float32, float16 or bfloat16," in capsys.readouterr().out


def test_strategies_lists_the_built_ins(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each strategy: backend, version, what it does, who brought it."""
    assert main(["strategies"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch_dist", "1"] in [row[:2] for row in rows]
    assert {row[2] for row in rows if row[:1] == ["torch_dist"]} == {"load", "save"}
    assert all(f"shardckpt {__version__}" in " ".join(row) for row in rows if row[:1] == ["torch_dist"])


def test_errors_go_to_standard_error_with_the_verb(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal is one message, without a traceback."""
    assert main(["inspect", str(checkpoint) + "x"]) == 2
    assert main(["verify", str(checkpoint) + "x"]) == 2
    assert main(["migrate", str(checkpoint), str(checkpoint) + "2"]) == 2
    err = capsys.readouterr().err
    assert "shardckpt verify: " in err
    assert "does not exist" in err
    assert "shardckpt migrate: " in err
    assert "Traceback" not in err


def test_a_wrong_call_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's convention for a call that cannot be taken."""
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_a_plugins_verb_without_a_function_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says which verb has none, and how the plugin gives it one."""

    class Plugin:
        @hookimpl
        def shardckpt_commands(self, subparsers: Any) -> None:
            subparsers.add_parser("noop")

    with registered(Plugin()):
        assert main(["noop"]) == 2
    assert "'noop' has no function: where shardckpt_commands" in capsys.readouterr().err
