"""Suggest renames where two checkpoints have the same tensors by other names."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


def suggest_renames(first: Mapping[str, Hashable], second: Mapping[str, Hashable]) -> dict[str, str]:
    """Return prefixes of the first, each with the second's prefix for the same endings and shapes.

    Each first part of the second's names is paired with the prefix of the first that fits most of them, if these are at
    least half; no prefix is used twice.
    """
    found: dict[str, str] = {}
    by_end: dict[tuple[str, Hashable], list[str]] = {}
    for key, shape in first.items():
        parts = key.split(".")
        for depth in range(1, len(parts)):
            by_end.setdefault((".".join(parts[depth:]), shape), []).append(".".join(parts[:depth]))
    by_beginning: dict[str, list[tuple[str, Hashable]]] = {}
    for key, shape in second.items():
        beginning, dot, end = key.partition(".")
        if dot:
            by_beginning.setdefault(beginning, []).append((end, shape))
    for new, ends in sorted(by_beginning.items()):
        counts = Counter(old for end in ends for old in by_end.get(end, ()))
        if counts:
            old = max(counts, key=lambda old: (counts[old], -old.count("."), old))
            if 2 * counts[old] >= len(ends) and old not in found:
                found[old] = new
    return found
