"""What a strategy is: the classes that authors subclass, and the small protocols for optional abilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    import torch

    from shardckpt.distributed import Comm
    from shardckpt.errors import CheckpointingException
    from shardckpt.manifest import Manifest
    from shardckpt.mapping import CommonStateDict, ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader, CheckpointWriter, KeptItem


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """With whom a strategy plans a save.

    Attributes:
        comm: The ranks that save. What can fail stands in ``with comm.collective_phase(...)`` or
            ``with comm.local_phase(...)``; :class:`shardckpt.distributed.Comm` says which.
        save_id: A name that no other save has.
        allow_globals: Classes and functions that objects may name although a load refuses them without leave.
        staging: The directory in which this rank's files are made; None where no files are.
    """

    comm: Comm
    save_id: str
    allow_globals: tuple[Any, ...] = ()
    staging: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SaveContext(PlanContext):
    """Where and with whom a strategy saves.

    Attributes:
        writer: Creates the checkpoint's files in the staging directory; digests, fsync and commit are its business.
    """

    writer: CheckpointWriter


@dataclass(frozen=True)
class LoadContext:
    """Where and with whom a strategy loads.

    Attributes:
        reader: The checkpoint's files.
        comm: The ranks that load.
        allow_globals: Classes and functions that the caller allows legacy pickles to name.
    """

    reader: CheckpointReader
    comm: Comm
    allow_globals: tuple[Any, ...] = ()


class SaveStrategy(ABC):
    """Writes checkpoints of one (backend, version); an instance made by the registry serves one save.

    Attributes:
        backend: Name of the format family.
        version: Version that it writes.
        reader: The oldest release that reads this version, for errors of older installations: ``"shardckpt 0.1"``.
        writes: What it writes, in a few words for ``shardckpt strategies``.
    """

    backend: ClassVar[str]
    version: ClassVar[int]
    reader: ClassVar[str] = ""
    writes: ClassVar[str] = ""

    @abstractmethod
    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Write this rank's part; called on every rank.

        Every rank says which shards its files hold: ``context.writer.record_shards(shards)``. The save fails on all
        ranks, by name, where a shard was given and not recorded; where a file was begun and not finished; and where
        anything was written into the staging directory past the writer, unless ``context.writer.adopt`` takes it over.

        Args:
            shards: This rank's ShardedTensors and ShardedObjects, replicas included; checked across ranks.
            common: The state that is not sharded; the main rank's is the one to store.
            context: Where and with whom.
        """


class BackgroundWork(Protocol):
    """A rank's part of a save, planned: all that writing it needs, and no other rank; it can be pickled.

    Attributes:
        tensors: What is to be written; copies take their places before the caller goes on with its own.
        keys: Whose they are, for errors.
    """

    tensors: list[torch.Tensor]
    keys: list[str]

    def write(self, writer: CheckpointWriter) -> Any:
        """Write the files, in any thread or process, and say for ``finish`` what is where: plain data.

        ``writer.record_shards`` is called here, or in ``finish``, as in :meth:`SaveStrategy.save`.
        """


@dataclass(frozen=True)
class PreparedSave:
    """A save that is planned and not written.

    Attributes:
        work: What this rank writes.
        finish: ``finish(results, context)``, called on every rank when all have written; on the main rank the results
            are those of every rank's ``work.write``, in rank order, elsewhere there are none. It writes what names
            the rest. None, on all ranks, where the work writes everything.
        plan: What :meth:`AsyncSaveStrategy.replan` needs to plan another save of shards with the same metadata, on
            this rank; it holds none of the shards' data. None: this save is of no use for another.
    """

    work: BackgroundWork
    finish: Callable[[Sequence[Any], SaveContext], None] | None = None
    plan: Any = None


class AsyncSaveStrategy(SaveStrategy):
    """A save strategy whose writing needs no other rank, so that it can go on behind the training.

    Attributes:
        caches_plan: If True, the plans of recent saves are cached: a save whose shards have, on every rank, the same
            metadata as a cached one's calls :meth:`replan` instead of :meth:`prepare`. :meth:`save` is not called at
            all. Not inherited: a subclass that overrides one of the three sets it again, if that is right for it.
    """

    caches_plan: ClassVar[bool] = False

    @property
    def plan_cache_key(self) -> Hashable | None:
        """All that a plan depends on besides the shards: strategies with equal keys use each other's plans.

        By default the strategy itself: an instance uses its own plans alone. None: its plans are not cached.
        """
        return self

    @abstractmethod
    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Plan with all ranks; the arguments are those of :meth:`save`. Objects are pickled here, tensors not read."""

    def replan(
        self, plan: Any, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Collective: prepare a save by the plan of an earlier one, whose shards had the same metadata.

        Args:
            plan: The :attr:`PreparedSave.plan` of the earlier save, on this rank.
            shards: The caller's own, which stay as they are.
            common: As in :meth:`prepare`.
            context: As in :meth:`prepare`.

        Returns:
            The save: its work has tensors of the same dtypes and shapes, in the same order, as the earlier one's. None,
            on all ranks, if what is in the objects now needs another plan, as it is by default: then :meth:`prepare`
            is called.
        """

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Prepare, write and finish, here and now."""
        write_prepared(self.prepare(shards, common, context), context)


def write_prepared(prepared: PreparedSave, context: SaveContext) -> None:
    """Write and finish a save that is planned, here and now."""
    context.comm.sync_errors()  # before hours of writing
    with context.comm.local_phase("writing shards"):
        result = prepared.work.write(context.writer)
    if prepared.finish is not None:
        prepared.finish(context.comm.gather(result), context)


def find_plan_cache_key(strategy: SaveStrategy) -> Hashable | None:
    """Return the key of a strategy's plans in the cache, or None where each of its saves is planned anew.

    It has one only if its own class, not a base, sets ``caches_plan``, and no method that the cache would skip was
    replaced on the instance.
    """
    replaced = {"prepare", "replan", "save"} & vars(strategy).keys()
    if replaced or not vars(type(strategy)).get("caches_plan") or not isinstance(strategy, AsyncSaveStrategy):
        return None
    return strategy.plan_cache_key


class LoadStrategy(ABC):
    """Reads checkpoints of one backend; an instance serves one load.

    Attributes:
        backend: Name of the format family.
        version: Newest version that it reads.
        reads: What it reads, in a few words for ``shardckpt strategies``.
        same_files: Other backends and versions that have the same files: it reads those, and a reader of those that
            a caller gives reads its checkpoints.
    """

    backend: ClassVar[str]
    version: ClassVar[int]
    reads: ClassVar[str] = ""
    same_files: ClassVar[tuple[tuple[str, int], ...]] = ()

    def cannot_load(self, manifest: Manifest) -> str | None:
        """Why it cannot read this checkpoint, or None if it can; by default its own version and ``same_files``."""
        if (manifest.backend, manifest.version) in self.same_files:
            return None
        if manifest.backend != self.backend:
            return f"reads backend {self.backend!r}"
        if manifest.version != self.version:
            return f"reads version {self.version}"
        return None

    @abstractmethod
    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """The value of every wanted shard, in order: a tensor for a ShardedTensor, an object for a ShardedObject.

        A tensor has the shard's ``data_shape``; where the shard has ``data``, it is best filled in place and returned
        (else the core copies). Shards whose key is not stored do not come here.
        """

    @abstractmethod
    def load_common(self, context: LoadContext) -> StateDict:
        """The state that is not sharded."""

    @abstractmethod
    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """What is stored: a data-less ShardedTensor of the whole shape a tensor, a ShardedObject an object."""


@runtime_checkable
class Recognises(Protocol):
    """A load strategy that knows checkpoints without ``metadata.json`` by their content."""

    def recognises(self, directory: Path) -> int | None:
        """The version under which it reads the directory, or None if it does not know it."""


@runtime_checkable
class OwnsFiles(Protocol):
    """A load strategy that knows which files of a foreign checkpoint are its own: an overwrite keeps the rest."""

    def owned_files(self, directory: Path) -> set[str]:
        """Names of the checkpoint's files."""


@dataclass(frozen=True)
class StoredFile:
    """A file that a checkpoint must have, by what its index says.

    Attributes:
        name: Its name in the directory.
        nbytes: Bytes that it must have at least; 0 where the index does not say.
        keys: The tensors and objects that are in it, or parts of them; none for a file that serves all of them.
    """

    name: str
    nbytes: int = 0
    keys: tuple[str, ...] = ()


@runtime_checkable
class ChecksFiles(Protocol):
    """A load strategy that knows a checkpoint's files by its index, and what they must look like without digests."""

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """The files that the checkpoint must have, ``metadata.json`` and ``shardckpt.json`` left out."""

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """What is wrong with each of the listed files, by name; None for nothing. No value is read.

        A :class:`~shardckpt.errors.CorruptCheckpointError` says that it is not what was written, a
        :class:`~shardckpt.errors.StorageError` that it could not be read.
        """


@dataclass(frozen=True)
class Removal:
    """What leaving keys out of a checkpoint changes in its directory.

    Attributes:
        keys: The keys that are left out.
        renewed: New bytes of the files that name the keys, by file name.
        dropped: Names of the files that nothing needs any more.
        rewritten: What goes on of the files that hold other keys, too, by file name and in the order of both files.
    """

    keys: frozenset[str]
    renewed: dict[str, bytes]
    dropped: frozenset[str]
    rewritten: dict[str, list[KeptItem]] = field(default_factory=dict)


@runtime_checkable
class RemovesKeys(Protocol):
    """A load strategy that can leave tensors and objects out of a stored checkpoint."""

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """What changes without the tensors and objects whose keys begin with the prefix; the common state stays.

        Nothing is written here. A file that holds any other key is not dropped: it is rewritten without the removed
        bytes, or stays as it is.
        """


class Migration(ABC):
    """Rewrites a checkpoint of one version as another; ``shardckpt migrate OLD NEW`` runs it.

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
        """Write the files of the new version; digests, marker and commit are not its business."""


__all__ = [
    "AsyncSaveStrategy",
    "BackgroundWork",
    "ChecksFiles",
    "LoadContext",
    "LoadStrategy",
    "Migration",
    "OwnsFiles",
    "PlanContext",
    "PreparedSave",
    "Recognises",
    "Removal",
    "RemovesKeys",
    "SaveContext",
    "SaveStrategy",
    "StoredFile",
    "find_plan_cache_key",
    "write_prepared",
]
