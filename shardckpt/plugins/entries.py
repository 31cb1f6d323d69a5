"""The entries of the registry: strategies and migrations as classes, instances or ``"module:Class"``."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardckpt.errors import PluginError
from shardckpt.strategy import LoadStrategy, Migration, SaveStrategy

#: The distribution of entries that no plugin registered.
USER = "this process"


class StrategyAction(Enum):
    """The action of a registered strategy, by Megatron's names; a sharded strategy stores the common state, too."""

    LOAD_SHARDED = "load_sharded"
    SAVE_SHARDED = "save_sharded"

    @property
    def verb(self) -> str:
        """The verb: ``load`` or ``save``."""
        return self.value.partition("_")[0]


BASES: dict[StrategyAction, type[Any]] = {
    StrategyAction.LOAD_SHARDED: LoadStrategy,
    StrategyAction.SAVE_SHARDED: SaveStrategy,
}


@dataclass(frozen=True)
class Entry:
    """A registered strategy."""

    action: StrategyAction
    backend: str
    version: int
    #: A class, an instance, or ``"module:Class"``, imported at first use.
    target: Any
    #: Name and version of the distribution that registered it, or :data:`USER`.
    distribution: str
    #: The formats that it reads or writes, in a few words.
    summary: str
    #: Whether it was registered to replace another entry.
    override: bool
    #: ``"module:function"`` that returns the outline of a checkpoint (:mod:`shardckpt.plugins.outline`); ``""``: none.
    outline: str = ""

    @property
    def name(self) -> str:
        """The class's name with its module, without importing it."""
        return _class_name(self.target)

    def create(self) -> Any:
        """Return a strategy for one operation: a new instance, unless an instance was registered.

        It is a PluginError if it cannot be imported or created, or differs from its registration.
        """
        if not isinstance(self.target, str | type):
            return self.target
        kind = _import_class(self.target, BASES[self.action], self.distribution)
        if isinstance(self.target, str):
            # the entry was registered without importing the class, so it may name another backend or version
            _check_claim(self.target, self.distribution, (self.backend, self.version), get_strategy_key(kind))
        return _create(kind, self.distribution)


@dataclass(frozen=True)
class MigrationEntry:
    """A registered migration; ``target`` and ``distribution`` are as in :class:`Entry`."""

    backend: str
    from_version: int
    to_version: int
    target: type[Migration] | str
    distribution: str

    @property
    def name(self) -> str:
        """The class's name with its module, without importing it."""
        return _class_name(self.target)

    def create(self) -> Migration:
        """Return a migration for one checkpoint.

        It is a PluginError if it cannot be imported or created, or differs from its registration.
        """
        kind = _import_class(self.target, Migration, self.distribution)
        claim = (self.backend, self.from_version, self.to_version)
        _check_claim(self.name, self.distribution, claim, get_migration_key(kind))
        return _create(kind, self.distribution)  # type: ignore[no-any-return]


#: The name of a backend. It is no number: that would be the version in ``("npy", 1)``. It is no requirement either,
#: such as ``npy>=1``.
BACKEND = re.compile(r"(?!\d+$)[^\s<>=!~,@]+")


def check_key(backend: Any, *versions: Any) -> None:
    """Raise PluginError unless a backend is a name, and each version an integer from 1 on.

    Strategies and migrations are registered under such keys, and a save records one.
    """
    if not isinstance(backend, str) or not backend or any(type(each) is not int or each < 1 for each in versions):
        given = repr((backend, *versions))
        raise PluginError(
            f"{given:.200} is no strategy: give the backend as str and its version as int, 1 or more: ('npy', 1)"
        )
    if not BACKEND.fullmatch(backend):
        raise PluginError(
            f"a backend cannot be called {backend!r:.200}: a name has no blank and none of <>=!~,@, and is no number, "
            "so that 'npy', 'npy@1' and lists of these name it"
        )


def check_targets(**targets: Any) -> None:
    """Check the texts by which classes and functions are registered: ``"module:Class"``; ``""`` is none."""
    for option, target in targets.items():
        parts = target.split(":") if isinstance(target, str) else ()
        if target != "" and not (len(parts) == 2 and all(parts)):  # noqa: PLR2004 - module and class
            raise PluginError(f"cannot register {option}={target!r:.200}: give a str, 'module:Class'")


def get_strategy_key(strategy: Any) -> tuple[str, int]:
    """Return the backend and version that a strategy, a class or an instance, names.

    It is a PluginError if it names none, or a description of itself is no text.
    """
    kind = strategy if isinstance(strategy, type) else type(strategy)
    backend, version = getattr(strategy, "backend", None), getattr(strategy, "version", None)
    if not isinstance(backend, str) or type(version) is not int:
        raise PluginError(f"{kind.__qualname__} must name its backend (str) and version (int) as class attributes")
    for name in ("reader", "reads", "writes"):
        text = getattr(strategy, name, "")
        if not isinstance(text, (str, property)):  # a wrapper's properties return the wrapped strategy's texts
            raise PluginError(
                f"{kind.__qualname__}.{name} is a text, which `shardckpt strategies` and errors show; it is {text!r}: "
                "give a method or an attribute of your own another name"
            )
    return backend, version


def get_migration_key(kind: type[Migration]) -> tuple[str, int, int]:
    """Return the backend and the two versions that a migration class names; it is a PluginError if it lacks one."""
    missing = [name for name in ("backend", "from_version", "to_version") if not hasattr(kind, name)]
    if missing:
        raise PluginError(f"{kind.__qualname__} must name as class attributes: {', '.join(missing)}")
    return kind.backend, kind.from_version, kind.to_version


def _class_name(target: Any) -> str:
    """Return a class's name with its module, without importing it."""
    if isinstance(target, str):
        return target.replace(":", ".")
    kind = target if isinstance(target, type) else type(target)
    return f"{kind.__module__}.{kind.__qualname__}"


def _import_class(target: type[Any] | str, base: type[Any], distribution: str) -> type[Any]:
    """Return the class; import it if it is named as ``"module:Class"``."""
    if isinstance(target, type):
        return target
    module, _, name = target.partition(":")
    try:
        found = sys.modules.get(module)
        # another thread may be importing it: import_module waits for that
        if found is None or getattr(getattr(found, "__spec__", None), "_initializing", False):
            found = importlib.import_module(module)
        kind = getattr(found, name)
    except (Exception, SystemExit) as exc:  # a module may call sys.exit
        raise PluginError(f"{target} of {distribution} cannot be imported: {type(exc).__name__}: {exc}") from exc
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise PluginError(f"{target} of {distribution} is not a {base.__name__}")
    return kind


def _check_claim(name: str, distribution: str, claimed: tuple[Any, ...], own: tuple[Any, ...]) -> None:
    if claimed != own:
        raise PluginError(f"{name} of {distribution} is registered as {claimed}, but its class attributes name {own}")


def _create(kind: type[Any], distribution: str) -> Any:
    try:
        return kind()
    except (Exception, SystemExit) as exc:  # sys.exit in a constructor, and the other ranks wait for an error
        name = _class_name(kind)
        raise PluginError(f"{name} of {distribution} cannot be created: {type(exc).__name__}: {exc}") from exc
