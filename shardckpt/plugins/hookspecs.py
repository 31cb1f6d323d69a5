"""What a plugin can offer: the pluggy hooks of the entry-point group ``shardckpt``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    from shardckpt.plugins.key_mapping import KeyMapping
    from shardckpt.plugins.registry import StrategyRegistry
    from shardckpt.storage import RemoteFolder

GROUP = "shardckpt"

hookspec = pluggy.HookspecMarker(GROUP)
#: Decorates a plugin's functions of the names below.
hookimpl = pluggy.HookimplMarker(GROUP)


@dataclass(frozen=True)
class Event:
    """A moment of a save, load, migration, removal or export on one rank.

    Attributes:
        operation: ``save``, ``load``, ``migrate``, ``remove`` or ``export``.
        phase: Name of the step; ``""`` for the operation as a whole.
        state: ``start``, ``end`` or ``failure``.
        directory: The checkpoint.
        rank: Who reports.
        seconds: Time since the start of the phase; 0 at its start.
        nbytes: Bytes that the rank wrote, at the end of a save or export; else 0.
        strategy: ``(backend, version)`` and class that do the work, once known.
        error: Text of the failure.
    """

    operation: str
    phase: str
    state: str
    directory: str
    rank: int
    seconds: float = 0.0
    nbytes: int = 0
    strategy: str = ""
    error: str = ""


@hookspec
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Add strategies and migrations to the registry: ``registry.add(MySaveStrategy)``."""


@hookspec
def shardckpt_event(event: Event) -> None:
    """See every phase of every save and load: metrics and progress bars hang here."""


@hookspec(firstresult=True)
def shardckpt_filesystem(url: str) -> RemoteFolder | None:
    """The folder at a URL; None leaves it to another plugin. Called anew in every process that opens the URL."""


@hookspec(firstresult=True)
def shardckpt_key_mapping(model_type: str) -> KeyMapping | None:
    """How tensors of checkpoints of a model (``model_type`` of its ``config.json``) are called and cut on the hub.

    A :class:`shardckpt.plugins.key_mapping.KeyMapping`, or a ``shardckpt.huggingface.RuleMapping`` of patterns of
    names; it serves export and import. None leaves it to another plugin, and to the built-in mappings behind all
    plugins.
    """


@hookspec
def shardckpt_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add verbs to the ``shardckpt`` command: parsers that ``set_defaults(run=function)``."""


__all__ = [
    "GROUP",
    "Event",
    "hookimpl",
    "hookspec",
    "shardckpt_commands",
    "shardckpt_event",
    "shardckpt_filesystem",
    "shardckpt_key_mapping",
    "shardckpt_register",
]
