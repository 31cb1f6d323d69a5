"""Open a checkpoint: its manifest, the strategy that reads it, and its files."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from shardckpt.engine.load_results import check_buildable, check_columns, check_common, check_index, check_values
from shardckpt.engine.locations import locate
from shardckpt.engine.operation import Operation
from shardckpt.errors import CheckpointingException
from shardckpt.manifest.names import Rescue
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.resolver import CALLER, Accept, choose_reader, hold_checkpoint, hold_same
from shardckpt.storage.directory import is_read_again, retry_if_replaced
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import (
    BuildsObjects,
    LoadContext,
    LoadStrategy,
    ReadsPlainObjects,
    StoredColumns,
    lists_columns,
)
from shardckpt.tensors.wrappers import fill
from shardckpt.validation.keys import stored_key

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.distributed.comm import Comm
    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.mapping.sharded_object import PlainObject
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.reader import Crcs

_T = TypeVar("_T")
#: The name of an unreadable common state in lists of damaged items.
COMMON_STATE = "common state"


@runtime_checkable
class _NotesRescue(Protocol):
    """A load strategy of checkpoints without a record, which notes the items that a rescue has left out."""

    rescue: Rescue


@dataclass(frozen=True)
class LoadOptions:
    """Options for opening a checkpoint; see :func:`shardckpt.dist_checkpointing.load`.

    Attributes:
        strategy: A LoadStrategy, a backend, or (backend, version); None: as the checkpoint says.
        accept: The backends and versions that the caller accepts; None: all.
        accept_of: Where that is given, for errors.
        allow_globals: Classes and functions that legacy pickles may name.
        memory_budget: Bytes that reading may hold at a time in addition to the tensors; None: as many as are fast.
        crcs: As for :class:`~shardckpt.storage.CheckpointReader`: ``parts`` if the bytes are written to a new
            checkpoint.
    """

    strategy: Any = None
    accept: Accept | None = None
    accept_of: str = field(default=CALLER, kw_only=True)
    allow_globals: tuple[Any, ...] = ()
    memory_budget: int | None = None
    crcs: Crcs | None = None


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is open, with the strategy that reads it.

    The methods are collective if :func:`open_checkpoint` was: then all ranks call them, except the methods for
    PlainObjects.

    Attributes:
        strategy: Reads the checkpoint.
        context: Its files, and the ranks.
        operation: Reports the phases.
        fully_parallel: Whether the strategy shares the reading among the ranks.
        names: Prefixes of stored keys, each with the prefix that replaces it; see
            :func:`~shardckpt.engine.rename_stored`.
        damaged: Names of tensors and objects that cannot be read, and so are not in the index; with
            :data:`COMMON_STATE`, the common state is empty. See :func:`~shardckpt.engine.hide_damaged`.
        has_own_keys: Whether the strategy of each rank lists other keys.
    """

    strategy: LoadStrategy
    context: LoadContext
    operation: Operation
    fully_parallel: bool = field(default=False, kw_only=True)
    names: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    damaged: Collection[str] = field(default=(), kw_only=True)
    has_own_keys: bool = field(default=False, kw_only=True)

    @property
    def rescue(self) -> Rescue:
        """The keys that a rescue left out when it wrote this checkpoint; none if no rescue wrote it."""
        record = self.context.reader.manifest.record
        if record is not None:
            return Rescue.from_content(record.content_metadata)
        return self.strategy.rescue if isinstance(self.strategy, _NotesRescue) else Rescue()

    def common(self) -> StateDict:
        """Collective: return the state that is not sharded."""
        if COMMON_STATE in self.damaged:
            return {}
        with self.operation.local_phase("loading the common state"):
            common = self.strategy.load_common(self.context)
            checked = check_common(self.strategy, common, self.operation.plugins)
        return checked

    def index(self) -> list[ShardedBase]:
        """Collective: return descriptions of all stored tensors and objects, without data; callers share the list."""
        return self._index

    @cached_property
    def _index(self) -> list[ShardedBase]:
        # kept: a CheckpointManager asks three times, and a large checkpoint has a million of them
        with self.operation.local_phase("reading the index"):
            index = self.strategy.load_index(self.context)
            checked = check_index(self.strategy, index, self.operation.plugins)
        damaged = frozenset(self.damaged)  # a lost file may have most names of a large checkpoint
        return [shard for shard in checked if stored_key(shard) not in damaged] if damaged else checked

    def columns(self) -> StoredColumns:
        """Collective: return the same in columns; a strategy that :class:`ListsColumns` makes no object for them.

        If a checkpoint has no record and the ranks have read different keys, they raise CheckpointReplacedError: the
        number of keys decides the payload of later collectives. Records were compared before.
        """
        columns = self._columns
        is_exempt = self.has_own_keys or self.context.reader.manifest.record is not None or "_has_agreed" in vars(self)
        if not is_exempt and self.context.comm.world_size > 1:
            # not in _columns: until Python 3.12 a cached property has one lock for all ranks that are threads
            vars(self)["_has_agreed"] = True
            keys = sorted(map(repr, (*columns.keys, *columns.objects, *columns.values)))
            self.context.require_same_save("\n".join(keys).encode(), "index")
        return columns

    @cached_property
    def _columns(self) -> StoredColumns:
        strategy = self.strategy
        if lists_columns(strategy) and not self.damaged:
            with self.operation.local_phase("reading the index"):
                columns = strategy.list_columns(self.context)
                checked = check_columns(self.strategy, columns, self.operation.plugins)
            return checked
        index = self.index()
        return StoredColumns.from_shards(
            [shard for shard in index if isinstance(shard, ShardedTensor)],
            [shard for shard in index if isinstance(shard, ShardedObject)],
        )

    def list_plain_objects(self) -> list[str]:
        """Return the keys of the PlainObjects; none if the common state has their values as well."""
        return self.strategy.list_plain_objects(self.context) if isinstance(self.strategy, ReadsPlainObjects) else []

    def read_plain_objects(self) -> list[PlainObject]:
        """Return the PlainObjects with their values."""
        return self.strategy.read_plain_objects(self.context) if isinstance(self.strategy, ReadsPlainObjects) else []

    def find_buildable(self, absent: Sequence[ShardedObject]) -> set[str]:
        """Return the unique keys of objects that are not stored, but that the strategy can build."""
        if not absent or not isinstance(self.strategy, BuildsObjects):
            return set()
        found = check_buildable(
            self.strategy, absent, self.strategy.can_build(absent, self.context), self.operation.plugins
        )
        return {shard.unique_key for shard, is_built in zip(absent, found, strict=True) if is_built}

    def values(self, wanted: list[ShardedBase], *, is_synced: bool = False) -> list[Any]:
        """Collective: return the values of shards, in order; where a shard has data, that is filled and returned.

        A value is a tensor of the shard's ``data_shape``, or an object. If a rank has failed, all raise, and a failure
        before the reading leaves the data as it is. ``is_synced``: the ranks have just called another collective, so
        that no rank has failed.
        """
        # nothing is filled if a rank has failed so far: the caller's tensors stay as they are
        if not is_synced:
            self.context.comm.sync_errors()
        with self.operation.local_phase("reading shards"):
            values = self.strategy.load(wanted, self.context)
            # all of them before the first is copied
            values = check_values(self.strategy, wanted, values, self.operation.plugins, self._find_dtypes)
            delivered = [_deliver(shard, value) for shard, value in zip(wanted, values, strict=True)]
            # other objects may have an attribute of that name, which means anything
            nbytes = sum(value.nbytes for value in delivered if isinstance(value, torch.Tensor))
            self.operation.add_nbytes(nbytes)
            if self.operation.count is not None:
                self.operation.count(nbytes)
        return delivered

    def _find_dtypes(self) -> dict[str, torch.dtype]:
        """Return the stored dtypes by key; empty if the index was not read, which is collective."""
        if "_columns" in vars(self):
            return dict(zip(self._columns.keys, self._columns.dtypes, strict=True))
        index: list[ShardedBase] = vars(self).get("_index", [])
        return {shard.key: shard.dtype for shard in index if isinstance(shard, ShardedTensor)}


@contextmanager
def open_checkpoint(
    directory: Path, comm: Comm, plugins: PluginManager, options: LoadOptions, *, check: bool = True
) -> Iterator[OpenCheckpoint]:
    """Collective: read the manifest, choose the strategy and open the files; all that ranks read is of one save.

    The directory is as :func:`shardckpt.engine.locate` returned it. The checkpoint is closed at the end of the block.
    The end of the block raises a CheckpointReplacedError if the bytes may be of two saves;
    :func:`~shardckpt.storage.directory.retry_if_replaced` starts over. A caller that commits in the block asks the
    reader before it does, and passes ``check=False``, since after that nothing is lost. If no installed strategy reads
    the checkpoint, or the options refuse it, it is a CannotLoadError.
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
            if not comm.is_main:  # since the main rank has read the manifest, another save may have replaced the files
                place = hold_same(directory, manifest, plugins)
            strategy = choose_reader(directory, manifest, plugins, options.strategy, options.accept, options.accept_of)
            operation.set_strategy(strategy)
            reader = CheckpointReader(place, manifest, memory_budget=options.memory_budget, crcs=options.crcs)
        with reader:
            # An open file can be read after its checkpoint is replaced. In a second attempt the next save may come as
            # soon as the last one did, so all files are opened first; the first attempt saves the time.
            if is_read_again():
                with operation.local_phase("opening the files"):
                    reader.open_files([] if manifest.record is None else [f.name for f in manifest.record.files])
            yield OpenCheckpoint(strategy, LoadContext(reader, comm, options.allow_globals), operation)
            if check:
                reader.check_unchanged()


@contextmanager
def lend_checkpoint(opened: AbstractContextManager[_T]) -> Iterator[_T]:
    """Open a checkpoint for a block of the caller's, whose own exceptions leave it as they are.

    ``opened`` turns any exception in its block into one that all ranks raise.
    """
    own: Exception | None = None
    try:
        with opened as checkpoint:
            try:
                yield checkpoint
            except Exception as exc:
                own = exc
                raise
    except CheckpointingException:
        if own is None or isinstance(own, CheckpointingException):
            raise
    if own is not None:
        raise own


def read_checkpoint(
    path: str | os.PathLike[str],
    comm: Comm,
    plugins: PluginManager,
    options: LoadOptions,
    read: Callable[[OpenCheckpoint], _T],
) -> _T:
    """Collective: open a checkpoint and read from it; where another save replaces it meanwhile, open it again.

    Returns the result of ``read``, all of it from one save. Links in the path are resolved in each attempt, since they
    may have changed. If other saves replaced it in every attempt, it is a CheckpointReplacedError.
    """

    def attempt() -> _T:
        with open_checkpoint(locate(path, plugins), comm, plugins, options) as checkpoint:
            return read(checkpoint)

    return retry_if_replaced(attempt, path)


def _deliver(shard: ShardedBase, value: Any) -> Any:
    """Return the loaded value, in the caller's own tensor if there is one."""
    if not isinstance(shard, ShardedTensor):
        return value
    if shard.data is None or value is shard.data:
        return value
    fill(shard.key, shard.data, value)
    return shard.data
