"""A save, from the caller's state dict to a committed directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.engine.operation import Operation
from shardckpt.engine.plan_cache import recall
from shardckpt.engine.transaction import Identity, commit_files
from shardckpt.errors import UnknownBackendError
from shardckpt.plugins import StrategyAction, parse_key
from shardckpt.state_dict import checked_copy, nested_values, take_apart
from shardckpt.strategy import AsyncSaveStrategy, SaveContext, SaveStrategy, write_prepared
from shardckpt.validation import (
    GivenShards,
    compare_common,
    describe_shards,
    find_replicas,
    settle_replicas,
    validate_shards,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.distributed import Comm
    from shardckpt.engine.plan_cache import Remembered, Sighting
    from shardckpt.mapping import CommonStateDict, ShardedBase, ShardedStateDict
    from shardckpt.plugins import PluginHost
    from shardckpt.storage import CheckpointWriter
    from shardckpt.strategy import PlanContext, PreparedSave
    from shardckpt.validation import Replicas


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved; see :func:`shardckpt.dist_checkpointing.save`."""

    validate: bool = True
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    preprocess_common: Callable[[CommonStateDict], CommonStateDict] | None = None
    allow_globals: tuple[Any, ...] = ()
    sha256: bool = False


@dataclass(frozen=True)
class CheckedState:
    """What is to be saved, by whom: taken apart, and checked across ranks.

    Attributes:
        saver: The strategy.
        shards: This rank's.
        common: The state that is not sharded.
        given: The shards, to be compared with what the strategy stores.
        sighting: Whether all ranks have saved these shards before.
        replicas: Who has which of the replicated shards.
    """

    saver: SaveStrategy
    shards: list[ShardedBase]
    common: CommonStateDict
    given: GivenShards
    sighting: Sighting
    replicas: Replicas

    @property
    def identity(self) -> Identity:
        """What the checkpoint will say of itself."""
        return Identity(self.saver.backend, self.saver.version, self.saver.reader)


def save_checkpoint(
    sharded_state_dict: ShardedStateDict,
    target: Path,
    strategy: Any,
    comm: Comm,
    host: PluginHost,
    options: SaveOptions,
) -> None:
    """Save; see :func:`shardckpt.dist_checkpointing.save` for the arguments."""
    operation = Operation("save", target, comm, host)
    with operation.whole():
        state = check_state(sharded_state_dict, strategy, operation, options)

        def write(writer: CheckpointWriter, save_id: str) -> None:
            context = SaveContext(
                writer=writer,
                comm=comm,
                save_id=save_id,
                allow_globals=options.allow_globals,
                staging=writer.directory,
            )
            if isinstance(state.saver, AsyncSaveStrategy) and state.sighting.who is not None:
                prepared, _ = prepare_save(state, state.saver, context, validated=options.validate)
                write_prepared(prepared, context)
            else:
                state.saver.save(state.shards, state.common, context)
            state.given.compare(writer.shards, comm)

        commit_files(
            operation,
            target,
            state.identity,
            write,
            overwrite=options.overwrite,
            sha256=options.sha256,
            content=options.content_metadata,
        )


def check_state(
    sharded_state_dict: ShardedStateDict,
    strategy: Any,
    operation: Operation,
    options: SaveOptions,
    *,
    background: bool = False,
) -> CheckedState:
    """Take the state dict apart and check it, on all ranks together.

    Args:
        sharded_state_dict: What is to be saved.
        strategy: Whatever names one.
        operation: The save.
        options: The caller's.
        background: Whether it is to be saved in the background.
    """
    comm = operation.comm
    with operation.step("preparing the state dict"):
        saver = find_saver(strategy, operation.host)
        operation.dispatched(saver)
        nest, common = take_apart(sharded_state_dict)
        shards = list(nested_values(nest))
        if options.content_metadata is not None:
            common["content_metadata"] = options.content_metadata
        sighting = recall.look(shards, saver, comm, validate=options.validate, background=background)
        is_known = comm.agree(
            sighting.mark(),
            strategy=(saver.backend, saver.version),
            strategy_class=f"{type(saver).__module__}.{type(saver).__qualname__}",
            async_sharded_save=background,
            checkpoint_dir=str(operation.directory),
            validate_access_integrity=options.validate,
            overwrite=options.overwrite,
            verify_integrity=options.sha256,
        )
        known = sighting.known if is_known else None
        if known is None:  # what is done to copies never reaches the caller's
            shards = list(map(checked_copy, shards))
        replicas = find_replicas(shards, comm) if known is None else known.replicas
        shards = settle_replicas(shards, comm, compare=options.validate, replicas=replicas)
    with comm.task("describing shards"):
        given = GivenShards(describe_shards(shards), saver) if known is None else known.given
    if options.validate:
        with operation.step("validating"):
            if known is None:
                validate_shards(shards, comm, given.described)
            compare_common(common, options.preprocess_common, comm)
    return CheckedState(saver, shards, common, given, sighting._replace(known=known), replicas)


def prepare_save(
    state: CheckedState, saver: AsyncSaveStrategy, context: PlanContext, *, validated: bool
) -> tuple[PreparedSave, Remembered | None]:
    """A save that is planned, by the plan of an earlier one if there is one; and what is remembered of it.

    Args:
        state: What is to be saved.
        saver: Its strategy.
        context: With whom.
        validated: Whether the shards of all ranks were found to fit together.
    """
    shards, known = state.shards, state.sighting.known
    if known is not None:
        prepared = known.again(shards, state.common, context)
        if prepared is not None:
            return prepared, known
        shards = list(map(checked_copy, shards))  # the strategy's to keep
    prepared = saver.prepare(shards, state.common, context)
    kept = recall.keep(
        state.sighting, context.save_id, prepared.again, state.replicas, state.given, validated=validated
    )
    return prepared, kept


def find_saver(strategy: Any, host: PluginHost) -> SaveStrategy:
    """The save strategy that a caller means: an instance, a backend (its newest), (backend, version), or the default.

    Raises:
        UnknownBackendError: nothing installed writes it.
    """
    if isinstance(strategy, SaveStrategy):
        return strategy
    backend, version = host.registry.default if strategy is None else parse_key(strategy)
    for entry in host.registry.entries(StrategyAction.SAVE_SHARDED, backend):
        if version in (None, entry.version):
            return entry.create()  # type: ignore[no-any-return]
    known = ", ".join(f"{e.backend} {e.version}" for e in host.registry.entries(StrategyAction.SAVE_SHARDED)) or "none"
    raise UnknownBackendError(f"no installed strategy saves {strategy!r}; installed: {known}{host.faults_text()}")


__all__ = ["CheckedState", "SaveOptions", "check_state", "find_saver", "prepare_save", "save_checkpoint"]
