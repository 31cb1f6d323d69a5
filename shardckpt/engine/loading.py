"""A load, from a directory to a state dict with the structure that the caller asks for; and opening a checkpoint."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardckpt.engine.integrity import verify_integrity
from shardckpt.engine.load_template import MISSING, LoadTemplate
from shardckpt.engine.locations import locate
from shardckpt.engine.operation import Operation
from shardckpt.errors import PluginError, ShardingError, listed
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Casts, check_dtypes, check_shapes, describe_casts, is_exact
from shardckpt.plugins import Accept, choose_reader, hold_checkpoint, hold_same
from shardckpt.storage import CheckpointReader, is_read_again, retry_if_replaced
from shardckpt.strategy import LoadContext, LoadStrategy
from shardckpt.tensors import fill
from shardckpt.validation import (
    KeyMismatch,
    StrictHandling,
    choose_main_replicas,
    compare_keys,
    stored_key,
    validate_shards,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardckpt.distributed import Comm
    from shardckpt.manifest import Manifest
    from shardckpt.mapping import ShardedBase, ShardedStateDict, StateDict
    from shardckpt.plugins import PluginManager

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is opened; see :func:`shardckpt.dist_checkpointing.load`.

    Attributes:
        strategy: A LoadStrategy, a backend, or (backend, version); None: as the checkpoint says.
        accept: The backends and versions that the caller accepts; None: all.
        allow_globals: Classes and functions that legacy pickles may name.
    """

    strategy: Any = None
    accept: Accept | None = None
    allow_globals: tuple[Any, ...] = ()


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is open, with the strategy that reads it.

    The methods are collective if :func:`open_checkpoint` was: then all ranks call them.

    Attributes:
        strategy: Reads the checkpoint.
        context: Its files, and the ranks.
        operation: Reports the phases.
    """

    strategy: LoadStrategy
    context: LoadContext
    operation: Operation

    def common(self) -> StateDict:
        """Collective: return the state that is not sharded."""
        with self.operation.local_phase("loading the common state"):
            common = self.strategy.load_common(self.context)
        return common

    def index(self) -> list[ShardedBase]:
        """Collective: return descriptions of all stored tensors and objects, without data."""
        with self.operation.local_phase("reading the index"):
            index = self.strategy.load_index(self.context)
        return index

    def values(self, wanted: list[ShardedBase]) -> list[Any]:
        """Collective: return the values of shards; where a shard has data, that is filled and returned.

        Args:
            wanted: Shards of stored keys, none or many.

        Returns:
            One value per shard, in order: a tensor of its ``data_shape``, or an object.

        Raises:
            CheckpointingException: on every rank, if any failed.
        """
        # nothing is filled if a rank has failed so far: the caller's tensors stay as they are
        self.context.comm.sync_errors()
        with self.operation.local_phase("loading shards"):
            values = self.strategy.load(wanted, self.context)
            delivered = [_deliver(shard, value) for shard, value in zip(wanted, values, strict=True)]
        return delivered


@contextmanager
def open_checkpoint(
    directory: Path, comm: Comm, plugins: PluginManager, options: LoadOptions
) -> Iterator[OpenCheckpoint]:
    """Collective: read the manifest, choose the strategy and open the files; all that ranks read is of one save.

    Args:
        directory: The checkpoint, as :func:`shardckpt.engine.locate` returned it.
        comm: The ranks that read.
        plugins: The plugin manager.
        options: How it is opened.

    Yields:
        The open checkpoint; it is closed at the end of the block.

    Raises:
        CannotLoadError: no installed strategy reads it, or ``options`` refuses it.
        CheckpointReplacedError: another save has replaced it before all was read;
            :func:`~shardckpt.storage.directory.retry_if_replaced` starts over.
    """
    operation = Operation("load", directory, comm, plugins)
    with operation.collective_span():
        place = directory

        def read() -> Manifest:
            nonlocal place
            place, manifest = hold_checkpoint(directory, plugins)
            return manifest

        with operation.local_phase("reading the manifest"):
            manifest = comm.main_runs("reading the manifest", read)
        with operation.local_phase("choosing a strategy"):
            if not comm.is_main:
                place = hold_same(directory, manifest)
            strategy = choose_reader(directory, manifest, plugins, options.strategy, options.accept)
            operation.dispatched(strategy)
            reader = CheckpointReader(place, manifest)
        with reader:
            # An open file can be read after its checkpoint is replaced. In a second attempt the next save may come as
            # soon as the last one did, so all files are opened first; the first attempt saves the time.
            if is_read_again():
                with operation.local_phase("opening the files"):
                    reader.open_files([] if manifest.record is None else [f.name for f in manifest.record.files])
            yield OpenCheckpoint(strategy, LoadContext(reader, comm, options.allow_globals), operation)
            reader.check_unchanged()


def read_checkpoint(
    path: str | os.PathLike[str],
    comm: Comm,
    plugins: PluginManager,
    options: LoadOptions,
    read: Callable[[OpenCheckpoint], _T],
) -> _T:
    """Collective: open a checkpoint and read from it; where another save replaces it meanwhile, open it again.

    Args:
        path: The checkpoint, or its URL; links are resolved in each attempt, since they may have changed.
        comm: The ranks that read.
        plugins: The plugin manager.
        options: How it is opened.
        read: Called with the open checkpoint in each attempt.

    Returns:
        What ``read`` returns, all of it from one save.

    Raises:
        CheckpointReplacedError: other saves replaced it in every attempt.
    """

    def attempt() -> _T:
        with open_checkpoint(locate(path, plugins), comm, plugins, options) as checkpoint:
            return read(checkpoint)

    return retry_if_replaced(attempt, path)


def load_checkpoint(
    sharded_state_dict: ShardedStateDict,
    checkpoint: OpenCheckpoint,
    *,
    validate: bool,
    strict: StrictHandling,
    verify: bool = False,
    allow_dtype_cast: bool = False,
) -> tuple[StateDict, KeyMismatch]:
    """Collective: fill a state dict from an open checkpoint; see :func:`shardckpt.dist_checkpointing.load`.

    Everything that can be checked without data is checked before any destination is filled.

    Args:
        sharded_state_dict: This rank's.
        checkpoint: The open checkpoint.
        validate: Whether to check that the shards of all ranks cover every tensor exactly once.
        strict: What to do about keys that do not match.
        verify: Whether to read every file, and compare it with its digests, first.
        allow_dtype_cast: Whether to cast values to dtypes that cannot hold them.

    Returns:
        The loaded state dict, and the keys that do not match.

    Raises:
        CheckpointingException: the same on every rank.
    """
    comm = checkpoint.context.comm
    with checkpoint.operation.local_phase("preparing the state dict"):
        template = LoadTemplate(sharded_state_dict)
        for shard in template.shards:
            shard.validate_metadata_integrity()
            _refuse_meta(shard)
        comm.agree(
            strict=strict.value,
            validate_access_integrity=validate,
            verify_integrity=verify,
            allow_dtype_cast=allow_dtype_cast,
        )
        template.shards = choose_main_replicas(template.shards, comm, compare=False)
    if verify:
        with checkpoint.operation.local_phase("verifying the files"):
            verify_integrity(checkpoint.context.reader.place, checkpoint.context.reader.manifest, comm)
    if validate:
        with checkpoint.operation.local_phase("validating"):
            validate_shards(template.shards, comm)
    index = checkpoint.index()
    with checkpoint.operation.local_phase("comparing keys"):
        keys = frozenset(map(stored_key, index))
        left_out = template.absent(keys, stored_key)
        wanted = [shard for number, shard in enumerate(template.shards) if number not in left_out]
        mismatch = compare_keys(wanted, keys, strict, comm)
        if left_out and comm.is_main:
            _log_left_out(left_out, template.optional)
    is_absent = [
        number in left_out or (bool(mismatch.unexpected) and stored_key(shard) in mismatch.unexpected)
        for number, shard in enumerate(template.shards)
    ]
    available = [shard for shard, absent in zip(template.shards, is_absent, strict=True) if not absent]
    with checkpoint.operation.local_phase("comparing shapes"):
        stored = [shard for shard in index if isinstance(shard, ShardedTensor)]
        check_shapes(available, {shard.key: tuple(shard.global_shape) for shard in stored})
    with checkpoint.operation.local_phase("comparing dtypes"):
        dtypes = {shard.key: shard.dtype for shard in stored}
        casts = check_dtypes(available, dtypes, allow_cast=allow_dtype_cast)
        if casts and comm.is_main:
            _log_casts(casts)
    common = checkpoint.common()
    loaded = iter(checkpoint.values(available))
    with checkpoint.operation.local_phase("assembling the state dict"):
        values = [MISSING if absent else next(loaded) for absent in is_absent]
        state_dict = template.fill(values, common)
    return state_dict, mismatch


def _log_left_out(left_out: Mapping[int, str], optional: int) -> None:
    """Log one line per load: a warning only if the checkpoint has no optional entry at all."""
    level = logging.WARNING if len(left_out) == optional else logging.INFO
    names = listed(sorted(set(left_out.values())))
    logger.log(level, "left out of the result, since it did not exist when the checkpoint was saved: %s", names)


def _log_casts(casts: Casts) -> None:
    """Log one line per load: a warning only if a cast is not exact."""
    level = logging.INFO if all(is_exact(*pair) for pair in casts) else logging.WARNING
    logger.log(level, "stored tensors are cast as they are loaded: %s", describe_casts(casts))


def _refuse_meta(shard: ShardedBase) -> None:
    if isinstance(shard, ShardedTensor) and shard.data is not None and shard.data.is_meta:
        raise ShardingError(
            f"{shard.key!r}: its data is on the meta device, which cannot be filled: give it memory (to_empty), or "
            "describe it without data to get a new tensor"
        )


def _deliver(shard: ShardedBase, value: Any) -> Any:
    """Return the loaded value, in the caller's own tensor if there is one."""
    if not isinstance(shard, ShardedTensor):
        return value
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shard.data_shape:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PluginError(f"{shard.key!r}: the strategy returned {found}, not a tensor of shape {shard.data_shape}")
    if shard.data is None or value is shard.data:
        return value
    fill(shard.key, shard.data, value)
    return shard.data


__all__ = ["LoadOptions", "OpenCheckpoint", "load_checkpoint", "open_checkpoint", "read_checkpoint"]
