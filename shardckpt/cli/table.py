"""Plain text tables."""

from __future__ import annotations

from itertools import repeat
from operator import add
from typing import TYPE_CHECKING, Any

from shardckpt.cli.colour import Painted, colour, has_colours
from shardckpt.errors import escape_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.cli.colour import Style


#: Dashes under the name of the last column, at most.
_LONGEST_RULE = 40
#: Characters of a last cell that a line has room for, of a first cell that stay, and what stands for those that do not.
_LAST, _SHORTEST, _GAP = 20, 20, "..."


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], styles: Sequence[Style] = (), styled: int = -1) -> str:
    """Return a table as text: left-aligned columns under a header.

    Args:
        header: Names of the columns.
        rows: Cells, converted by ``str``.
        styles: Of each row, in what colour one of its cells is, if standard output shows colours.
        styled: The number of the column of that cell; the last.
    """
    cells = zip(*rows, strict=True) if rows else ([] for _ in header)
    columns = ([*map(str, column)] for column in cells)
    return columns_table(header, *columns, styles=styles, styled=styled)


def drop_empty(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return a table without the columns that have nothing but ``-`` in every row."""
    kept = [number for number in range(len(header)) if any(row[number] != "-" for row in rows)]
    return [header[number] for number in kept], [[row[number] for number in kept] for row in rows]


def fit_first(header: Sequence[str], rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Return rows whose first cells are cut in the middle, as far as it takes for lines of a width; never to nothing.

    The last cells may be reasons of several lines: what they have more than a few words counts for nothing.
    """
    columns = [[*map(len, map(escape_text, map(str, column)))] for column in zip(header, *rows, strict=True)]
    others = sum(map(max, columns[1:-1])) + min(max(columns[-1]), _LAST) + 2 * (len(columns) - 1)
    return [[_cut_middle(escape_text(str(row[0])), max(width - others, _SHORTEST)), *row[1:]] for row in rows]


def _cut_middle(text: str, most: int) -> str:
    """Return a text of at most so many characters: of a longer one both ends, the end of which tells names apart."""
    if len(text) <= most:
        return text
    tail = (most - len(_GAP)) * 2 // 3
    return f"{text[: most - len(_GAP) - tail]}{_GAP}{text[-tail:]}"


def columns_table(
    header: Sequence[str], *columns: Sequence[str], styles: Sequence[Style] = (), styled: int = -1
) -> str:
    """Return the same of columns: a listing may have 100,000 rows.

    Args:
        header: Names of the columns.
        columns: The texts of each column, as many in each.
        styles: As for :func:`table`.
        styled: As for :func:`table`.
    """
    full = []
    is_painted = bool(styles) and has_colours()
    for number, (name, given) in enumerate(zip(header, columns, strict=True), 1):
        column = _escape_cells(given)
        different = {name, *column}
        width = max(map(len, different))
        # nothing is right of the last column, whose texts may be reasons of several lines of a terminal
        cells = [name, "-" * (width if number < len(columns) else min(width, _LONGEST_RULE)), *column]
        if number < len(columns):
            # of 100,000 tensors, most have one of a few dtypes, shapes and sizes
            padded = {cell: cell.ljust(width) for cell in (*different, cells[1])}
            cells = list(map(padded.__getitem__, cells))
        full.append(cells)
    if is_painted:
        full[styled][2:] = map(colour, full[styled][2:], styles)  # cells are escaped by now
    text = "\n".join(map(str.rstrip, map("  ".join, zip(*full, strict=True))))
    return Painted(text) if is_painted else text


def grouped_table(
    header: Sequence[str], firsts: Sequence[str], groups: Sequence[int], rows: Sequence[Sequence[str]]
) -> str:
    """Return the same, where all cells behind the first are those of one of a few rows: 100,000 in few steps.

    Args:
        header: Names of the columns.
        firsts: The first cell of each row.
        groups: The number of the row that has its other cells.
        rows: The other cells, of rows that are all in ``groups``.
    """
    firsts = _escape_cells(firsts)
    width = max(map(len, (header[0], *firsts)))
    if not rows:
        return table(header, [])
    lines = table(header[1:], rows).split("\n")
    heads = [f"{cell.ljust(width)}  {line}" for cell, line in zip((header[0], "-" * width), lines[:2], strict=True)]
    ends = [f"  {line}" for line in lines[2:]]
    return "\n".join([*heads, *map(add, map(str.ljust, firsts, repeat(width)), map(ends.__getitem__, groups))])


def _escape_cells(cells: Sequence[str]) -> Sequence[str]:
    """Return cells that are one line each, of printable characters: texts from files draw no rows of their own."""
    return cells if all(map(str.isprintable, cells)) else [*map(escape_text, cells)]
