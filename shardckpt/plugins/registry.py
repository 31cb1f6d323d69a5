"""The registry: (backend, version) → strategy. Classes or lazy references, never singletons that carry state."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, DuplicateStrategyError, PluginError
from shardckpt.plugins.entries import BASES, USER, Entry, MigrationEntry, StrategyAction, identity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.strategy import LoadStrategy, Migration, SaveStrategy


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
        self._distribution = USER

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
        action = next((action for action, base in BASES.items() if issubclass(kind, base)), None)
        if action is None:
            raise PluginError(f"{kind.__qualname__} is neither a SaveStrategy nor a LoadStrategy")
        backend, version = identity(kind)
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
        if not issubclass(kind, BASES[action]):
            raise PluginError(f"{kind.__qualname__} is not a {BASES[action].__name__}")
        identity(kind)
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

    def migrations(self, backend: str | None = None, from_version: int | None = None) -> list[MigrationEntry]:
        """Migrations of a backend from a version (None: any), the newest target first."""
        found = (
            entry
            for entry in self._migrations.values()
            if backend in (None, entry.backend) and from_version in (None, entry.from_version)
        )
        return sorted(found, key=lambda entry: (entry.backend, -entry.to_version, entry.from_version))

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
            self._distribution = USER

    def _put(self, entry: Entry) -> None:
        key = (entry.action, entry.backend, entry.version)
        present = self._entries.get(key)
        user = entry.distribution == USER
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


def parse_key(value: Any) -> tuple[str, int | None]:
    """Backend and version that a caller names: ``"npy"`` or ``("npy", 1)``."""
    if isinstance(value, str):
        return value, None
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):  # noqa: PLR2004
        return value
    raise CheckpointingException(f"a strategy is named as 'backend' or ('backend', version), not {value!r}")


__all__ = ["Entry", "MigrationEntry", "StrategyAction", "StrategyRegistry", "parse_key"]
