"""The pair of strategies that a contract tests, as it is sent to ranks and to other processes."""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing
from shardckpt.plugins.entries import StrategyAction
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.registry import parse_key

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from shardckpt.strategy import LoadStrategy, SaveStrategy

    PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Subject:
    """A save strategy and its load strategy: each a name, a class, an instance, or a function that returns one.

    ``with_objects`` says whether the states that are saved to test them have ShardedObjects, too.
    """

    save_strategy: Any
    load_strategy: Any
    with_objects: bool = True

    def make_saver(self) -> SaveStrategy:
        """Return a save strategy."""
        return _make(self.save_strategy, StrategyAction.SAVE_SHARDED)  # type: ignore[no-any-return]

    def make_loader(self) -> LoadStrategy:
        """Return a load strategy."""
        return _make(self.load_strategy, StrategyAction.LOAD_SHARDED)  # type: ignore[no-any-return]

    @property
    def key(self) -> tuple[str, int]:
        """Backend and version that the save strategy writes."""
        saver = self.make_saver()
        return saver.backend, saver.version

    def save(self, state: dict[str, Any], path: PathLike, **options: Any) -> Any:
        """Collective: save by the strategy."""
        return dist_checkpointing.save(state, path, self.make_saver(), **options)

    def load(self, state: dict[str, Any], path: PathLike, **options: Any) -> Any:
        """Collective: load by the strategy."""
        return dist_checkpointing.load(state, path, self.make_loader(), **options)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Register both strategies in this process while the block runs, unless a plugin has registered them."""
        backend, version = self.key
        registry = get_plugin_manager().registry
        pairs = (
            (StrategyAction.SAVE_SHARDED, self.save_strategy, self.make_saver),
            (StrategyAction.LOAD_SHARDED, self.load_strategy, self.make_loader),
        )
        with registry.preserved():
            for action, given, make in pairs:
                strategy = make()
                present = registry.find(action, backend, version)
                if present is None or type(present.create()) is not type(strategy):
                    registry.put(action, backend, version, given if isinstance(given, type) else strategy)
            yield

    def check_can_be_sent(self) -> None:
        """Raise an error with advice if other processes cannot have the strategies."""
        try:
            pickle.dumps(self)
        except Exception as exc:
            raise TypeError(
                f"save_strategy and load_strategy go to other processes, and cannot be pickled ({exc}): use classes or "
                "functions that return a strategy, at the top level of a module that can be imported"
            ) from exc


def _make(given: Any, action: StrategyAction) -> Any:
    """Return a strategy; of one that is named without a version the newest."""
    if isinstance(given, str | tuple):
        backend, version = parse_key(given)
        for entry in get_plugin_manager().registry.entries(action, backend):
            if version in (None, entry.version):
                return entry.create()
        raise TypeError(f"strategy = {given!r}: no installed strategy is registered for {action.value} under this name")
    return given() if callable(given) else given
