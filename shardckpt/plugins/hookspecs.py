"""The hooks that a plugin may implement.

A plugin is a module that an entry point of the group ``shardckpt`` names. It implements the hooks that it needs: each
is a function with one of the names below, decorated with ``@shardckpt.hookimpl``. A decorated function with any other
name is an error. ``shardckpt/plugins/README.md`` explains a complete plugin.

Example:
    The module ``shardckpt_npy.plugin``::

        import shardckpt

        @shardckpt.hookimpl
        def shardckpt_register(registry):
            registry.add_lazy("npy", 1, save="shardckpt_npy.save:Save", load="shardckpt_npy.load:Load")

    and its entry point in ``pyproject.toml``::

        [project.entry-points.shardckpt]
        npy = "shardckpt_npy.plugin"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    from shardckpt.plugins.key_mapping import KeyMapping
    from shardckpt.plugins.registry import StrategyRegistry
    from shardckpt.storage.remote import RemoteFolder

#: The entry-point group, and the name of the project for pluggy.
GROUP = "shardckpt"

hookspec = pluggy.HookspecMarker(GROUP)
#: Decorates the functions of a plugin that implement hooks.
hookimpl = pluggy.HookimplMarker(GROUP)


@dataclass(frozen=True)
class Event:
    """The start, end or failure of an operation, or of one of its phases, on one rank; or something that happened.

    Attributes:
        operation: ``save``, ``load``, ``migrate``, ``convert``, ``remove``, ``export``, ``verify``, ``diff``,
            ``inspect`` or ``prune``; or ``setup``, of a manager that could not be made.
        phase: Name of the phase; ``""`` for the operation from start to end.
        state: ``start``, ``end`` or ``failure``; or ``progress``, at most ten times a second, of a verification, which
            has no other events; to plugins that have the attribute ``wants_progress = True`` also of saves,
            conversions, exports and migrations. Threads report it, too, and the end of a background save's
            ``writing``. Two are of a manager's saves, and of no operation: ``skipped``, a step that ``on_busy="skip"``
            left out, and ``other_job``, which saves to the manager's folder, too: at each save that finds it.
        directory: The checkpoint's path or URL.
        rank: The rank that reports.
        seconds: Seconds since the start of the phase; 0 at its start.
        nbytes: Bytes that the rank wrote, at the end of a save or export, and of the phase ``writing`` of a save; bytes
            of the tensors that it loaded, at the end of a load; bytes that are done, of ``progress``; else 0.
        strategy: ``(backend, version)`` and class of the strategy; ``""`` before it is chosen.
        error: Text of the failure.
        error_type: Class of the failure: ``StorageError``.
        failed_phase: The phase in which an operation failed, at its failure; ``""`` if in none.
        total: Of ``progress``: bytes that are to be done, of saves and migrations a forecast, which ``nbytes`` never
            exceed; else 0.
        blocked: Seconds that the caller waited, at the end of an operation: of a background save without ``writing``.
            The waits for plugins that are told of its events count, too, except for the time that they take for this
            event.
        number: The operation's number in this process, from 1, by which its events belong together: several operations
            may be about one directory. 0 if it belongs to no operation.

    A save or load that fails before it begins, as one that cannot list the folder, has a start and a failure all the
    same; its ``directory`` is the caller's argument, or the folder of a manager.
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
    error_type: str = ""
    failed_phase: str = ""
    total: int = 0
    blocked: float = 0.0
    number: int = 0


@hookspec
def shardckpt_register(registry: StrategyRegistry) -> None:
    """Add strategies and migrations to the registry.

    It is called once, when the plugin is imported. If it raises, nothing of the plugin is registered, and the plugin
    is listed as broken.

    Example:
        ::

            @shardckpt.hookimpl
            def shardckpt_register(registry):
                registry.add(SaveJson)  # classes that are imported already
                registry.add(LoadJson)
                registry.add_lazy("npy", 1, save="my_npy.save:Save", load="my_npy.load:Load")  # imported at first use

    Args:
        registry: The registry from which ``save`` and ``load`` choose their strategies.

    Raises:
        DuplicateStrategyError: another plugin has registered the same backend and version.
    """


@hookspec
def shardckpt_event(event: Event) -> None:
    """Observe an operation: for metrics, traces and progress bars.

    It is called on every rank, at the start and at the end of every operation and phase. It must be quick, since the
    operation waits for it, and must not call collectives. An error that it raises is logged and fails nothing.

    Example:
        ::

            @shardckpt.hookimpl
            def shardckpt_event(event):
                if event.operation == "save" and event.phase == "" and event.state == "end":
                    metrics.record("checkpoint_seconds", event.seconds, rank=event.rank)

    Args:
        event: The event.
    """


@hookspec(firstresult=True)
def shardckpt_filesystem(url: str, options: dict[str, str]) -> RemoteFolder | None:
    """Return the folder of an object store at a URL, or None to leave the URL to another plugin.

    It is called in every process that opens the URL. ``shardckpt/storage/README.md`` explains a store of your own.

    Example:
        ::

            @shardckpt.hookimpl
            def shardckpt_filesystem(url):
                return MyFolder(url) if url.startswith("mystore://") else None

    Args:
        url: The URL of a checkpoint, or of the folder that has it, its scheme in lower case, no slash at its end.
        options: The options in the file of ``SHARDCKPT_STORES`` for the URL's bucket: endpoint, keys and others, by the
            names that the plugin gives them. A hook that has no options leaves the argument out.

    Returns:
        A :class:`shardckpt.storage.RemoteFolder`: the objects directly below the URL; it need not exist yet. None if
        this plugin does not serve the URL.
    """


@hookspec(firstresult=True)
def shardckpt_key_mapping(model_type: str) -> KeyMapping | None:
    """Return how the tensors of a model are named and split in a Hugging Face folder, or None to leave it to others.

    The mapping serves export and import. The built-in mappings are asked after all plugins.

    Example:
        ::

            @shardckpt.hookimpl
            def shardckpt_key_mapping(model_type):
                if model_type == "my_model":
                    return RuleMapping([Rule("layers.{layer}.norm", ("model.layers.{layer}.input_layernorm.weight",))])

    Args:
        model_type: The ``model_type`` of the model's ``config.json``.

    Returns:
        A :class:`shardckpt.plugins.KeyMapping`, perhaps with the abilities of :class:`shardckpt.plugins.UsesConfig`,
        :class:`shardckpt.plugins.KnowsKeys` and :class:`shardckpt.plugins.MapsPart`, for instance a
        ``shardckpt.huggingface.RuleMapping`` of patterns of names; None if this plugin does not know the model.
    """


@hookspec
def shardckpt_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add verbs to the ``shardckpt`` command.

    Example:
        ::

            @shardckpt.hookimpl
            def shardckpt_commands(subparsers):
                parser = subparsers.add_parser("count", help="count the tensors of a checkpoint")
                parser.add_argument("directory")
                parser.set_defaults(run=run)  # run(options) prints, and returns the exit code; or it returns
                # a shardckpt.cli.Output, which shardckpt.cli.add_json(parser) lets --json print

    Args:
        subparsers: argparse's subparsers of the command.
    """
