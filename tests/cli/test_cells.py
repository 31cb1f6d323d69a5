"""Texts in the cells of a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardckpt.cli.cells import cut, cut_middle, cut_words, measure, measure_widest, pad, pad_all, wrap
from shardckpt.cli.table import fit_table
from shardckpt.cli.table import table as make_table
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """No part has more cells than there are, a mark stays with its letter, and lines end with words."""
    assert (cut(WIDE, 3), cut(COMBINED, 1), cut("abc", 2)) == (WIDE[0], COMBINED[:2], "ab")
    assert cut_middle(WIDE * 6, 12) == f"{WIDE[0]}...{WIDE[1]}{WIDE}"
    assert measure(cut_middle(f"{WIDE * 9}{COMBINED * 9}", 12)) <= 12
    assert (cut_words("ab cd", 4), cut_words(f"{WIDE} cd", 5), cut_words("abcdef", 4)) == ("ab", WIDE, "abcd")
    assert wrap(f"{WIDE} ab  cd {WIDE}", 5) == [WIDE, "ab", "cd", WIDE]
    assert wrap(WIDE, 1) == [*WIDE]


def _columns_of(lines: Sequence[str], marks: str) -> set[int]:
    """Where the second cell of each line begins, in cells of the terminal."""
    return {measure(line[: line.index(mark)]) for line, mark in zip(lines, marks, strict=True)}


def test_columns_begin_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe and on a terminal, whatever the letters of names are; no line is wider than the terminal."""
    rows = [(WIDE * 3, "1"), (COMBINED, "2"), ("plain", "3 " + WIDE * 30)]
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
