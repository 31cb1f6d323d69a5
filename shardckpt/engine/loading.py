"""A load, from a directory to a state dict with the structure that the caller asks for; and opening a checkpoint."""

from __future__ import annotations

import copy
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from shardckpt.engine.changed_values import describe_faults, find_suspects, request_stored_values
from shardckpt.engine.common_objects import CommonObjects
from shardckpt.engine.integrity import verify_integrity
from shardckpt.engine.load_results import check_buildable, check_columns, check_common, check_index, check_values
from shardckpt.engine.load_template import MISSING, LoadTemplate
from shardckpt.engine.locations import locate
from shardckpt.engine.operation import Operation
from shardckpt.engine.patterns import check_patterns, matches_any
from shardckpt.engine.resizing import Resizing, allow_resizing
from shardckpt.engine.twins import check_twins, find_twins
from shardckpt.errors import (
    CheckpointingException,
    KeyMismatchError,
    ShapeMismatchError,
    ShardingError,
    format_many,
    listed,
)
from shardckpt.manifest.names import Rescue
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import StoredNames
from shardckpt.planning.dtypes import Casts, check_dtypes, describe_casts, is_exact, make_changed_error
from shardckpt.planning.shapes import check_shapes
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
from shardckpt.tensors.casts import can_change_values
from shardckpt.tensors.memory import find_addresses, overlaps_itself
from shardckpt.tensors.wrappers import fill
from shardckpt.validation.descriptions import validate_descriptions
from shardckpt.validation.keys import KeyMismatch, StrictHandling, compare_keys, stored_key, use_bare_keys
from shardckpt.validation.replicas import choose_main_replicas
from shardckpt.validation.sharding import validate_shards

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.distributed.comm import Comm
    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import ShardedBase, ShardedStateDict, StateDict
    from shardckpt.mapping.sharded_object import PlainObject
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.reader import Crcs
    from shardckpt.validation.keys import OnUnused

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
#: The prefix of a model's keys when it is described together with its optimizer.
_MODEL = "model."
#: How many of several names a message has.
_FEW = 5
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
        """The keys that the rescue that has written it left out, as it says; none if it is no rescue."""
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
        return [shard for shard in checked if stored_key(shard) not in self.damaged] if self.damaged else checked

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
            nbytes = sum(getattr(value, "nbytes", 0) for value in delivered)
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


def load_checkpoint(
    sharded_state_dict: ShardedStateDict,
    checkpoint: OpenCheckpoint,
    *,
    validate: bool,
    strict: StrictHandling,
    verify: bool = False,
    allow_dtype_cast: bool = False,
    advise: bool = True,
    on_unused: OnUnused = "ignore",
    counts_unused: Callable[[str], bool] = lambda _: True,
    filled_by_twins: Collection[str] = (),
    resize: Sequence[str] = (),
) -> tuple[StateDict, KeyMismatch]:
    """Collective: fill a state dict from an open checkpoint; see :func:`shardckpt.dist_checkpointing.load`.

    Returns the loaded state dict, and the keys that do not match. Everything that can be checked without data is
    checked before any destination is filled; errors are the same on every rank.

    ``validate`` and ``verify`` are ``validate_access_integrity`` and ``verify_integrity`` there. ``advise`` says
    whether errors may name arguments of ``dist_checkpointing.load`` and of ShardedTensor: whether the user can pass
    them. ``on_unused`` is the policy for stored tensors and objects that no rank requests, if ``strict`` does not look
    for them; ``counts_unused`` returns whether a key counts as unused. ``filled_by_twins`` are keys that are not
    stored, and that share their destination with a stored key. ``resize`` has patterns of the keys of tensors that may
    have another shape than is stored.
    """
    comm = checkpoint.context.comm
    # these decide which collectives a rank calls: with different ones the ranks would wait for each other
    comm.agree(
        strict=strict.value,
        validate_access_integrity=validate,
        verify_integrity=verify,
        allow_dtype_cast=allow_dtype_cast,
        fully_parallel=checkpoint.fully_parallel,
        on_unused=on_unused,
        resize=resize,
    )
    if verify:
        with checkpoint.operation.local_phase("verifying the files"):
            verify_integrity(checkpoint.context.reader.place, checkpoint.context.reader.manifest, comm)
    stored = checkpoint.columns()  # no object for each tensor
    common = checkpoint.common()  # before the shards: if it cannot be read, no destination has been filled
    objects = CommonObjects(common)
    with checkpoint.operation.local_phase("reading the arguments"):
        check_patterns("resize", resize, stored.keys, comm)
    template = _make_template(sharded_state_dict, checkpoint, lambda: name_stored(stored, objects, resize))
    if validate:
        with checkpoint.operation.local_phase("validating"):
            validate_shards(template.shards, comm, state=sharded_state_dict)
    with checkpoint.operation.local_phase("comparing keys"):
        mismatch, built, given = _match_keys(
            template, checkpoint, stored, objects, strict, on_unused=on_unused, counts_unused=counts_unused
        )
        not_read = {*mismatch.absent, *given}
        is_read = [not not_read or stored_key(shard) not in not_read for shard in template.shards]
        available = [shard for shard, reads in zip(template.shards, is_read, strict=True) if reads]
    with checkpoint.operation.local_phase("comparing shapes"):
        if resize and (misshapen := template.find_misshapen(common)):
            raise ShapeMismatchError(
                f"resize= has no effect on tensors that no shard describes: {listed(misshapen, limit=3)}; describe the "
                "optimizer, too: to_sharded_state_dict(model, optimizer) of shardckpt.adapters, or leave it out"
            )
        shapes = dict(zip(stored.keys, stored.shapes, strict=True))
        available = allow_resizing(available, shapes, resize)
        check_shapes(available, shapes, advise=advise)
        resizing = Resizing(available, shapes, resize, is_main=comm.is_main)
    with checkpoint.operation.local_phase("comparing dtypes"):
        dtypes = dict(zip(stored.keys, stored.dtypes, strict=True))
        casts = check_dtypes(available, dtypes, allow_cast=allow_dtype_cast, advise=advise)
        if casts and comm.is_main:
            _log_casts(casts)
    twins = find_twins(available, filled_by_twins)
    ignored = [] if on_unused == "ignore" else template.find_ignored_tensors(common)
    # in the message that tells whether a rank has failed
    may_change, is_ignored = comm.largest(
        not allow_dtype_cast and any(can_change_values(*pair) for pair in casts), len(ignored)
    )
    if is_ignored:
        _report_ignored(ignored, on_unused, comm)
    wanted_values = [_without_data(shard) if n in twins else shard for n, shard in enumerate(available)]
    found = checkpoint.values(wanted_values, is_synced=True)
    with checkpoint.operation.local_phase("comparing tied tensors"):
        check_twins(available, found, twins)
        resizing.restore(found)
    loaded = iter(found)
    with checkpoint.operation.local_phase("assembling the state dict"):
        values = [
            next(loaded) if reads else given.get(stored_key(shard), MISSING)
            for shard, reads in zip(template.shards, is_read, strict=True)
        ]
        # the common state has the values that these objects were built from
        in_common = {n for n, shard in enumerate(template.shards) if stored_key(shard) in built} if built else set()
        state_dict = template.fill(values, common, in_common=in_common, replaces_any=len(given) < len(built))
    if may_change:
        _refuse_changed_values(checkpoint, available, found, dtypes, advise=advise)
    _log_unused(mismatch)
    return state_dict, mismatch


def _log_unused(mismatch: KeyMismatch) -> None:
    """Warn of unused keys, behind all that could fail: a load that does has its error alone."""
    if mismatch.warning:
        logger.warning("%s", mismatch.warning)


def _make_template(
    wanted: ShardedStateDict,
    checkpoint: OpenCheckpoint,
    list_stored: Callable[[], StoredNames],
) -> LoadTemplate:
    """Collective: return the template of a load, checked and with the main replicas of its shards."""
    with checkpoint.operation.local_phase("preparing the state dict"):
        template = LoadTemplate(wanted, list_stored)
        validate_descriptions(template.shards)
        _refuse_unfillable(template.shards)
        # copies are not compared: their values are about to be overwritten
        template.shards = choose_main_replicas(template.shards, checkpoint.context.comm, compare=False)
    return template


def _match_keys(
    template: LoadTemplate,
    checkpoint: OpenCheckpoint,
    stored: StoredColumns,
    objects: CommonObjects,
    strict: StrictHandling,
    *,
    on_unused: OnUnused,
    counts_unused: Callable[[str], bool],
) -> tuple[KeyMismatch, set[str], dict[str, Any]]:
    """Collective: compare the requested keys with the stored keys.

    Returns the mismatch; the unique keys of objects that are built from single values; and the values of those that are
    built from the common state.
    """
    keys = {key: key for key in stored.keys}
    keys.update((name, ShardedObject.empty_from_unique_key(name).key) for name in stored.objects)
    if checkpoint.context.reader.manifest.recognised_as is not None:  # another library's: it may be torchtitan's
        use_bare_keys(template.shards, keys, _MODEL)
    absent = [
        shard
        for shard in template.shards
        if type(shard) is not ShardedTensor  # most are, and to ask whether one is an object is slow
        and isinstance(shard, ShardedObject)
        and shard.unique_key not in keys
    ]
    by_strategy = checkpoint.find_buildable(absent)
    given = objects.build(shard for shard in absent if shard.unique_key not in by_strategy)
    built = {*by_strategy, *given}
    # every rank must compare with the same keys, and the objects that are built differ from rank to rank
    wanted = [shard for shard in template.shards if stored_key(shard) not in built] if built else template.shards
    comm = checkpoint.context.comm
    mismatch = compare_keys(wanted, keys, strict, comm, on_unused=on_unused, counts_unused=counts_unused)
    if template.left_out and comm.is_main:
        _log_left_out(template)
    return mismatch, built, given


def _refuse_changed_values(
    checkpoint: OpenCheckpoint,
    wanted: list[ShardedBase],
    values: list[Any],
    dtypes: dict[str, torch.dtype],
    *,
    advise: bool,
) -> None:
    """Collective: raise DtypeMismatchError, on every rank, if a cast has changed a value of any rank."""
    comm, faults = checkpoint.context.comm, list[str]()
    with checkpoint.operation.local_phase("checking casts"):
        suspects = find_suspects(wanted, values, dtypes)
    (rounds,) = comm.largest(len(suspects))
    for number in range(rounds):
        mine = suspects[number : number + 1]
        sources = checkpoint.values(request_stored_values(mine, dtypes))
        with checkpoint.operation.local_phase("checking casts"):
            faults += describe_faults(mine, sources)
    if rounds:
        with comm.collective_phase("checking casts"):
            if faults:
                raise make_changed_error(faults, advise=advise)


def _without_data(shard: ShardedBase) -> ShardedBase:
    copied = copy.copy(shard)
    copied.data = None
    return copied


def name_stored(columns: StoredColumns, common: CommonObjects | None = None, resize: Sequence[str] = ()) -> StoredNames:
    """Return the stored items by key, without objects that have several parts.

    Objects may be built of values of the common state.
    """
    objects = [ShardedObject.empty_from_unique_key(name) for name in columns.objects]
    keys = [shard.key for shard in objects if set(shard.global_shape) <= {1}]
    return StoredNames(
        dict(zip(columns.keys, zip(columns.dtypes, columns.shapes, strict=True), strict=True)),
        dict.fromkeys(sorted({*keys, *columns.values})),
        {key for key in columns.keys if matches_any(key, resize)} if resize else (),
        common,
    )


def _log_left_out(template: LoadTemplate) -> None:
    """Log one line per load: a warning only if all optional entries that the caller has are dropped."""
    level = logging.WARNING if template.lacks_all_optional else logging.INFO
    names = listed(sorted(template.left_out))
    logger.log(level, "left out of the result, since it did not exist when the checkpoint was saved: %s", names)


def _report_ignored(ignored: list[str], on_unused: OnUnused, comm: Comm) -> None:
    """Collective: say of some rank which tensors of its state dict no load fills; raise if ``on_unused`` says so."""
    paths = next(filter(None, comm.all_gather(ignored[:_FEW])))
    (count,) = comm.largest(len(ignored))
    text = (
        f"no shard describes {format_many(count, 'tensor')} of the state dict to load, neither filled nor in the "
        f"result: {listed(paths)}{', ...' if count > len(paths) else ''}; describe them as the save did: "
        "dist_checkpointing.load(to_sharded_state_dict(...), ...) of shardckpt.adapters"
    )
    with comm.collective_phase("comparing keys"):
        if on_unused == "error":
            raise KeyMismatchError(text)
    if comm.is_main:
        logger.warning("%s", text)


def _log_casts(casts: Casts) -> None:
    """Log one line per load: a warning only if a cast is not exact."""
    level = logging.INFO if all(is_exact(*pair) for pair in casts) else logging.WARNING
    logger.log(level, "stored tensors are cast as they are loaded: %s", describe_casts(casts))


def _refuse_unfillable(shards: Sequence[ShardedBase]) -> None:
    """Raise for a destination that no values can be written to, before any other is filled."""
    destinations = [(shard, shard.data) for shard in shards if isinstance(shard, ShardedTensor)]
    filled = [(shard, data) for shard, data in destinations if data is not None]
    if find_addresses([data for _, data in filled]) is None:  # some may be no contiguous memory
        for shard, data in filled:
            _refuse_unfillable_tensor(shard, data)


def _refuse_unfillable_tensor(shard: ShardedTensor, data: torch.Tensor) -> None:
    if data.is_meta:
        raise ShardingError(
            f"{shard.key!r}: its data is on the meta device, which cannot be filled: give it memory (to_empty), or "
            "describe it without data to get a new tensor"
        )
    if data.layout != torch.strided:
        raise ShardingError(
            f"{shard.key!r}: its data is sparse ({data.layout}), which cannot be filled: describe it without data to "
            "get a new, dense tensor"
        )
    if overlaps_itself(data):
        raise ShardingError(
            f"{shard.key!r}: its data is expanded, or overlaps itself: several elements are one place in memory, which "
            "can hold one value only: give its clone() or contiguous(), or describe it without data to get a new tensor"
        )


def _deliver(shard: ShardedBase, value: Any) -> Any:
    """Return the loaded value, in the caller's own tensor if there is one."""
    if not isinstance(shard, ShardedTensor):
        return value
    if shard.data is None or value is shard.data:
        return value
    fill(shard.key, shard.data, value)
    return shard.data
