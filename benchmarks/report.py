"""The table, on the terminal and in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Results, Row

LEGEND = """\
Medians of interleaved rounds; n: how many. Seconds run from a barrier to the end of the slowest rank.
xN: times the seconds of shardckpt. rN: speed as a part of the reference's, which is the faster of buffered and O_DIRECT
with two threads a rank. '-': cannot, or not measured.
Loads go into memory that exists and is touched; the page cache has all files unless it says cold. Blocked: until the
state may change, with staging memory kept from an earlier save. Peak memory: what the process itself had at most beyond
what it had before, mapped file pages included, forked children not. Read: bytes by read calls over bytes needed; mapped
files are not counted. Simulated ranks: CPU seconds in one process."""
_REFERENCE = "reference"
_OURS = "shardckpt"


class Report:
    """What was measured, in a form to print.

    Args:
        results: The measurements.
        adapters: Those that were measured, in the order of columns.
        machine: Lines about it.
        notes: What was left out or failed.
    """

    def __init__(self, results: Results, adapters: Sequence[str], machine: Sequence[str], notes: Sequence[str]) -> None:
        self._results = results
        self._columns = list(dict.fromkeys(_REFERENCE if a.startswith("reference-") else a for a in adapters))
        self._machine = machine
        self._notes = notes

    def text(self) -> str:
        """For a terminal."""
        parts = ["\n".join(self._machine), table(self._header(), self._rows()), LEGEND]
        return "\n\n".join([*parts, *(["\n".join(f"note: {note}" for note in self._notes)] if self._notes else [])])

    def markdown(self) -> str:
        """For RESULTS.md."""
        header, rows = self._header(), self._rows()
        lines = [header, ["---"] * len(header), *rows]
        grid = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        about = "\n".join(f"- {line}" for line in [*self._machine, *(f"note: {note}" for note in self._notes)])
        return f"# Results of `python -m benchmarks`\n\n{about}\n\n{grid}\n\n{LEGEND}\n"

    def _header(self) -> list[str]:
        return ["workload", "operation", "n", *self._columns]

    def _rows(self) -> list[list[str]]:
        order: dict[str, list[Row]] = {}
        for row in self._results.rows():
            order.setdefault(row.group, []).append(row)
        return [
            [row.group if first else "", f"{row.title} ({row.unit})", str(self._results.count(row)), *self._cells(row)]
            for rows in order.values()
            for first, row in ((index == 0, row) for index, row in enumerate(rows))
        ]

    def _cells(self, row: Row) -> list[str]:
        reference = self._results.reference(row)
        return [self._cell(row, column, reference) for column in self._columns]

    def _cell(self, row: Row, column: str, reference: tuple[str, float] | None) -> str:
        value = self._results.median(row, column)
        if column == _REFERENCE and reference is not None:
            value = reference[1]
        if value is None:
            return "-"
        parts = [_number(value)]
        ours = self._results.median(row, _OURS)
        if row.unit == "s" and column != _OURS and ours:
            parts.append(f"x{_number(value / ours)}")
        if row.unit == "s" and column != _REFERENCE and reference is not None and value:
            parts.append(f"r{reference[1] / value:.2f}")
        if column == _REFERENCE and reference is not None:
            parts.append(reference[0].removeprefix("reference-"))
        return " ".join(parts)


def _number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:  # noqa: PLR2004
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


__all__ = ["LEGEND", "Report"]
