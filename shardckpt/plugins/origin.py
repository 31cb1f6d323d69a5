"""The origin of an error: the plugin, class and line whose code raised it, for the error's text."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException
from shardckpt.plugins.entries import USER

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from shardckpt.plugins.manager import PluginManager

#: The package of the core. Its frames belong to no plugin, though some of its modules are entry points.
_CORE = __name__.partition(".")[0]


def describe_strategy(strategy: Any, plugins: PluginManager) -> str:
    """Return the class, backend and version, plugin, and source file of a strategy or migration, for errors.

    For a wrapper of the core, the wrapped strategy is described.
    """
    kinds = _unwrap(strategy)
    kind = next((kind for kind in kinds if _package(kind.__module__) != _CORE), kinds[0])
    names = (getattr(strategy, "backend", None), getattr(strategy, "version", None))  # an instance may name its own
    key = "" if None in names else f" {names}"
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    where = f", {file}" if file else ""
    return f"{kind.__module__}.{kind.__qualname__}{key} of {_describe_plugins(kind.__module__, plugins)}{where}"


def describe_origin(error: BaseException, plugins: PluginManager, code: Any = None) -> str:
    """Return which plugin's code raised an error: class, plugin, file and line; ``""`` if none did.

    ``code`` is the strategy, migration or work that was called; without it nothing but plugins is looked for. Errors of
    the family are left to the core and to this distribution's own strategies: their texts name the failure and its
    place, and a damaged file is no fault of a plugin.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    is_ours = isinstance(error, CheckpointingException)
    if not frames or (is_ours and _package(_module(frames[-1][0])) == _CORE):
        return ""
    # a callback of the caller may be in the strategy's package: only a class on the stack has raised
    modules = {_module(frame) for frame, _ in frames}
    kinds = {_package(kind.__module__): kind for kind in _unwrap(code) if modules & _list_modules(kind)}
    for frame, line in reversed(frames):
        module = _module(frame)
        found = plugins.find_plugins(module)
        kind = kinds.get(_package(module))
        if _package(module) == _CORE or not (found or kind):
            continue
        if is_ours and any(plugin.distribution.partition(" ")[0] == _CORE for plugin in found):
            return ""
        name = f"{module}.{frame.f_code.co_name}" if kind is None else f"{kind.__module__}.{kind.__qualname__}"
        return f"in {name} of {_describe_plugins(module, plugins)}, {frame.f_code.co_filename}:{line}"
    return ""


def bracket_origin(error: BaseException, plugins: PluginManager) -> str:
    """Return which plugin's code raised an error, to append to the text of the hook's failure, or ``""``."""
    origin = describe_origin(error, plugins)
    return f" ({origin})" if origin else ""


class name_origin:  # noqa: N801 - used as a function; no generator, since each load has one
    """A context manager to call a plugin's code outside the phases of an operation: an error names the plugin.

    It is a CheckpointingException, of a class as :class:`~shardckpt.distributed.ErrorReport` has it, with the original
    error as its cause.
    """

    __slots__ = ("_code", "_plugins")

    def __init__(self, plugins: PluginManager, code: Any) -> None:
        self._plugins = plugins
        self._code = code

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        from shardckpt.distributed.error_report import ErrorReport  # here: a listing of plugins must not import torch

        origin = describe_origin(error, self._plugins, self._code)
        if origin:
            raise ErrorReport.of(error, origin).to_error() from error


def _describe_plugins(module: str, plugins: PluginManager) -> str:
    found = plugins.find_plugins(module)
    if not found:
        return USER
    names = ", ".join(plugin.name for plugin in found)
    return f"plugin {names} ({found[0].distribution})"


def _unwrap(code: Any) -> list[type[Any]]:
    """Return the classes of a strategy and of the strategies that it wraps, the innermost last."""
    from shardckpt.strategy import LoadStrategy, SaveStrategy  # here: a listing of plugins must not import them

    kinds = []
    while code is not None:
        kinds.append(type(code))
        inner = vars(code).values() if isinstance(code, (SaveStrategy, LoadStrategy)) else ()
        code = next((one for one in inner if isinstance(one, (SaveStrategy, LoadStrategy))), None)
    return kinds


def _list_modules(kind: type[Any]) -> set[str]:
    """Return the modules of a class and of its bases in the same package."""
    modules = {base.__module__ for base in kind.__mro__}
    return {module for module in modules if _package(module) == _package(kind.__module__)}


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]
