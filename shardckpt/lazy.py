"""Offer a package's names without importing the modules that define them: each is imported at first use."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: The modules of shardckpt that users import from. An error advises the first one that offers a name.
_PUBLIC_MODULES = (
    "dist_checkpointing",
    "manager",
    "adapters",
    "huggingface",
    "maintenance",
    "local",
    "async_save",
    "parallel",
    "mapping",
    "strategy",
    "plugins",
    "storage",
    "errors",
    "manifest",
    "chunks",
    "planning",
    "archive",
    "distributed",
    "testing",
    "optimizer",
    "optimizer_state",
    "quantized",
    "state_dict",
    "stubs",
    "tensors",
    "settings",
)


def attach_stub(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package offer the names in its stub; the module of each is imported when the name is first used.

    The stub is ``__init__.pyi`` in the package. Type checkers read the same file.

    A package calls it as ``__getattr__, __dir__, __all__ = attach_stub(__name__)``.

    Args:
        package: The package's name. Each line of its stub reads ``from MODULE import NAME as NAME``.

    Returns:
        The package's ``__getattr__``, ``__dir__`` and ``__all__``.
    """
    module = sys.modules[package]
    stub = module.__spec__.loader.get_data(module.__file__ + "i")  # type: ignore[union-attr, operator]
    origins = _list_stub(ast.parse(stub))

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the package's
        if name not in origins:
            caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - nothing public tells an import from an attribute
            _raise_missing(package, name, is_import=caller == "_handle_fromlist")
        if origins[name] == package:
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(origins[name]), name)
        # Python finds the name in the package from now on; of two threads that import at once, both get the first value
        return vars(module).setdefault(name, value)

    return __getattr__, lambda: sorted({*vars(module), *origins}), sorted(origins)


def _list_stub(tree: ast.Module) -> dict[str, str]:
    """Return the names that a stub offers, each with the module that defines it."""
    return {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }


def _raise_missing(package: str, name: str, *, is_import: bool) -> NoReturn:
    """Raise the error for a name that a package lacks; it shows the import from the public module that has the name.

    Args:
        is_import: Whether ``from PACKAGE import NAME`` asks. Python replaces the text of an AttributeError then, so
            an ImportError is raised.
    """
    text = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_") or not name.isidentifier():
        raise AttributeError(text)
    # Python asks for each submodule that it imports from a package, and imports it after a plain AttributeError. A look
    # for a submodule is cheap, and to parse all stubs is not.
    is_submodule = importlib.util.find_spec(f"{package}.{name}") is not None
    public_module = None if is_submodule else _map_public_names().get(name)
    if public_module is None:
        raise AttributeError(text)
    text += f": from {public_module} import {name}"
    if is_import:
        raise ImportError(text, name=package)
    raise AttributeError(text, name=None, obj=None)  # with a name, Python would suggest one with a similar spelling


@functools.cache
def _map_public_names() -> dict[str, str]:
    """Return the first public module that offers each name."""
    modules = [f"{__package__}.{name}" for name in reversed(_PUBLIC_MODULES)]  # of equal names, a dict keeps the last
    return {name: module for module in modules for name in _list_offered(module)}


def _list_offered(module: str) -> Collection[str]:
    """Return the names in a module's stub; without a stub, those in its ``__all__``.

    Reads source text and imports nothing, because an import would load torch.
    """
    spec = importlib.util.find_spec(module)
    loader, path = spec.loader, spec.origin  # type: ignore[union-attr]
    try:
        return _list_stub(ast.parse(loader.get_data(f"{path}i")))  # type: ignore[union-attr]
    except OSError:  # the module has no stub
        tree = ast.parse(loader.get_data(path))  # type: ignore[union-attr]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)  # type: ignore[no-any-return]
    return ()
