"""Plain text tables."""

from __future__ import annotations

import shutil
import sys
from operator import add
from typing import TYPE_CHECKING, Any

from shardckpt.cli.cells import cut_middle, measure, measure_widest, pad, pad_all, wrap
from shardckpt.cli.colour import Painted, colour, has_colours
from shardckpt.errors import escape_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.cli.colour import Style


#: Dashes under the name of the last column, at most.
_LONGEST_RULE = 40
#: Terminal cells that a line has room for of its last cell, and that stay of its first one.
_LAST, _SHORTEST = 20, 20
#: Terminal cells that stay of a first cell where the others leave no room for more.
_LEAST = 8
#: The beginning of the lines that a last cell has below its row.
_BELOW = "    "


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], styles: Sequence[Style] = (), styled: int = -1) -> str:
    """Return a table as text: left-aligned columns under a header.

    ``styles`` are the colours of one cell of each row, if standard output shows colours: the cell in column ``styled``,
    by default the last.
    """
    cells = zip(*rows, strict=True) if rows else ([] for _ in header)
    columns = ([*map(str, column)] for column in cells)
    return columns_table(header, *columns, styles=styles, styled=styled)


def drop_empty(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns that have nothing but ``-`` in every row; without rows, all of it."""
    kept = [number for number in range(len(header)) if not rows or any(row[number] != "-" for row in rows)]
    return [header[number] for number in kept], [[row[number] for number in kept] for row in rows]


def fit_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    styles: Sequence[Style] = (),
    styled: int = -1,
    *,
    optional: Sequence[str] = (),
    copied: bool = False,
) -> list[str]:
    """Return a table without empty columns as one text; on a terminal, one whose lines have the terminal's width.

    There columns are left out that can be missed, and cells are cut in the middle, those of the first column last, or
    where they would be the same then, stand above their rows; of the last column, which may have long reasons, they go
    on below their row.

    ``optional`` are the names of columns that can be missed, the first of all first; another text names those left out.
    ``copied`` says that the first cells are arguments of other commands: a cell that a line has no room for is not cut,
    and stands above its row.
    """
    names, cells = drop_empty(header, [[escape_text(str(cell)) for cell in row] for row in rows])
    if not sys.stdout.isatty():
        return [table(names, cells, styles, styled)]
    width = shutil.get_terminal_size().columns
    above = [""] * len(cells)
    fitted = _fit_cells(names, cells, optional, width)
    kept_apart = len({row[0] for row in fitted[1]}) == len({row[0] for row in cells})
    if (
        copied and [row[0] for row in fitted[1]] != [row[0] for row in cells]
    ) or not kept_apart:  # names of layers differ in their middles
        kept = {row[0] for row in fitted[1]}
        above = ["" if row[0] in kept and measure(row[0]) <= width // 3 else row[0] for row in cells]
        below = [["" if name else row[0], *row[1:]] for name, row in zip(above, cells, strict=True)]
        fitted = _fit_cells(names, below, optional, width)
    names, cells, left_out = fitted
    text = _wrap_lasts(names, cells, above, styles, styled, width)
    note = f"not shown in {width} columns: {', '.join(left_out)}; all is in a pipe, and with --json"
    return [text, *(wrap(note, width) if left_out else [])]


def _fit_cells(
    names: list[str], cells: list[list[str]], optional: Sequence[str], width: int
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return a table whose cells, but the last ones, fit a line, and the names of the columns that were left out."""
    names, cells, left_out = _leave_out_columns(names, cells, optional, width)
    if _SHORTEST + _measure_others(names, cells) > width:  # such as values of the common state in diff
        middle = max(width // 4, _SHORTEST)
        cells = [[row[0], *(cut_middle(cell, middle) for cell in row[1:-1]), row[-1]] for row in cells]
    room = max(width - _measure_others(names, cells), _LEAST)
    return names, [[cut_middle(row[0], room), *row[1:]] for row in cells], left_out


def _leave_out_columns(
    names: list[str], cells: list[list[str]], optional: Sequence[str], width: int
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return a table without the optional columns that a line has no room for, and the names of these columns.

    A line keeps room for the longest first cell, up to a third of the line: names are cut only beyond that.
    """
    longest = max((measure(row[0]) for row in cells), default=0)
    first = max(min(longest, width // 3), _SHORTEST)
    left_out = []
    for name in optional:
        if name in names and first + _measure_others(names, cells) > width:
            number = names.index(name)
            names, *cells = ([*row[:number], *row[number + 1 :]] for row in (names, *cells))
            left_out.append(name)
    return names, cells, left_out


def _measure_others(names: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Return the cells of a line without the first column; of the last column, only those that a line has room for."""
    widths = [measure_widest(column) for column in zip(names, *cells, strict=True)]
    return sum(widths[1:-1]) + min(widths[-1], _LAST) + 2 * (len(widths) - 1)


def _wrap_lasts(
    names: Sequence[str],
    cells: Sequence[Sequence[str]],
    above: Sequence[str],
    styles: Sequence[Style],
    styled: int,
    width: int,
) -> str:
    """Return a table: the text of a last cell that a line has no room for stands below its row, and names above."""
    before = sum(measure_widest(column) + 2 for column in [*zip(names, *cells, strict=True)][:-1])
    lasts = [wrap(row[-1], max(width - len(_BELOW), _LAST), max(width - before, _LAST)) for row in cells]
    shown = table(names, [[*row[:-1], first] for row, (first, *_) in zip(cells, lasts, strict=True)], styles, styled)
    is_painted = isinstance(shown, Painted)
    head, rule, *lines = shown.split("\n")
    whole = [head, rule]
    painted: Sequence[Style] = styles or [""] * len(cells)
    for line, name, (_, *rest), style in zip(lines, above, lasts, painted, strict=True):
        whole += [
            *filter(None, [name]),
            line,
            *(f"{_BELOW}{colour(each, style) if is_painted else each}" for each in rest),
        ]
    text = "\n".join(whole)
    return Painted(text) if is_painted else text


def columns_table(
    header: Sequence[str], *columns: Sequence[str], styles: Sequence[Style] = (), styled: int = -1
) -> str:
    """Return the same of columns, with as many texts in each: a listing may have 100,000 rows."""
    full = []
    is_painted = bool(styles) and has_colours()
    for number, (name, given) in enumerate(zip(header, columns, strict=True), 1):
        column = _escape_cells(given)
        different = {name, *column}
        width = measure_widest(different)
        # nothing is right of the last column, whose texts may be reasons of several lines of a terminal
        cells = [name, "-" * (width if number < len(columns) else min(width, _LONGEST_RULE)), *column]
        if number < len(columns):
            # of 100,000 tensors, most have one of a few dtypes, shapes and sizes
            padded = {cell: pad(cell, width) for cell in (*different, cells[1])}
            cells = list(map(padded.__getitem__, cells))
        full.append(cells)
    if is_painted:
        full[styled][2:] = map(colour, full[styled][2:], styles)  # cells are escaped by now
    text = "\n".join(map(str.rstrip, map("  ".join, zip(*full, strict=True))))
    return Painted(text) if is_painted else text


def grouped_table(
    header: Sequence[str], firsts: Sequence[str], groups: Sequence[int], rows: Sequence[Sequence[str]]
) -> str:
    """Return the same for lines that share few rows of cells behind the first: 100,000 in few steps.

    ``groups`` has the number of the row that has a line's other cells; all ``rows`` are in it.
    """
    firsts = _escape_cells(firsts)
    if not rows:
        return table(header, [])
    lines = table(header[1:], rows).split("\n")
    firsts, width = _lift_long(header[0], firsts, measure_widest(lines) + 2)
    heads = [f"{pad(cell, width)}  {line}" for cell, line in zip((header[0], "-" * width), lines[:2], strict=True)]
    ends = [f"  {line}" for line in lines[2:]]
    return "\n".join([*heads, *map(add, pad_all(firsts, width), map(ends.__getitem__, groups))])


def _lift_long(name: str, firsts: Sequence[str], others: int) -> tuple[Sequence[str], int]:
    """Return the first cells of lines, and their width: on a terminal, a cell that is too wide stands above.

    ``name`` is the column's name; the other columns take ``others`` terminal cells.
    """
    width = measure_widest((name, *firsts))
    room = max(shutil.get_terminal_size().columns - others, _SHORTEST) if sys.stdout.isatty() else width
    if width <= room:
        return firsts, width
    width = measure_widest((name, *(first for first in firsts if measure(first) <= room)))
    return [first if measure(first) <= room else f"{first}\n{' ' * width}" for first in firsts], width


def _escape_cells(cells: Sequence[str]) -> Sequence[str]:
    """Return cells that are one line each, of printable characters: texts from files draw no rows of their own."""
    return cells if all(map(str.isprintable, cells)) else [*map(escape_text, cells)]
