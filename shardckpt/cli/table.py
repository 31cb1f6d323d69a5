"""Plain text tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as text: left-aligned columns under a header.

    Args:
        header: Names of the columns.
        rows: Cells, converted by ``str``.
    """
    cells = zip(*rows, strict=True) if rows else ([] for _ in header)
    return columns_table(header, *([*map(str, column)] for column in cells))


def columns_table(header: Sequence[str], *columns: Sequence[str]) -> str:
    """Return the same of columns: a listing may have 100,000 rows.

    Args:
        header: Names of the columns.
        columns: The texts of each column, as many in each.
    """
    full = []
    for number, (name, column) in enumerate(zip(header, columns, strict=True), 1):
        width = max(map(len, (name, *column)))
        cells = [name, "-" * width, *column]
        full.append(cells if number == len(columns) else [cell.ljust(width) for cell in cells])
    return "\n".join(["  ".join(row).rstrip() for row in zip(*full, strict=True)])
