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
    lines = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
