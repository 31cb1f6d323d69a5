"""The registry: (action, backend, version) → strategy, as a class, a lazy reference to one, or an instance."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, DuplicateStrategyError, PluginError
from shardckpt.plugins.entries import (
    BACKEND,
    BASES,
    USER,
    Entry,
    MigrationEntry,
    StrategyAction,
    check_key,
    check_targets,
    get_migration_key,
    get_strategy_key,
)
from shardckpt.strategy import LoadStrategy, Migration, SaveStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Default(NamedTuple):
    """The strategy that a save uses if the caller names none, and the distribution that registered it as such."""

    backend: str
    version: int
    distribution: str
    override: bool


class StrategyRegistry:
    """The installed strategies and migrations.

    Two entries for one key are a conflict, with two exceptions: an entry with ``override=True`` replaces one without,
    and one that the user registers with ``override=True``, in this process, replaces any, and stays whatever plugins
    register later. A conflict is an error of who registers; of an installed plugin it switches off that backend and
    version alone (:meth:`attribute_to`).
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[StrategyAction, str, int], Entry] = {}
        self._migrations: dict[tuple[str, int, int], MigrationEntry] = {}
        self._default: _Default | None = None
        self._distribution = USER
        #: The conflicts of the plugin that registers now, by the claimed key; None where they are errors.
        self._conflicts: dict[Any, str] | None = None
        self._entries_before: dict[tuple[StrategyAction, str, int], Entry] = {}

    def add(self, strategy: type[Any] | SaveStrategy | LoadStrategy, *, override: bool = False) -> None:
        """Register a strategy class, for a new instance in each operation, or an instance that all share.

        A class of migrations is registered as by :meth:`add_migration`.

        Args:
            strategy: A subclass of SaveStrategy, LoadStrategy or Migration, or an instance of one of the first two.
            override: Replace an entry without ``override``, be it registered before or after; see the class. Not for
                migrations.

        Raises:
            DuplicateStrategyError: another strategy has that backend and version.
            PluginError: it is not a strategy, or does not name its backend and version.
        """
        kind = strategy if isinstance(strategy, type) else type(strategy)
        if issubclass(kind, Migration):
            if override or kind is not strategy:
                raise PluginError(
                    f"{kind.__qualname__} is a migration: register the class, without override: "
                    f"registry.add_migration({kind.__name__})"
                )
            self.add_migration(kind)
            return
        action = next((action for action, base in BASES.items() if issubclass(kind, base)), None)
        if action is None:
            by_path = any(_takes_a_path(getattr(kind, method, None)) for method in ("save", "async_save", "load"))
            raise PluginError(
                f"{kind.__qualname__} is neither a SaveStrategy nor a LoadStrategy, nor a Migration"
                + "; it takes a checkpoint_dir, as Megatron's strategies do: call register_default_strategy of "
                "shardckpt.compat.megatron.dist_checkpointing.strategies.base in the hook" * by_path
            )
        backend, version = get_strategy_key(strategy)
        check_key(backend, version)
        summary = getattr(strategy, "reads" if action is StrategyAction.LOAD_SHARDED else "writes")
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
        outline: str = "",
        default: bool = False,
        override: bool = False,
    ) -> None:
        """Register classes as ``"module:Class"``, without importing them.

        Example:
            ::

                registry.add_lazy("npy", 1, save="my_npy.save:Save", load="my_npy.load:Load", reads=".npy files")

        Args:
            outline: ``"module:function"``, if any: called as ``function(directory, record)`` without torch, with a
                :class:`~shardckpt.manifest.PlainRecord`, it returns the :class:`~shardckpt.plugins.Outline` of a
                checkpoint, or None to leave it to the LoadStrategy.
            default: Make this the strategy that a save uses if the caller names none.

        Raises:
            DuplicateStrategyError: another strategy has that backend and version, or is the default.
            PluginError: the backend is no text, the version no integer, or a class is not named so.
        """
        check_key(backend, version)
        check_targets(save=save, load=load, outline=outline)
        pairs = ((StrategyAction.SAVE_SHARDED, save, writes, ""), (StrategyAction.LOAD_SHARDED, load, reads, outline))
        entries = [
            Entry(action, backend, version, target, self._distribution, summary, override, lists)
            for action, target, summary, lists in pairs
            if target
        ]
        if self._put(*entries) and default:
            self._claim_default(_Default(backend, version, self._distribution, override))

    def add_migration(self, migration: type[Migration]) -> None:
        """Register a migration class.

        Raises:
            DuplicateStrategyError: another migration has the same three.
            PluginError: it is no class of migrations, or does not name the three.
        """
        kind: Any = migration
        if not (isinstance(kind, type) and issubclass(kind, Migration)):
            raise PluginError(f"{kind!r} is not a subclass of shardckpt.Migration")
        self._put_migration(*get_migration_key(migration), migration)

    def add_lazy_migration(self, backend: str, from_version: int, to_version: int, migration: str) -> None:
        """Register a migration as ``"module:Class"``, without importing it.

        Raises:
            DuplicateStrategyError: another migration has the same backend and versions.
            PluginError: the backend is no text, a version no integer, or the class is not named so.
        """
        check_targets(migration=migration or None)
        self._put_migration(backend, from_version, to_version, migration)

    def put(self, action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
        """Register a strategy as the user's override.

        It is a PluginError if it is not a strategy of that action, or names no backend and version, or other ones.
        """
        if action not in BASES:
            names = " or ".join(one.name for one in StrategyAction)
            raise CheckpointingException(
                f"action={action!r}: pass {names} of shardckpt.dist_checkpointing.StrategyAction"
            )
        kind = strategy if isinstance(strategy, type) else type(strategy)
        if not issubclass(kind, BASES[action]):
            raise PluginError(f"{kind.__qualname__} is not a {BASES[action].__name__}")
        check_key(backend, version)
        if (own := get_strategy_key(strategy)) != (backend, version):
            raise PluginError(
                f"cannot register under ({backend!r}, {version}) a strategy of {own}: a save would record {own}, and a "
                f"load of ({backend!r}, {version}) would be refused; register it under {own}, or let it name the other"
            )
        self._put(Entry(action, backend, version, strategy, self._distribution, "", override=True))

    @property
    def default(self) -> tuple[str, int]:
        """Backend and version that a save uses if the caller names none."""
        if self._default is None:
            raise PluginError(
                "no default strategy is registered: the distribution metadata of shardckpt was not found; "
                "install the project (`pip install -e .`), again after entry points were added"
            )
        return self._default.backend, self._default.version

    def find(self, action: StrategyAction, backend: str, version: int) -> Entry | None:
        """Return the entry under exactly this key, or None."""
        return self._entries.get((action, backend, version))

    def entries(self, action: StrategyAction | None = None, backend: str | None = None) -> list[Entry]:
        """Return the registered strategies, sorted by backend, the newest version first.

        No plugin is imported for this.
        """
        chosen = (
            entry
            for entry in self._entries.values()
            if action in (None, entry.action) and backend in (None, entry.backend)
        )
        return sorted(chosen, key=lambda entry: (entry.backend, -entry.version, entry.action.value))

    def migrations(self, backend: str | None = None, from_version: int | None = None) -> list[MigrationEntry]:
        """Return the migrations of a backend from a version (None: any), sorted, the newest target first."""
        found = (
            entry
            for entry in self._migrations.values()
            if backend in (None, entry.backend) and from_version in (None, entry.from_version)
        )
        return sorted(found, key=lambda entry: (entry.backend, -entry.to_version, entry.from_version))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Undo at the end of the block all registrations in it: tests register strategies for a while."""
        before = self.content
        try:
            yield
        finally:
            self.content = before

    @property
    def content(self) -> tuple[Any, ...]:
        """All that is registered, as it is now; to set it is to go back to that."""
        return dict(self._entries), dict(self._migrations), self._default

    @content.setter
    def content(self, content: tuple[Any, ...]) -> None:
        self._entries, self._migrations, self._default = content

    @contextmanager
    def attribute_to(self, distribution: str, conflicts: dict[Any, str] | None = None) -> Iterator[None]:
        """Attribute the block's registrations to a distribution; undo all of them if the block fails.

        If ``conflicts`` is given, a key that others have registered before is no error of the block: it is switched
        off, alone, and a text is put there. A strategy that saves goes with the one that loads the same backend and
        version.
        """
        before = self.content
        self._distribution, self._conflicts, self._entries_before = distribution, conflicts, dict(self._entries)
        try:
            yield
        except BaseException:
            self.content = before
            raise
        finally:
            self._distribution, self._conflicts, self._entries_before = USER, None, {}

    def _put(self, *entries: Entry) -> bool:
        """Register entries of one backend and version, all or none; return whether they are registered."""
        keys = {(entry.backend, entry.version) for entry in entries}
        if self._conflicts is not None and keys & self._conflicts.keys():
            return False  # the plugin's claim of this pair is off
        before = dict(self._entries)
        try:
            for entry in entries:
                self._put_one(entry)
        except DuplicateStrategyError as exc:
            self._entries = before
            for backend, version in keys:
                self._note_conflict((backend, version), exc, f"({backend!r}, {version})")
                for key in [(action, backend, version) for action in StrategyAction]:  # the one that came before, too
                    self._entries.pop(key, None)
                    if key in self._entries_before:
                        self._entries[key] = self._entries_before[key]
            return False
        return True

    def _note_conflict(self, key: Any, error: DuplicateStrategyError, what: str) -> None:
        """Raise the error of who registers; of an installed plugin note it, and go on."""
        if self._conflicts is None:
            raise error
        self._conflicts[key] = f"{error}. {what} of {self._distribution} is switched off; the rest of it works"

    def _put_one(self, entry: Entry) -> None:
        key = (entry.action, entry.backend, entry.version)
        present = self._entries.get(key)
        user = entry.distribution == USER
        is_final = present is not None and present.override and present.distribution == USER
        # The result must not depend on the order in which plugins are imported: an override wins over an entry without,
        # whichever comes first. Two of the same strength are a conflict, except that the user's override is final.
        if present is None or (entry.override and (user or not present.override)):
            self._entries[key] = entry
        elif user or (entry.override == present.override and not is_final):
            raise DuplicateStrategyError(
                f"({entry.backend!r}, {entry.version}) is claimed twice for {entry.action.value}: by {present.name} of "
                f"{present.distribution} and by {entry.name} of {entry.distribution}; uninstall one, switch it off "
                "with SHARDCKPT_DISABLED_PLUGINS, or register the one you want with override=True"
            )

    def _put_migration(self, backend: str, from_version: int, to_version: int, target: type[Migration] | str) -> None:
        check_key(backend, from_version, to_version)
        entry = MigrationEntry(backend, from_version, to_version, target, self._distribution)
        key = (backend, from_version, to_version)
        present = self._migrations.setdefault(key, entry)
        if present is not entry:
            error = DuplicateStrategyError(
                f"two migrations of {backend!r} from version {from_version} to {to_version}: {present.name} of "
                f"{present.distribution} and {entry.name} of {entry.distribution}; uninstall one, or switch it off "
                "with SHARDCKPT_DISABLED_PLUGINS"
            )
            self._note_conflict(key, error, f"the migration {key}")

    def _claim_default(self, claim: _Default) -> None:
        present = self._default
        if present is None or (claim.override and not present.override):
            self._default = claim
        elif claim.override == present.override and claim[:2] != present[:2]:
            error = DuplicateStrategyError(
                f"two strategies claim to be the default: ({present.backend!r}, {present.version}) of "
                f"{present.distribution} and ({claim.backend!r}, {claim.version}) of {claim.distribution}; uninstall "
                "one, or switch it off with SHARDCKPT_DISABLED_PLUGINS"
            )
            self._note_conflict("default", error, "the claim")


def parse_key(value: Any) -> tuple[str, int | None]:
    """Return the backend and version that a caller names; the version is None if the caller leaves it open.

    The forms are ``"npy"``, ``"npy@1"`` and ``("npy", 1)``; anything else is a CheckpointingException.
    """
    if isinstance(value, str):
        backend, separator, version = value.partition("@")
        if not separator and BACKEND.fullmatch(backend):
            return backend, None
        if backend and version.isascii() and version.isdecimal():
            return backend, int(version)
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:  # noqa: PLR2004
        return value
    raise CheckpointingException(
        f"a strategy is named as 'backend', 'backend@version' or ('backend', version), not {value!r}{_advise(value)}"
    )


def _advise(value: Any) -> str:
    """Return the advice for a strategy's class, or a strategy of the other side, in the place of a strategy."""
    for base, other in ((SaveStrategy, LoadStrategy), (LoadStrategy, SaveStrategy)):
        if isinstance(value, type) and issubclass(value, base):
            return f": {value.__name__} is a class: give an instance, {value.__name__}()"
        if isinstance(value, base):
            name = type(value).__name__
            return f": {name} is a {base.__name__}, and a {other.__name__} is asked for"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):  # noqa: PLR2004
        return f": the version is an int, as in ({value[0]!r}, 1)"
    if any(_takes_a_path(getattr(value, method, None)) for method in ("save", "async_save", "load")):
        return (
            f": {type(value).__name__} takes a checkpoint_dir, as Megatron's strategies do: call save or load of "
            "shardckpt.compat.megatron.dist_checkpointing with it, or register it there (register_default_strategy)"
        )
    return ""


def _takes_a_path(method: Any) -> bool:
    return inspect.isroutine(method) and "checkpoint_dir" in inspect.signature(method).parameters


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())


def parse_keys(value: Any) -> list[tuple[str, int | None]]:
    """Return the backends and versions that a caller names: in one form of :func:`parse_key`, or several in a list."""
    # ("npy", 1) is one key, as everywhere; ("npy", "ep") are two
    if isinstance(value, str) or (isinstance(value, tuple) and any(map(_is_number, value))):
        return [parse_key(value)]
    if not isinstance(value, Collection):
        parse_key(value)  # raises
    return [parse_key(each) for each in value]
