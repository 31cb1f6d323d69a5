"""Texts in the cells of a terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.cli import main
from shardckpt.cli.cells import cut, cut_middle, fit_line, measure, measure_widest, pad, pad_all, wrap
from shardckpt.cli.table import fit_table, grouped_table
from shardckpt.cli.table import table as make_table
from shardckpt.manager import pin_step
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

#: A name of two wide characters, and one of five letters, of which one has a combining accent.
WIDE, COMBINED = "\u6a21\u578b", "e\u0301poch"


@table(("text", "cells"), [("", 0), ("abc", 3), (WIDE, 4), (COMBINED, 5), ("\uff21b", 3), ("\xe9", 1)])
def test_a_text_has_as_many_cells_as_a_terminal_gives_it(text: str, cells: int) -> None:
    """Wide characters take two, combining marks none."""
    assert measure(text) == measure_widest(["", text]) == cells
    assert measure(pad(text, 9)) == 9
    assert [*map(measure, pad_all([text, "x"], 9))] == [9, 9]


def test_texts_are_cut_at_cells() -> None:
    """No part has more cells than there are, a mark stays with its letter, and lines end with whole words."""
    assert (cut(WIDE, 3), cut(COMBINED, 1), cut("abc", 2)) == (WIDE[0], COMBINED[:2], "ab")
    assert cut_middle(WIDE * 6, 12) == f"{WIDE[0]}...{WIDE[1]}{WIDE}"
    assert measure(cut_middle(f"{WIDE * 9}{COMBINED * 9}", 12)) <= 12
    assert wrap(f"{WIDE} ab  cd {WIDE}", 5) == [WIDE, "ab", "cd", WIDE]
    assert wrap(f"ab {WIDE} cd", 2, 1) == ["", "ab", WIDE, "cd"]


def _columns_of(lines: Sequence[str], marks: Sequence[str]) -> set[int]:
    """Where the second cell of each line begins, in cells of the terminal."""
    return {measure(line[: line.index(mark)]) for line, mark in zip(lines, marks, strict=True)}


def test_columns_begin_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe and on a terminal, whatever the letters of names are; no line is wider than the terminal."""
    rows = [(WIDE * 3, "1"), (COMBINED, "2"), ("plain", "3" + f" {WIDE}" * 30)]
    assert len(_columns_of(make_table(("name", "n"), rows).split("\n")[2:], "123")) == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    values = [("name", "value", "y" * 90, "z"), ("other", "value", "-", "z")]
    assert max(map(measure, fit_table(("object", "differs in", "first", "second"), values)[0].split("\n"))) <= 80
    monkeypatch.setenv("COLUMNS", "40")
    lines = fit_table(("name", "n"), [(WIDE * 20, "1"), *rows[1:]])[0].split("\n")
    assert len(_columns_of(lines[2:5], "123")) == 1
    assert max(map(measure, lines)) <= 40


def test_no_short_cell_makes_a_line_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of which no cell is long leave less room for names: a line fits, and a name is whole or above its row."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    names = [f"optimizer.state.{n}.{moment}" for n in (0, 1) for moment in ("exp_avg", "exp_avg_sq", "w.exp_avg_sq")]
    rows = [(name, "only in second", "float32 [128, 64]", "float32 [128, 64]", "0.00266") for name in (*names, "w")]
    lines = fit_table(("tensor", "differs in", "first", "second", "max abs"), rows)[0].split("\n")
    assert max(map(measure, lines)) <= 80
    assert [line for line in lines if line.startswith("opt")] == names


def test_names_that_would_be_cut_alike_stand_above_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of layers differ in their middles, which a cut would take: whole, in lines of their own, they differ."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    keys = [f"model.{'decoder.' * 4}{layer}.{'experts.' * 5}weight" for layer in (0, 1)]
    fitted = fit_table(("key", "kind", "norm"), [(keys[0], "float32", "1"), (keys[1], "int8", "2"), ("x", "int8", "3")])
    others = [("float32", "1"), ("int8", "2"), ("int8", "3")]
    grouped = grouped_table(("key", "kind", "norm"), [*keys, "x"], [0, 1, 2], others)
    for lines in (fitted[0].split("\n"), grouped.split("\n")):
        assert lines[0].split() == ["key", "kind", "norm"]
        assert [line.split() for line in lines[2:]] == [
            *([keys[0]], ["float32", "1"], [keys[1]], ["int8", "2"], ["x", "int8", "3"])
        ]
        assert len(_columns_of([lines[0], lines[3], lines[5]], ("norm", "1", "2"))) == 1


def test_a_long_line_is_broken_on_a_terminal_and_no_command_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is copied without its last option, `--dry-run`, would remove what it was to show."""
    line = f"4 steps are damaged: `shardckpt prune {'x' * 30} --damaged --dry-run` says which may go, and why"
    assert fit_line(line, sys.stdout) == line
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = fit_line(line, sys.stdout).split("\n")
    assert " ".join(each.strip() for each in lines) == line
    assert max(map(measure, lines)) <= 80
    assert any("prune" in each and "--dry-run`" in each for each in lines)
    assert fit_line(WIDE * 50, sys.stdout) == WIDE * 50
    assert fit_line("`a b", sys.stdout) == "`a b"


def test_what_is_to_be_copied_is_not_broken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The call that writes a lost ``metadata.json`` back is in one line of ``ls`` and ``verify``."""
    (checkpoint / "metadata.json").unlink()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for verb in (["ls"], ["verify"], ["verify", str(checkpoint)]):
        assert main([*verb, str(checkpoint)]) == 1
        assert f"`shardckpt verify {checkpoint} --repair`" in capsys.readouterr().out


@table(
    "call",
    [
        *("ls {0}", "ls {0}/step-1", "prune {0} --keep-latest 1 --dry-run", "prune {0} --damaged --dry-run --verify"),
        *("pin {0}", "verify {0}", "verify {0}/step-1", "inspect {0}/step-1", "inspect {0}/step-1 --stats"),
        *("inspect {0}/step-1 --files", "diff {0}/step-1 {0}/step-2", "strategies", "config", "config links"),
        *(
            "convert {0}/step-1 {1} --to safetensors -v",
            "export {0}/step-1 {1} -v",
            "merge {0}/step-1 {0}/step-2 {1} -v",
        ),
        *("remove {0}/step-1 w --dry-run", "convert {0}/step-1 {1} --to hff", "pin {0} 1", "export {0} {1}"),
        *("prune {0} --keep-step 7", "inspect {0} --treee", "lss"),
    ],
)
def test_answers_fit_a_terminal_of_80_columns(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line of a table, a summary or an error is wider, but where a path or a command is."""
    for step in (1, 2):
        folders.save(tmp_path / "run", step, config={"best_metric": "loss", "best_mode": "min"}, loss=1 / step)
        pin_step(tmp_path / "run", step, "why it is kept, in more words than a line of a terminal has room for")
    folders.save(tmp_path / "run", 3)
    folders.damage(tmp_path / "run" / "step-3")
    monkeypatch.chdir(tmp_path)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "1000")
    monkeypatch.setenv("NO_COLOR", "1")
    with suppress(SystemExit):
        main(call.format("run", "new").split())
    out, err = capsys.readouterr()
    said = "\n".join((out, err if err.startswith(("shardckpt ", "usage: ")) else "")).replace(str(tmp_path), "")
    assert max(map(measure, said.split("\n"))) <= 80, said
