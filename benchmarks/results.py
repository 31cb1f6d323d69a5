"""Measurements by row and adapter."""

from __future__ import annotations

import statistics
from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table: ``unit`` is s (lower is better, compared), MiB, KiB or x (a ratio of its own)."""

    group: str
    title: str
    unit: str


class Results:
    """Rows in the order in which they were first measured."""

    def __init__(self) -> None:
        self._values: dict[Row, dict[str, list[float]]] = {}

    def add(self, row: Row, adapter: str, value: float) -> None:
        """Note one measurement."""
        self._values.setdefault(row, {}).setdefault(adapter, []).append(value)

    def rows(self) -> list[Row]:
        """All rows."""
        return list(self._values)

    def count(self, row: Row) -> int:
        """The fewest measurements that an adapter has in a row."""
        return min(map(len, self._values[row].values()))

    def median(self, row: Row, adapter: str) -> float | None:
        """Of an adapter's measurements, if it has any."""
        values = self._values[row].get(adapter)
        return None if values is None else statistics.median(values)

    def reference(self, row: Row) -> tuple[str, float] | None:
        """The faster reference, and its median."""
        medians = {name: self.median(row, name) for name in self._values[row] if name.startswith("reference-")}
        known = {name: median for name, median in medians.items() if median is not None}
        return min(known.items(), key=lambda item: item[1]) if known else None


__all__ = ["Results", "Row"]
