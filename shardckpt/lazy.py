"""Packages whose names are imported at first use, listed once: in the stub of the package."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: The modules of shardckpt that users import from, in the order in which a name is looked for in them.
_PUBLIC = (
    *("dist_checkpointing", "manager", "adapters", "huggingface", "maintenance", "local", "async_save", "parallel"),
    *("mapping", "strategy", "plugins", "storage", "errors", "manifest", "chunks", "planning", "archive"),
    *("distributed", "testing", "optimizer", "optimizer_state", "quantized", "state_dict", "stubs", "tensors"),
    "settings",
)


def attach_stub(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package offer what its stub lists, each name imported when it is first used.

    The stub, ``__init__.pyi`` in the package, is what type checkers read: one list for both.

    Args:
        package: The package's name. Each line of its stub reads ``from MODULE import NAME as NAME``.

    Returns:
        The package's ``__getattr__``, ``__dir__`` and ``__all__``.
    """
    door = sys.modules[package]
    stub = door.__spec__.loader.get_data(door.__file__ + "i")  # type: ignore[union-attr, operator]
    modules = _list_stub(ast.parse(stub))

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the package's
        if name not in modules:
            caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - nothing public says that an import asks
            _refuse(package, name, is_import=caller == "_handle_fromlist")
        if modules[name] == package:
            found: Any = importlib.import_module(f"{package}.{name}")
        else:
            found = getattr(importlib.import_module(modules[name]), name)
        # the next use finds the name itself
        return vars(door).setdefault(name, found)

    return __getattr__, lambda: sorted({*vars(door), *modules}), sorted(modules)


def _list_stub(tree: ast.Module) -> dict[str, str]:
    """Return the names that a stub offers, each with the module that it is imported from."""
    return {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }


def _refuse(package: str, name: str, *, is_import: bool) -> NoReturn:
    """Raise the error of a name that a package has not; if another module has it, with the line that imports it.

    Args:
        is_import: Whether ``from PACKAGE import NAME`` asks, which gives an AttributeError a text of its own.
    """
    text = f"module {package!r} has no attribute {name!r}"
    is_private, is_module = name.startswith("_"), importlib.util.find_spec(f"{package}.{name}") is not None
    if is_private or is_module or not (home := _find_home(name)):
        raise AttributeError(text)
    text += f": from {home} import {name}"
    if is_import:
        raise ImportError(text, name=package)
    raise AttributeError(text, name=None, obj=None)  # else Python adds the name that is spelt most like it


def _find_home(name: str) -> str:
    """Return the public module that has a name; ``""`` if none has. None is imported: it may take torch."""
    for module in (f"{__package__}.{each}" for each in _PUBLIC):
        spec = importlib.util.find_spec(module)
        loader, path = spec.loader, spec.origin  # type: ignore[union-attr]
        try:
            offered: Collection[str] = _list_stub(ast.parse(loader.get_data(f"{path}i")))  # type: ignore[union-attr]
        except OSError:  # it has no stub
            tree = ast.parse(loader.get_data(path))  # type: ignore[union-attr]
            lists = [
                each for each in tree.body if isinstance(each, ast.Assign) and "__all__" in ast.dump(each.targets[0])
            ]
            offered = [each for found in lists for each in ast.literal_eval(found.value)]
        if name in offered:
            return module
    return ""
