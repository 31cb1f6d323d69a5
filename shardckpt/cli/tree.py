"""The modules of a checkpoint as a tree, with sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli.table import table

if TYPE_CHECKING:
    from collections.abc import Iterable


def make_tree(sizes: Iterable[tuple[str, int]], depth: int | None = None) -> str:
    """Return a table of the modules in keys, indented by depth, each with the sums of all below it.

    Args:
        sizes: Key and bytes of each tensor; the parts of a key are joined by dots, and the last one is no module.
        depth: The deepest level that is shown; by default all are.
    """
    modules: dict[str, tuple[int, int]] = {}
    for key, size in sizes:
        module = key.rpartition(".")[0]
        count, total = modules.get(module, (0, 0))
        modules[module] = (count + 1, total + size)
    sums: dict[tuple[str, ...], list[int]] = {(): [0, 0]}
    for module, (count, nbytes) in modules.items():
        parts = module.split(".") if module else []
        for end in range(len(parts) + 1):
            found = sums.setdefault(tuple(parts[:end]), [0, 0])
            found[0] += count
            found[1] += nbytes
    rows = [
        ("  " * len(path) + (path[-1] if path else "(all)"), f"{count:,}", f"{nbytes:,}")
        for path, (count, nbytes) in sorted(sums.items(), key=lambda item: [*map(_order, item[0])])
        if depth is None or len(path) <= depth
    ]
    return table(("module", "tensors", "bytes"), rows)


def _order(part: str) -> tuple[int, str]:
    """Order layers by number: 2 before 10."""
    return (int(part), "") if part.isascii() and part.isdecimal() else (-1, part)
