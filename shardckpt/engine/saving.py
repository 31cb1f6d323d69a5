"""A save, from the caller's state dict to a committed directory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.engine.amounts import format_bytes
from shardckpt.engine.operation import Operation
from shardckpt.engine.plan_cache import CachingSaveStrategy, look_up_plan
from shardckpt.engine.space import NO_FORECAST, UNLIMITED, Forecast, Room, count_bytes
from shardckpt.engine.transaction import CheckpointHeader, Transaction
from shardckpt.errors import (
    CheckpointingException,
    NotEnoughSpaceError,
    ShardingError,
    UnknownBackendError,
    ask_nearest,
    format_many,
    listed,
)
from shardckpt.manifest.names import Lineage
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.plugins.entries import StrategyAction, check_key, get_strategy_key
from shardckpt.plugins.origin import describe_strategy
from shardckpt.plugins.registry import parse_key
from shardckpt.state_dict import format_path, list_nested_values, nested_items, split_state_dict, validated_copy
from shardckpt.strategy import AsyncSaveStrategy, SaveContext, SaveStrategy
from shardckpt.validation.completeness import GivenShards
from shardckpt.validation.keys import compare_common
from shardckpt.validation.replicas import choose_main_replicas, find_replicas
from shardckpt.validation.sharding import describe_shards, validate_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from shardckpt.distributed.comm import Comm
    from shardckpt.engine.plan_cache import PlanLookup
    from shardckpt.mapping.base import CommonStateDict, ShardedBase, ShardedStateDict
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.writer import CheckpointWriter

logger = logging.getLogger(__name__)

#: Tensors of the common state of so many bytes are hardly settings: a save says so.
_LARGE = 1 << 20


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save; see :func:`shardckpt.dist_checkpointing.save`.

    Attributes:
        validate: Whether to check the shards of all ranks, and compare their common state.
        overwrite: Whether to replace a checkpoint, or other files, at the target.
        content_metadata: Anything that describes the content.
        preprocess_common: Removes the values of the common state that may differ between ranks.
        allow_globals: Classes and functions that pickles may name.
        sha256: Whether to write ``integrity.json``.
        lineage: The checkpoint that the job was resumed from, and the step.
        fingerprints: Whether to store fingerprints of the tensors.
        memory_budget: Bytes that a rank may hold at a time in addition to the tensors; None: as many as are fast.
        before: A function that each rank calls first, in phases of the operation that it gets.
        room: The limits of the space of the save.
    """

    validate: bool = True
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    preprocess_common: Callable[[CommonStateDict], CommonStateDict] | None = None
    allow_globals: tuple[Any, ...] = ()
    sha256: bool = False
    lineage: Lineage = field(default_factory=Lineage)
    fingerprints: bool = False
    memory_budget: int | None = None
    before: Callable[[Operation], None] = lambda _: None
    room: Room = UNLIMITED


@dataclass(frozen=True)
class CheckedState:
    """A state dict that is split into shards and common state, and checked across ranks.

    Attributes:
        saver: The strategy; wrapped with the plan cache if its plans are cached.
        header: The checkpoint's header.
        common: The state that is not sharded.
        given: The shards that the strategy is given, to compare with those that it stores.
        lookup: The result of the cache lookup; once the save is planned, it has the plan if that is cached.
        nbytes: The bytes of the tensors that this rank stores.
        forecast: The forecast of the space: empty if the strategy may write less than the tensors have.
    """

    saver: SaveStrategy
    header: CheckpointHeader
    shards: list[ShardedBase]
    common: CommonStateDict
    given: GivenShards
    lookup: PlanLookup
    nbytes: int
    forecast: Forecast

    def begin(self, operation: Operation, target: Path, options: SaveOptions) -> Transaction:
        """Collective: begin its save."""
        return Transaction(
            operation,
            target,
            self.header,
            overwrite=options.overwrite,
            sha256=options.sha256,
            fingerprints=options.fingerprints,
            forecast=self.forecast,
            room=options.room,
            memory_budget=options.memory_budget,
            given=bool(self.shards or self.common),
        )


def save_checkpoint(
    sharded_state_dict: ShardedStateDict,
    target: Path,
    strategy: Any,
    comm: Comm,
    plugins: PluginManager,
    options: SaveOptions,
) -> None:
    """Collective: save a state dict, and commit it; see :func:`shardckpt.dist_checkpointing.save`."""
    operation = Operation("save", target, comm, plugins)
    with operation.open_span():
        state = check_state(sharded_state_dict, strategy, operation, options)

        def write(writer: CheckpointWriter, save_id: str) -> None:
            context = SaveContext(
                writer=writer,
                comm=comm,
                save_id=save_id,
                allow_globals=options.allow_globals,
                staging=writer.directory,
                lineage=options.lineage,
                is_streamed=writer.is_streamed,
            )
            state.saver.save(state.shards, state.common, context)
            state.given.compare(writer.shards, comm)

        for is_first in (True, False):
            operation.start_progress(lambda: state.nbytes)
            try:
                with comm.collective_phase(operation.kind):  # every rank gets the error, and tries once more or not
                    state.begin(operation, target, options).run(write, options.content_metadata)
                break
            except NotEnoughSpaceError as error:
                if not (is_first and options.room.free_for_retry(error, target)):
                    raise
                if comm.is_main:
                    logger.warning("the save to %s begins anew, now that there is more space: %s", target, error)
    operation.close_span()


def check_state(
    sharded_state_dict: ShardedStateDict,
    strategy: Any,
    operation: Operation,
    options: SaveOptions,
    *,
    background: bool = False,
) -> CheckedState:
    """Collective: split a state dict, which is not changed, into shards and common state, and check them.

    If the ranks' arguments differ, or the shards are not valid, all ranks raise.
    """
    comm = operation.comm
    options.before(operation)
    with operation.local_phase("preparing the state dict"):
        saver = find_saver(strategy, operation.plugins)
        operation.set_strategy(saver)
        if options.fingerprints and not saver.computes_fingerprints:
            raise CheckpointingException(
                f"fingerprints=True: {describe_strategy(saver, operation.plugins)} computes none while it saves; save "
                "without, and compare values by open_checkpoint(path).compute_fingerprints(), which reads them"
            )
        nested, common = split_state_dict(sharded_state_dict, plain_objects=saver.stores_plain_objects)
        shards = list_nested_values(nested)
        if not saver.supports_objects:
            refuse_objects(shards, saver, operation.plugins)
        if comm.is_main:
            _warn_of_tensors(common)
        if options.content_metadata is not None:
            _store_content(common, options.content_metadata, comm)
        lookup = look_up_plan(shards, saver, comm, validate=options.validate)
        # One message asks both: did all ranks find the same plan, and do they call with the same arguments? Ranks with
        # different classes would call different collectives.
        is_cached = comm.agree(
            lookup.save_id,
            strategy=(saver.backend, saver.version),
            strategy_class=f"{type(saver).__module__}.{type(saver).__qualname__}",
            async_sharded_save=background,
            checkpoint_dir=str(operation.directory),
            validate_access_integrity=options.validate,
            overwrite=options.overwrite,
            verify_integrity=options.sha256,
            parent=options.lineage.parent,
            step=options.lineage.step,
            fingerprints=options.fingerprints,
            # with the class, so that no option has the name of an argument above
            **{f"{name} of {type(saver).__qualname__}": value for name, value in saver.agreed_options.items()},
        )
        if not is_cached:  # some rank has no plan, or another one
            lookup.cached = None
        cached = lookup.cached
        if cached is None:  # copies, so that no change to a description reaches the caller
            shards = list(map(validated_copy, shards))
        replicas = find_replicas(shards, comm) if cached is None else cached.replicas
        # also with a cached plan: that says which ranks have copies, not whether their values are still equal
        shards = choose_main_replicas(shards, comm, compare=options.validate, replicas=replicas)
    with comm.local_phase("describing shards"):
        given = GivenShards(describe_shards(shards), saver) if cached is None else cached.given
        nbytes = count_bytes(shards) if cached is None else cached.nbytes
    if options.validate:
        with operation.local_phase("validating"):
            if cached is None:
                validate_shards(shards, comm, given.columns, state=sharded_state_dict)
            # the common state is no part of a plan: it is compared in every save
            compare_common(common, options.preprocess_common, comm)
    forecast = Forecast(nbytes, shards) if saver.stores_all_bytes else NO_FORECAST
    header = CheckpointHeader(saver.backend, saver.version, saver.reader, options.lineage)
    if lookup.key is not None and isinstance(saver, AsyncSaveStrategy):
        saver = CachingSaveStrategy(saver, lookup, replicas, given, options.validate, nbytes)
    return CheckedState(saver, header, shards, common, given, lookup, nbytes, forecast)


def refuse_objects(shards: Sequence[ShardedBase], saver: SaveStrategy, plugins: PluginManager) -> None:
    """Raise an error that names the objects: the strategy says that it stores none, and would leave them out."""
    found = sorted({shard.key for shard in shards if isinstance(shard, ShardedObject)})
    if found:
        raise ShardingError(
            f"{describe_strategy(saver, plugins)} stores no ShardedObjects (supports_objects is False), and the state "
            f"dict has {len(found)}: {listed(found, limit=5)}; nothing was written: leave them out, let the strategy "
            "store them and set supports_objects = True, or save by another strategy (`shardckpt strategies` lists "
            "those there are)"
        )


def _warn_of_tensors(common: CommonStateDict) -> None:
    """Say if the common state has large tensors: it is for settings, and whoever passed them may want them filled."""
    tensors = [(path, leaf) for path, leaf in nested_items(common) if isinstance(leaf, torch.Tensor)]
    found = [(path, leaf) for path, leaf in tensors if leaf.layout is torch.strided]  # no others have nbytes
    nbytes = sum(leaf.nbytes for _, leaf in found)
    if nbytes >= _LARGE:
        largest = sorted(found, key=lambda each: -each[1].nbytes)
        logger.warning(
            "no shard describes %s of %s, in the common state then: the main rank stores its own, each rank of each "
            "load reads all of it, and no load fills live tensors: %s; describe them: save("
            "to_sharded_state_dict(...), ...) of shardckpt.adapters",
            format_many(len(found), "tensor"),
            format_bytes(nbytes),
            listed([format_path(path) for path, _ in largest], limit=5),
        )


def _store_content(common: CommonStateDict, content: Any, comm: Comm) -> None:
    """Put the caller's ``content_metadata`` into the common state; warn if it takes the place of another."""
    # a loaded state dict has the content_metadata of its checkpoint
    before = common.get("content_metadata", content)
    if comm.is_main and repr(before) != repr(content):
        logger.warning(
            "the state dict's own content_metadata is not stored: content_metadata= is, in place of %.200r",
            before,
        )
    common["content_metadata"] = content


def find_saver(strategy: Any, plugins: PluginManager, others: Collection[str] = ()) -> SaveStrategy:
    """Return the save strategy that a caller names.

    That is a SaveStrategy, which is returned; a backend, whose newest version is chosen; (backend, version); or None
    for the registry's default. If no installed strategy saves the format, it is an UnknownBackendError, which also
    names ``others``: formats that the caller takes, too. A SaveStrategy that names no backend or version, or such as no
    strategy can have, is a PluginError.
    """
    if isinstance(strategy, SaveStrategy):
        check_key(*get_strategy_key(strategy))
        return strategy
    backend, version = plugins.find_default() if strategy is None else parse_key(strategy)
    for entry in plugins.registry.entries(StrategyAction.SAVE_SHARDED, backend):
        if version in (None, entry.version):
            return entry.create()  # type: ignore[no-any-return]
    if own := plugins.registry.entries(StrategyAction.SAVE_SHARDED, backend):
        there = listed([f"version {entry.version} ({entry.distribution})" for entry in own])
        raise UnknownBackendError(
            f"no strategy saves version {version} of {backend!r}: installed is {there}; another release may have more"
            f"{plugins.faults_text()}"
        )
    entries = plugins.registry.entries(StrategyAction.SAVE_SHARDED)
    names = ", ".join([f"{entry.backend} {entry.version}" for entry in entries] + [*others]) or "none"
    if near := ask_nearest(backend, {*(entry.backend for entry in entries), *others} - {backend}):
        raise UnknownBackendError(
            f"no installed strategy saves {strategy!r} ({near}installed: {names}){plugins.faults_text()}"
        )
    advice = "If a plugin brings it, install its distribution on every rank, or name it in SHARDCKPT_PLUGINS"
    if plugins.registry.entries(StrategyAction.LOAD_SHARDED, backend):
        advice = f"{backend} is read, and not written"
    raise UnknownBackendError(
        f"no installed strategy saves {strategy!r}; installed: {names}. {advice}{plugins.faults_text()}"
    )
