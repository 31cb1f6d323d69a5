"""Packages whose names are imported at first use, listed once: in the stub beside the package."""

from __future__ import annotations

import ast
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def attach_stub(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package offer what its stub lists, each name imported when it is first used.

    The stub, ``__init__.pyi`` beside the package, is what type checkers read: one list for both.

    Args:
        package: The package's name. Each line of its stub reads ``from MODULE import NAME as NAME``.

    Returns:
        The package's ``__getattr__``, ``__dir__`` and ``__all__``.
    """
    door = sys.modules[package]
    stub = door.__spec__.loader.get_data(door.__file__ + "i")  # type: ignore[union-attr, operator]
    modules = {
        alias.name: node.module
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the package's
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            found: Any = importlib.import_module(f"{package}.{name}")
        else:
            found = getattr(importlib.import_module(modules[name]), name)
        # the next use finds the name itself
        return vars(door).setdefault(name, found)

    return __getattr__, lambda: sorted({*vars(door), *modules}), sorted(modules)
