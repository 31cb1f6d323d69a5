"""The classes that an author of a strategy subclasses, and protocols for the optional abilities of a strategy.

A format is a pair of classes with one ``backend`` and ``version``: a :class:`SaveStrategy`, or an
:class:`AsyncSaveStrategy` for saves behind the training, and a :class:`LoadStrategy`. A plugin registers them, see
:func:`shardckpt.plugins.hookspecs.shardckpt_register`. ``shardckpt/plugins/README.md`` explains a complete example, and
lists the names that an author imports from ``shardckpt``.

The core validates the shards, stages, digests, syncs and commits. A strategy decides which bytes go to which file, and
finds them again. Everything else is optional: a load strategy that has the methods of :class:`Recognises`,
:class:`BuildsObjects`, :class:`NestsState`, :class:`OwnsFiles`, :class:`ChecksFiles`, :class:`ListsBoxes`,
:class:`RemovesKeys`, :class:`ReadsPlainObjects` or :class:`ListsColumns` gets the ability; it need not subclass them.

A method that gets a context runs on every rank of ``context.comm``, in a phase: if it raises on one rank, all ranks
raise the same error. Three rules keep the ranks together; :class:`shardckpt.distributed.Comm` has examples.

1. All ranks call the same collectives of ``context.comm``, in the same order: none stands in ``if comm.is_main``.
2. An error that leaves a collective or a phase is not caught: the other ranks have ended the method with it.
3. Before a collective of ``torch.distributed`` or of a smaller group, code that can fail stands in
   ``with context.comm.collective_phase(name)``: no rank enters the collective if another has failed.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from shardckpt.errors import CheckpointingException, CheckpointReplacedError
from shardckpt.manifest.names import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeGuard

    import torch

    from shardckpt.distributed.comm import Comm
    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import CommonStateDict, ShardedBase, StateDict
    from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
    from shardckpt.mapping.sharded_tensor import BlockScales, ShardedTensor
    from shardckpt.storage.reader import CheckpointReader
    from shardckpt.storage.writer import CheckpointWriter


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """The input of a strategy that plans a save.

    Attributes:
        comm: The ranks that save. Code that can fail stands in ``with comm.collective_phase(...)`` or ``with
            comm.local_phase(...)``; :class:`shardckpt.distributed.Comm` says which.
        save_id: The save's id, 32 hex digits: the same on all ranks, and no other save has it.
        allow_globals: Classes and functions that the caller allows in pickled objects, in addition to those that every
            load accepts.
        staging: The directory to which this rank's files will be written; None where the save writes none.
        lineage: The checkpoint that the job was resumed from, and the step of the training, as far as the caller gave
            them. ``shardckpt.json`` has them; a format may also store them itself.
        is_streamed: Whether files go to a store while they are written: then the speed of ``staging`` does not matter.
        file_bytes: The size at which to begin another data file; 0 for no limit. A save that can be continued after a
            kill sets it: files that were complete are not written again.
    """

    comm: Comm
    save_id: str
    allow_globals: tuple[Any, ...] = ()
    staging: Path | None = None
    lineage: Lineage = field(default_factory=Lineage)
    is_streamed: bool = False
    file_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SaveContext(PlanContext):
    """The input of a strategy that saves: a plan's context, and the writer.

    Attributes:
        writer: Creates files in the staging directory. It makes their digests and syncs them; the core commits.
    """

    writer: CheckpointWriter


@dataclass(frozen=True)
class LoadContext:
    """The input of a strategy that loads.

    Attributes:
        reader: Reads the checkpoint's files; ``reader.manifest`` is the checkpoint's ``metadata.json``.
        comm: The ranks that load, or this process alone.
        allow_globals: Classes and functions that the caller allows legacy pickles to name.
    """

    reader: CheckpointReader
    comm: Comm
    allow_globals: tuple[Any, ...] = ()

    def require_same_save(self, identity: bytes, what: str, **agreed: Any) -> None:
        """Collective: raise on all ranks if the ranks have read different saves.

        Call it after planning and before reading into a destination. It waits until every rank has planned, so that no
        destination changes if a rank fails to plan.

        Args:
            identity: Bytes that identify the save, such as its id in an index.
            what: A name for the read content in the error: ``"metadata"``.
            **agreed: Values that must be equal on every rank, by the names for the error. They travel in the same
                message; either all ranks pass some, or none.

        Raises:
            CheckpointReplacedError: They differ, because the checkpoint is being overwritten.
            CheckpointingException: The ranks have different values.
        """
        # imported here: it imports torch, which the command line's help does not need
        from shardckpt.storage.directory import replaced_error

        is_same = self.comm.agree(identity, **agreed) if agreed else self.comm.all_equal(identity)
        if not is_same:
            with self.comm.local_phase(f"comparing the {what} that the ranks have read"):
                raise replaced_error(self.reader.directory, f"the ranks have read different {what}")


class SaveStrategy(ABC):
    """Writes checkpoints of one (backend, version).

    If a class is registered, each save gets an instance of its own; if an instance is registered, all saves share it.

    Attributes:
        backend: Name of the format family.
        version: The version that it writes.
        reader: The oldest release that reads this version, for the errors of older installations: ``"shardckpt 0.1"``.
        writes: Its output in a few words, for ``shardckpt strategies``.
        supports_objects: Whether it stores ShardedObjects, which come in the same list as ShardedTensors. If not, the
            core refuses a save that has some, by name, before anything is written.
        stores_plain_objects: Whether it stores :class:`~shardckpt.mapping.PlainObject` shards for the readers of other
            libraries. If not, the core passes none.
        computes_fingerprints: Whether it adds sums of the stored values to :attr:`CheckpointWriter.sums
            <shardckpt.storage.CheckpointWriter>` where the writer's ``fingerprints`` is true.
        stores_all_bytes: Whether its files are at least as large as the tensors, with shared memory counted once: it
            does not compress, cast or omit. Only then can the core refuse a save that the free space cannot hold.
    """

    backend: ClassVar[str]
    version: ClassVar[int]
    reader: ClassVar[str] = ""
    writes: ClassVar[str] = ""
    supports_objects: ClassVar[bool] = True
    stores_plain_objects: ClassVar[bool] = False
    computes_fingerprints: ClassVar[bool] = False
    stores_all_bytes: ClassVar[bool] = False

    @property
    def agreed_options(self) -> Mapping[str, object]:
        """The options that must be equal on all ranks, by the names that errors give them; by default none.

        The engine compares them, by their ``repr``, before it calls the strategy: give the same names on every rank.
        """
        return {}

    @abstractmethod
    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Collective: write this rank's files; every rank of ``context.comm`` calls it with its own shards.

        Every rank reports the shards in its files: ``context.writer.record_shards(shards)``. The save fails on all
        ranks, with the names, if no rank recorded a shard, if a file was created and not finished, or if the staging
        directory has a file that came neither from the writer nor through ``context.writer.adopt``.

        Example:
            One file per rank, and an index that the main rank writes::

                def save(self, shards, common, context):
                    comm, writer = context.comm, context.writer
                    with comm.local_phase("writing shards"):  # names the step in errors
                        mine = [shard for shard in shards if is_main_replica(shard.replica_id)]
                        entries = self.write_data(f"{comm.rank}.bin", mine, writer)
                        writer.record_shards(mine)
                    everyone = comm.gather(entries)  # collective: all ranks call it
                    with comm.local_phase("writing the index"):
                        if comm.is_main:
                            writer.write("index.json", self.index_of(everyone, common))

        Args:
            shards: This rank's ShardedTensors and ShardedObjects, validated across ranks, replicas included: store the
                main replica of each shard. They belong to the caller: change neither them nor their data. ``data`` of
                a ShardedTensor has its ``data_shape`` and ``dtype``, on any device.
            common: The state that is not sharded. Store the main rank's.
            context: The ranks, the writer, and the globals that the caller allows.

        Raises:
            CheckpointingException: on every rank, if any failed; the checkpoint's directory is unchanged then.
        """


class BackgroundWork(Protocol):
    """One rank's part of a planned save, which is written without other ranks. It can be pickled.

    Attributes:
        tensors: The tensors to write. A background save replaces them by copies before the training goes on, so
            :meth:`write` reads them from here.
        keys: The key of each tensor, for errors.
    """

    tensors: list[torch.Tensor]
    keys: list[str]

    def write(self, writer: CheckpointWriter) -> Any:
        """Write this rank's files, in any thread or process; no collective may be called.

        ``writer.record_shards`` is called here, or in ``finish``, as in :meth:`SaveStrategy.save`.

        Args:
            writer: Creates the files.

        Returns:
            Input of ``finish``, such as the names and offsets of the files: plain data that can be pickled.
        """


@dataclass(frozen=True)
class PreparedSave:
    """A save that is planned and not yet written.

    Attributes:
        work: The part that this rank writes.
        finish: ``finish(results, context)``, which every rank calls when all have written: it writes the index. On the
            main rank ``results`` has the results of ``work.write`` in rank order; on the others it is empty. None, on
            all ranks, if ``work`` writes everything.
        plan: Input of :meth:`AsyncSaveStrategy.replan` on this rank, for another save of shards with the same
            metadata; it must not refer to the shards' data. None: no other save can use it.
    """

    work: BackgroundWork
    finish: Callable[[Sequence[Any], SaveContext], None] | None = None
    plan: Any = None


class AsyncSaveStrategy(SaveStrategy):
    """A save strategy that writes without other ranks, so that a thread or process can write behind the training.

    A save is :meth:`prepare`, then ``work.write``, then ``finish``: the first and the last are collective, and only
    the second touches the bytes of tensors.

    Attributes:
        caches_plan: Whether the core caches the plans of recent saves: if the shards have, on every rank, the metadata
            of a cached plan, it calls :meth:`replan` instead of :meth:`prepare`. It never calls :meth:`save`. Not
            inherited: a subclass may override any of the three, so it sets this again where that is right.
    """

    caches_plan: ClassVar[bool] = False

    @property
    def plan_cache_key(self) -> Hashable | None:
        """The options that a plan depends on: strategies with equal keys use each other's plans.

        By default the strategy itself: an instance uses only its own plans. None: its plans are not cached.
        """
        return self

    @abstractmethod
    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: plan a save; every rank of ``context.comm`` calls it with its own shards.

        Pickle objects and common state here, since the caller may change them later. Do not read tensors: list them
        in ``work.tensors``.

        Args:
            shards: As in :meth:`SaveStrategy.save`.
            common: As in :meth:`SaveStrategy.save`.
            context: The ranks, and the globals that the caller allows.

        Returns:
            This rank's part of the save.

        Raises:
            CheckpointingException: on every rank, if any failed.
        """

    def replan(
        self, plan: Any, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Collective: plan a save by the plan of an earlier one, whose shards had the same metadata.

        Args:
            plan: The :attr:`PreparedSave.plan` of the earlier save, on this rank.
            shards: The caller's own, which must not be changed.
            common: As in :meth:`prepare`.
            context: As in :meth:`prepare`.

        Returns:
            The save. Its work has tensors of the same dtypes and shapes, in the same order, as the earlier one's.
            None, on all ranks, if the values of the objects need another plan: then :meth:`prepare` is called. That is
            the default.
        """

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Collective: prepare, write and finish in the caller's thread; see :meth:`SaveStrategy.save`."""
        write_prepared(self.prepare(shards, common, context), context)


@runtime_checkable
class StoresHubFolders(Protocol):
    """A save strategy whose checkpoints can be Hugging Face folders as they are."""

    def store_hub_folders(
        self,
        prefix: str | None,
        mapping: Any,
        assets: str | None,
    ) -> SaveStrategy:
        """Return a strategy like this one, which stores the model's tensors contiguous, under their names of the Hub.

        Args:
            prefix: The prefix of the model's keys; None as for :func:`shardckpt.huggingface.export_to_huggingface`.
            mapping: The change of names and shapes, as for that function: a model's type, or a KeyMapping.
            assets: A folder with the model's other files, to be copied into every checkpoint; None for no files.

        Raises:
            CheckpointingException: There is no such mapping, or no such folder.
        """


def write_prepared(prepared: PreparedSave, context: SaveContext) -> None:
    """Collective: write and finish a planned save in the caller's thread.

    Args:
        prepared: This rank's part of the save, as :meth:`AsyncSaveStrategy.prepare` returned it.
        context: As in :meth:`SaveStrategy.save`.

    Raises:
        CheckpointingException: on every rank, if any failed.
    """
    context.comm.sync_errors()  # a rank may have failed to plan: the others must not find out after hours of writing
    with context.comm.local_phase("writing shards"):
        result = prepared.work.write(context.writer)
    if prepared.finish is not None:
        prepared.finish(context.comm.gather(result), context)


def find_plan_cache_key(strategy: SaveStrategy) -> Hashable | None:
    """Return the key of a strategy's plans in the plan cache, or None if its plans are not cached.

    They are cached only if the strategy's own class, not a base, sets ``caches_plan``, and no method is replaced on the
    instance: a plan of another instance with the same key was made without the replacement.
    """
    replaced = any(callable(getattr(type(strategy), name, None)) for name in vars(strategy))
    if replaced or not vars(type(strategy)).get("caches_plan") or not isinstance(strategy, AsyncSaveStrategy):
        return None
    return strategy.plan_cache_key


class LoadStrategy(ABC):
    """Reads checkpoints of one backend.

    If a class is registered, each load gets an instance of its own; if an instance is registered, all loads share it.

    Attributes:
        backend: Name of the format family.
        version: The newest version that it reads.
        reads: Its input in a few words, for ``shardckpt strategies``.
        same_files: Other backends and versions with the same files. It reads their checkpoints, and a reader of theirs
            that a caller names reads its checkpoints.
    """

    backend: ClassVar[str]
    version: ClassVar[int]
    reads: ClassVar[str] = ""
    same_files: ClassVar[tuple[tuple[str, int], ...]] = ()

    def cannot_load(self, manifest: Manifest) -> str | None:
        """Return the reason why this strategy cannot read a checkpoint, or None if it can.

        By default it reads its own version, and ``same_files``. A reader of several versions overrides it::

            def cannot_load(self, manifest):
                is_known = manifest.backend == self.backend and manifest.version in (1, 2)
                return None if is_known else "reads versions 1 and 2"

        Args:
            manifest: The checkpoint's backend, version, and record of files. No data file has been read.

        Returns:
            The reason, which follows the strategy's name in the error: ``"reads version 2"``; or None.
        """
        if (manifest.backend, manifest.version) in self.same_files:
            return None
        if manifest.backend != self.backend:
            return f"reads backend {self.backend!r}"
        if manifest.version != self.version:
            return f"reads version {self.version}"
        return None

    @abstractmethod
    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: return the stored values of shards; every rank of ``context.comm`` calls it with its own.

        Example:
            ::

                def load(self, wanted, context):
                    index = json.loads(context.reader.read("index.json"))
                    return [self.read_shard(shard, index, context.reader) for shard in wanted]

        Args:
            wanted: ShardedTensors and ShardedObjects of this rank, none or many. Their keys are stored; their global
                shapes and dtypes have been compared with the result of :meth:`load_index`.
            context: The files, the ranks, and the globals that the caller allows.

        Returns:
            One value per shard, in the order of ``wanted``. For a ShardedTensor: a tensor of shape ``data_shape``.
            If the shard has ``data``, fill and return that; the core copies and casts another tensor, of the shard's
            ``dtype`` or of the stored one. If it has none, return a new CPU tensor of the shard's ``dtype``, such as
            ``shard.init_data("cpu")``. With ``allow_shape_mismatch``, elements that are not stored are zero.
            For a ShardedObject: the object. The core checks number, types, shapes and dtypes; an error names the
            strategy, the plugin and the key.

        Raises:
            CheckpointingException: on every rank, if any failed: values are missing, damaged or refused.
        """

    @abstractmethod
    def load_common(self, context: LoadContext) -> StateDict:
        """Collective: return the state that is not sharded, the same on every rank; ``{}`` if there is none."""

    @abstractmethod
    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Collective: return a description of everything that is stored, the same on every rank.

        Returns:
            One entry per tensor: a ShardedTensor with ``data=None`` and its stored dtype, whose ``local_shape`` is the
            global shape (:meth:`shardckpt.mapping.ShardedTensor.from_global_shape` makes one). One entry per
            object: a ShardedObject with ``data=None``.
        """


@runtime_checkable
class Recognises(Protocol):
    """A load strategy that recognises checkpoints without ``metadata.json`` by their content."""

    def recognises(self, directory: Path) -> int | None:
        """Return the version under which it reads a directory, or None if it does not know it.

        Args:
            directory: A directory without ``metadata.json`` and ``shardckpt.json``, perhaps of a store.
        """


@runtime_checkable
class BuildsObjects(Protocol):
    """A load strategy that can build objects from values that a checkpoint stores one by one under other keys."""

    def can_build(self, wanted: Sequence[ShardedObject], context: LoadContext) -> list[bool]:
        """Return for each object whether :meth:`LoadStrategy.load` can build it.

        Args:
            wanted: Objects that :meth:`LoadStrategy.load_index` does not list.
            context: The checkpoint's files.
        """


@runtime_checkable
class NestsState(Protocol):
    """A load strategy whose checkpoints store the path of each value in the state dict that was saved."""

    def nest_state(
        self, tensors: Mapping[str, Any], keeps: Callable[[str], bool], context: LoadContext
    ) -> StateDict | None:
        """Return the state dict, nested as it was saved; None if this checkpoint does not store the paths.

        Args:
            tensors: The tensors to nest, by key. One without a stored path is left out.
            keeps: Returns whether to include a value that is not a tensor, given its path joined by dots.
            context: The checkpoint's files, and the globals that the caller allows.
        """


@runtime_checkable
class OwnsFiles(Protocol):
    """A load strategy that lists the files of another library's checkpoint: an overwrite keeps all other files."""

    def owned_files(self, directory: Path) -> set[str]:
        """Return the paths of the checkpoint's files in the directory; a folder stands for everything in it.

        Args:
            directory: A checkpoint without ``shardckpt.json``, which would name them.
        """


@dataclass(frozen=True)
class StoredFile:
    """A file that a checkpoint must have, according to its index.

    Attributes:
        name: Its path in the directory.
        nbytes: Least size in bytes; 0 if the index does not tell.
        keys: The tensors and objects of ``load_index`` that have bytes in this file; empty for a file that all of them
            need, such as an index. The file may hold more, such as the common state, which has no key.
        ends: The offset at which a key's last byte in the file ends, for the keys whose end the index tells.
        fault: The fault that reading the index found in this file, in formats whose index is in the headers of the
            data files; else ``""``.
    """

    name: str
    nbytes: int = 0
    keys: tuple[str, ...] = ()
    ends: Mapping[str, int] = field(default_factory=dict)
    fault: str = ""

    def split_keys(self, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the keys that are lost if the file is cut, and the keys that are whole before the cut.

        Args:
            size: The bytes that remain; 0 if the file is missing.
        """
        lost, kept = list[str](), list[str]()
        for key in self.keys:
            (kept if key in self.ends and self.ends[key] <= size else lost).append(key)
        return tuple(lost), tuple(kept)


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes: all that was read would live as long as the error."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:  # one that is raised again may be its own context
        chain.append(following)
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


def find_error(check: Callable[..., Any], *args: Any) -> CheckpointingException | None:
    """Return the error that a check of a file raises, or None, for :meth:`ChecksFiles.check_files`.

    Args:
        check: Called with ``args``.
        args: Its arguments.

    Raises:
        CheckpointReplacedError: Another save replaced the checkpoint: the error is not about the file.
    """
    try:
        check(*args)
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        _clear_frames(exc)
        return exc
    return None


@runtime_checkable
class ChecksFiles(Protocol):
    """A load strategy that can check a checkpoint's files without digests, by its index."""

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have, without ``metadata.json`` and ``shardckpt.json``.

        Args:
            reader: Reads the checkpoint's files. Read the index only: a missing or cut data file must not change the
                list.

        Raises:
            CheckpointingException: the index is missing or damaged, so that there is no list.
        """

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the fault of each listed file, or None; read values of tensors only for checksums.

        Check each file against the index: that it exists, that it has the size and ranges of the index, and that the
        headers and counts of the format agree, as far as that needs no values. Digests find changed values. If the
        format has checksums of its own and ``reader.crcs`` is not ``none``, check these here as well: those of
        archives of ``torch.save`` by ``shardckpt.archive.Archive.check_members``.

        Args:
            reader: Reads the checkpoint's files.

        Returns:
            By file name: None for a sound file; a :class:`~shardckpt.errors.CorruptCheckpointError` for a damaged one;
            a :class:`~shardckpt.errors.StorageError` for one that cannot be read. They are returned, not raised.

        Raises:
            CheckpointingException: the index is missing or damaged.
        """


class StoredBox(NamedTuple):
    """A box of a tensor, and the file with its elements.

    Attributes:
        key: The tensor's key.
        offset: Where the box begins in the tensor.
        shape: Its extents.
        file: Path of the file in the directory.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


@runtime_checkable
class ListsBoxes(Protocol):
    """A load strategy that lists the boxes in each file."""

    def list_boxes(self, reader: CheckpointReader) -> Iterable[StoredBox]:
        """Return the stored boxes of all tensors, grouped by tensor.

        Args:
            reader: Reads the checkpoint's files. Read the index only.

        Raises:
            CheckpointingException: the index is missing or damaged.
        """


@runtime_checkable
class ReadsPlainObjects(Protocol):
    """A load strategy whose checkpoints may have :class:`~shardckpt.mapping.PlainObject` shards.

    No load asks for them. A conversion copies them, if the new format stores them
    (:attr:`SaveStrategy.stores_plain_objects`).
    """

    def read_plain_objects(self, context: LoadContext) -> list[PlainObject]:
        """Return the stored PlainObjects with their values; each has all keys under which readers find it.

        Args:
            context: The checkpoint's files, and the globals that the caller allows.

        Returns:
            The objects.
        """

    def list_plain_objects(self, context: LoadContext) -> list[str]:
        """Return the keys of these objects, which a conversion reports if the new format does not store them.

        Args:
            context: The checkpoint's files.

        Returns:
            All keys under which readers find one; empty if the common state has the values as well.
        """


class StoredColumns(NamedTuple):
    """The content of a checkpoint, in columns: a listing of a million tensors needs no object for each.

    Attributes:
        keys: The keys of the tensors.
        dtypes: Their dtypes.
        shapes: Their global shapes.
        objects: The unique keys of the ShardedObjects.
        scales: The block scales of tensors whose values another tensor scales, by key.
        values: The keys of values that are stored singly, as plain DCP stores them: :class:`BuildsObjects` builds
            objects from them.
    """

    keys: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    objects: Sequence[str]
    scales: Mapping[str, BlockScales]
    values: Sequence[str] = ()

    @classmethod
    def from_shards(
        cls, tensors: Sequence[ShardedTensor], objects: Iterable[ShardedObject], values: Sequence[str] = ()
    ) -> StoredColumns:
        """Return the columns of the result of :meth:`LoadStrategy.load_index`.

        Args:
            tensors: The tensors, unsharded.
            objects: The objects.
            values: The keys of values that are stored singly.

        Returns:
            The columns, in the same order.
        """
        return cls(
            [shard.key for shard in tensors],
            [shard.dtype for shard in tensors],
            [tuple(shard.global_shape) for shard in tensors],
            [shard.unique_key for shard in objects],
            {shard.key: shard.block_scales for shard in tensors if shard.block_scales},
            values,
        )


@runtime_checkable
class ListsColumns(Protocol):
    """A load strategy whose index has columns: loads and ``shardckpt inspect`` need no object for each tensor."""

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the content of :meth:`LoadStrategy.load_index` in columns, in the same order.

        Args:
            context: The checkpoint's files.

        Returns:
            The columns, which the caller does not change.
        """


def lists_columns(strategy: LoadStrategy) -> TypeGuard[ListsColumns]:
    """Return whether a load may use a strategy's ``list_columns`` in place of its ``load_index``.

    It may not for a subclass that overrides ``load_index`` alone: it inherits the columns of another index.

    Args:
        strategy: A load strategy.

    Returns:
        False, too, if it has no ``list_columns``.
    """
    for owner in (strategy, *type(strategy).__mro__):
        if "list_columns" in vars(owner):
            return True
        if "load_index" in vars(owner):
            return False
    return False


class KeptItem(NamedTuple):
    """An item of a file that the new file keeps.

    Attributes:
        key: The item's key, for errors.
        start: Its offset in the old file.
        nbytes: Its size in bytes.
        to: Its offset in the new file; gaps between items are filled with zeros.
        cuts: Ends, relative to ``start``, of the ranges that a load reads separately: each gets its own digests.
    """

    key: str
    start: int
    nbytes: int
    to: int
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Removal:
    """The changes to a checkpoint's directory when keys are removed.

    Attributes:
        keys: The keys that are removed.
        renewed: New content, by name, of the files that list the keys. An index keeps its save id.
        dropped: Names of the files that are no longer needed.
        rewritten: For each file that also holds other keys: the items that stay, in file order, which does not change.
            Items without bytes may be omitted.
        heads: The header of each rewritten file, by name, in formats that have one.
    """

    keys: frozenset[str]
    renewed: dict[str, bytes]
    dropped: frozenset[str]
    rewritten: dict[str, list[KeptItem]] = field(default_factory=dict)
    heads: dict[str, bytes] = field(default_factory=dict)


@runtime_checkable
class RemovesKeys(Protocol):
    """A load strategy that can remove tensors and objects from a stored checkpoint."""

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """Return the changes that remove all tensors and objects whose keys begin with a prefix.

        Write nothing: the core writes and commits. The common state stays.

        Args:
            prefix: The prefix. The key of an object, here and in :attr:`Removal.keys`, is its unique key, as
                :meth:`LoadStrategy.load_index` lists it: ``"rng/shard_0_2"``.
            reader: Reads the checkpoint's files.

        Returns:
            The changes; empty if no key begins with the prefix, which the core reports. Do not drop a file that holds
            another key: rewrite it without the removed bytes, or keep it where rewriting costs more than it frees.
        """


class Migration(ABC):
    """Rewrites a checkpoint of one version as another; ``shardckpt migrate OLD NEW`` runs it.

    Example:
        Version 2 has a dtype for each tensor in its index; the data files are the same::

            class AddDtypes(Migration):
                backend, from_version, to_version = "npy", 1, 2

                def migrate(self, reader, writer):
                    index = json.loads(reader.read("index.json"))
                    for entry in index:
                        entry["dtype"] = dtype_of(reader, entry["file"])
                        writer.write(entry["file"], reader.read(entry["file"]))
                    writer.write("index.json", json.dumps(index).encode())

    Attributes:
        backend: Name of the format family.
        from_version: Version that it reads.
        to_version: Version that it writes.
    """

    backend: ClassVar[str]
    from_version: ClassVar[int]
    to_version: ClassVar[int]

    @abstractmethod
    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Write the files of the new version; the core makes digests and ``metadata.json``, and commits.

        Args:
            reader: Reads the old checkpoint, and checks each read against the digests.
            writer: Creates the files of the new one.

        Raises:
            CheckpointingException: the checkpoint cannot be rewritten. Nothing is created at the new path.
        """


__all__ = [
    "AsyncSaveStrategy",
    "BackgroundWork",
    "ChecksFiles",
    "KeptItem",
    "ListsBoxes",
    "ListsColumns",
    "LoadContext",
    "LoadStrategy",
    "Migration",
    "NestsState",
    "OwnsFiles",
    "PlanContext",
    "PreparedSave",
    "ReadsPlainObjects",
    "Recognises",
    "Removal",
    "RemovesKeys",
    "SaveContext",
    "SaveStrategy",
    "StoredBox",
    "StoredColumns",
    "StoredFile",
    "StoresHubFolders",
    "find_error",
    "find_plan_cache_key",
    "lists_columns",
    "write_prepared",
]
