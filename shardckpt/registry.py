"""The registry: (backend, version) → strategy. Classes or lazy references, never singletons that carry state."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, DuplicateStrategyError, PluginError
from shardckpt.strategy import LoadStrategy, Migration, SaveStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator

_USER = "this process"


class StrategyAction(Enum):
    """What a registered strategy does, by Megatron's names; common state belongs to the sharded strategy here."""

    LOAD_SHARDED = "load_sharded"
    SAVE_SHARDED = "save_sharded"


_BASES: dict[StrategyAction, type[Any]] = {
    StrategyAction.LOAD_SHARDED: LoadStrategy,
    StrategyAction.SAVE_SHARDED: SaveStrategy,
}


@dataclass(frozen=True)
class Entry:
    """A registered strategy.

    Attributes:
        action: Whether it saves or loads.
        backend: Its backend.
        version: Its version.
        target: A class, an instance, or ``"module:Class"``, imported at first use.
        distribution: Who registered it: a distribution with its version, or this process.
        summary: What it reads or writes.
        override: Whether it was registered to replace another.
    """

    action: StrategyAction
    backend: str
    version: int
    target: Any
    distribution: str
    summary: str
    override: bool

    @property
    def name(self) -> str:
        """The class's name with its module, without importing it."""
        return _name(self.target)

    @property
    def is_users_choice(self) -> bool:
        """Whether the user put it in the place of whatever plugins bring, now or later."""
        return self.override and self.distribution == _USER

    def create(self) -> Any:
        """A strategy for one operation: a fresh one, unless an instance was registered.

        Raises:
            PluginError: it cannot be imported or created, or is not what it was registered as.
        """
        if not isinstance(self.target, str | type):
            return self.target
        kind = _imported(self.target, _BASES[self.action], self.distribution)
        if isinstance(self.target, str):
            _check_claim(self.target, self.distribution, (self.backend, self.version), _identity(kind))
        return _created(kind, self.distribution)


@dataclass(frozen=True)
class MigrationEntry:
    """A registered migration.

    Attributes:
        backend: The format family.
        from_version: Version that it reads.
        to_version: Version that it writes.
        target: A class, or ``"module:Class"``, imported at first use.
        distribution: Who registered it.
    """

    backend: str
    from_version: int
    to_version: int
    target: type[Migration] | str
    distribution: str

    @property
    def name(self) -> str:
        """The class's name with its module, without importing it."""
        return _name(self.target)

    def create(self) -> Migration:
        """A migration for one checkpoint.

        Raises:
            PluginError: it cannot be imported or created, or is not what it was registered as.
        """
        kind = _imported(self.target, Migration, self.distribution)
        claim = (self.backend, self.from_version, self.to_version)
        _check_claim(self.name, self.distribution, claim, (kind.backend, kind.from_version, kind.to_version))
        return _created(kind, self.distribution)  # type: ignore[no-any-return]


class _Default(NamedTuple):
    """A claim to be what a save uses where the caller names nothing."""

    backend: str
    version: int
    distribution: str
    override: bool


class StrategyRegistry:
    """Strategies by action, backend and version."""

    def __init__(self) -> None:
        self._entries: dict[tuple[StrategyAction, str, int], Entry] = {}
        self._migrations: dict[tuple[str, int, int], MigrationEntry] = {}
        self._default: _Default | None = None
        self._distribution = _USER

    def add(self, strategy: type[Any] | SaveStrategy | LoadStrategy, *, override: bool = False) -> None:
        """Register a strategy class (a fresh instance serves every operation) or an instance.

        Args:
            strategy: A subclass, or an instance of one, of SaveStrategy or LoadStrategy.
            override: Replace what is registered under its backend and version, now and for good.

        Raises:
            DuplicateStrategyError: another strategy has that backend and version.
            PluginError: it is not a strategy, or does not name its backend and version.
        """
        kind = strategy if isinstance(strategy, type) else type(strategy)
        action = next((action for action, base in _BASES.items() if issubclass(kind, base)), None)
        if action is None:
            raise PluginError(f"{kind.__qualname__} is neither a SaveStrategy nor a LoadStrategy")
        backend, version = _identity(kind)
        summary = getattr(kind, "reads" if action is StrategyAction.LOAD_SHARDED else "writes")
        self._put(Entry(action, backend, version, strategy, self._distribution, summary, override))

    def add_lazy(
        self,
        backend: str,
        version: int,
        *,
        save: str = "",
        load: str = "",
        writes: str = "",
        reads: str = "",
        default: bool = False,
        override: bool = False,
    ) -> None:
        """Register classes as ``"module:Class"`` without importing them.

        Args:
            backend: The classes' backend; checked when they are imported.
            version: Their version.
            save: The SaveStrategy, if any.
            load: The LoadStrategy, if any.
            writes: What it writes, in a few words.
            reads: What it reads, in a few words.
            default: Make it what ``save`` uses where the caller names none.
            override: As for :meth:`add`.
        """
        pairs = ((StrategyAction.SAVE_SHARDED, save, writes), (StrategyAction.LOAD_SHARDED, load, reads))
        for action, target, summary in pairs:
            if target:
                self._put(Entry(action, backend, version, target, self._distribution, summary, override))
        if default:
            self._claim_default(_Default(backend, version, self._distribution, override))

    def add_migration(self, migration: type[Migration]) -> None:
        """Register how checkpoints of one version are rewritten as another."""
        self._put_migration(migration.backend, migration.from_version, migration.to_version, migration)

    def add_lazy_migration(self, backend: str, from_version: int, to_version: int, migration: str) -> None:
        """Register a migration as ``"module:Class"`` without importing it.

        Args:
            backend: The class's backend; checked when it is imported.
            from_version: Version that it reads.
            to_version: Version that it writes.
            migration: The class.
        """
        self._put_migration(backend, from_version, to_version, migration)

    def put(self, action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
        """Register, as the user's override, a strategy under a key of the caller's choice."""
        kind = strategy if isinstance(strategy, type) else type(strategy)
        if not issubclass(kind, _BASES[action]):
            raise PluginError(f"{kind.__qualname__} is not a {_BASES[action].__name__}")
        _identity(kind)
        self._put(Entry(action, backend, version, strategy, self._distribution, "", override=True))

    @property
    def default(self) -> tuple[str, int]:
        """Backend and version that a save uses where the caller names none."""
        if self._default is None:
            raise PluginError(
                "no default strategy is registered: the distribution metadata of shardckpt was not found; "
                "install the project (pip install -e .), again after entry points were added"
            )
        return self._default.backend, self._default.version

    def find(self, action: StrategyAction, backend: str, version: int) -> Entry | None:
        """The strategy under exactly this key."""
        return self._entries.get((action, backend, version))

    def entries(self, action: StrategyAction | None = None, backend: str | None = None) -> list[Entry]:
        """Registered strategies, sorted by backend, newest version first."""
        chosen = (
            entry
            for entry in self._entries.values()
            if action in (None, entry.action) and backend in (None, entry.backend)
        )
        return sorted(chosen, key=lambda entry: (entry.backend, -entry.version, entry.action.value))

    def migrations(self, backend: str, from_version: int) -> list[MigrationEntry]:
        """Migrations from this version, the newest target first."""
        found = (m for key, m in self._migrations.items() if key[:2] == (backend, from_version))
        return sorted(found, key=lambda migration: -migration.to_version)

    @contextmanager
    def registering(self, distribution: str) -> Iterator[None]:
        """Note the distribution of what is added inside the block, and take all of it back if the block fails."""
        before = (dict(self._entries), dict(self._migrations), self._default)
        self._distribution = distribution
        try:
            yield
        except BaseException:
            self._entries, self._migrations, self._default = before
            raise
        finally:
            self._distribution = _USER

    def _put(self, entry: Entry) -> None:
        key = (entry.action, entry.backend, entry.version)
        present = self._entries.get(key)
        user = entry.distribution == _USER
        if present is None or (entry.override and (user or not present.override)):
            self._entries[key] = entry
        elif user or (entry.override == present.override and not present.is_users_choice):
            raise DuplicateStrategyError(
                f"({entry.backend!r}, {entry.version}) is claimed twice for {entry.action.value}: by {present.name} of "
                f"{present.distribution} and by {entry.name} of {entry.distribution}; uninstall one, switch it off "
                "with SHARDCKPT_DISABLED_PLUGINS, or register the one you want with override=True"
            )

    def _put_migration(self, backend: str, from_version: int, to_version: int, target: type[Migration] | str) -> None:
        entry = MigrationEntry(backend, from_version, to_version, target, self._distribution)
        present = self._migrations.setdefault((backend, from_version, to_version), entry)
        if present is not entry:
            raise DuplicateStrategyError(
                f"two migrations of {backend!r} from version {from_version} to {to_version}: {present.name} of "
                f"{present.distribution} and {entry.name} of {entry.distribution}; uninstall one, or switch it off "
                "with SHARDCKPT_DISABLED_PLUGINS"
            )

    def _claim_default(self, claim: _Default) -> None:
        present = self._default
        if present is None or (claim.override and not present.override):
            self._default = claim
        elif claim.override == present.override and claim[:2] != present[:2]:
            raise DuplicateStrategyError(
                f"two strategies claim to be the default: ({present.backend!r}, {present.version}) of "
                f"{present.distribution} and ({claim.backend!r}, {claim.version}) of {claim.distribution}; uninstall "
                "one, or switch it off with SHARDCKPT_DISABLED_PLUGINS"
            )


def _identity(kind: type[Any]) -> tuple[str, int]:
    """The backend and version that a strategy class names."""
    backend, version = getattr(kind, "backend", None), getattr(kind, "version", None)
    if not isinstance(backend, str) or not isinstance(version, int):
        raise PluginError(f"{kind.__qualname__} must name its backend (str) and version (int) as class attributes")
    return backend, version


def _name(target: Any) -> str:
    """A class's name with its module, without importing it."""
    if isinstance(target, str):
        return target.replace(":", ".")
    kind = target if isinstance(target, type) else type(target)
    return f"{kind.__module__}.{kind.__qualname__}"


def _imported(target: type[Any] | str, base: type[Any], distribution: str) -> type[Any]:
    """The class, imported if it is named as ``"module:Class"``."""
    if isinstance(target, type):
        return target
    module, _, name = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as exc:
        raise PluginError(f"{target} of {distribution} cannot be imported: {_text(exc)}") from exc
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise PluginError(f"{target} of {distribution} is not a {base.__name__}")
    return kind


def _check_claim(name: str, distribution: str, claimed: tuple[Any, ...], own: tuple[Any, ...]) -> None:
    if claimed != own:
        raise PluginError(f"{name} of {distribution} is registered as {claimed}, and says of itself that it is {own}")


def _created(kind: type[Any], distribution: str) -> Any:
    try:
        return kind()
    except Exception as exc:
        raise PluginError(f"{_name(kind)} of {distribution} cannot be created: {_text(exc)}") from exc


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def parse_key(value: Any) -> tuple[str, int | None]:
    """Backend and version that a caller names: ``"npy"`` or ``("npy", 1)``."""
    if isinstance(value, str):
        return value, None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):  # noqa: PLR2004
        return value
    raise CheckpointingException(f"a strategy is named as 'backend' or ('backend', version), not {value!r}")


__all__ = ["Entry", "MigrationEntry", "StrategyAction", "StrategyRegistry", "parse_key"]
