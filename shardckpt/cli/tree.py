"""The modules of a checkpoint as a tree, with sums."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from shardckpt.cli.table import table

if TYPE_CHECKING:
    from collections.abc import Iterable


def make_tree(sizes: Iterable[tuple[str, int]], depth: int | None = None) -> str:
    """Return a table of the modules in keys, indented by depth, each with the sums of all below it.

    ``sizes`` are key and bytes of each tensor; the parts of a key are joined by dots, and the last one is no module.
    ``depth`` is the deepest level that is shown; by default all are.
    """
    modules: dict[str, tuple[int, int]] = {"": (0, 0)}
    for key, size in sizes:
        inner = key.rpartition(".")[0]
        module = inner and f".{inner}"  # "" for all, ".a.b" for the tensors in a.b
        count, total = modules.get(module, (0, 0))
        modules[module] = (count + 1, total + size)
    for module in [*modules]:
        while module and (module := module.rpartition(".")[0]) not in modules:
            modules[module] = (0, 0)
    for module in sorted(modules, key=_depth, reverse=True):
        if module:  # its sums are complete by now
            (count, total), above = modules[module], module.rpartition(".")[0]
            modules[above] = (modules[above][0] + count, modules[above][1] + total)
    shown = (module for module in modules if depth is None or _depth(module) <= depth)
    rows = [
        ("  " * _depth(module) + (module.rpartition(".")[2] if module else "(all)"), f"{count:,}", f"{nbytes:,}")
        for module in sorted(shown, key=lambda module: [*map(_order, module.split("."))])
        for count, nbytes in [modules[module]]
    ]
    return table(("module", "tensors", "bytes"), rows)


def _depth(module: str) -> int:
    return module.count(".")


@functools.cache
def _order(part: str) -> tuple[int, str]:
    """Order layers by number: 2 before 10."""
    return (int(part), "") if part.isascii() and part.isdecimal() else (-1, part)
