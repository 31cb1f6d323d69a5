"""The base of save strategies that store boxes in files: plan with all ranks, and plan again for other values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from shardckpt.chunks.items import collect_items, view_tensors
from shardckpt.chunks.ties import TieFinder, agree_on_aliases
from shardckpt.distributed.pickling import SharedPickle, pickle_value
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.parallel.save import assign_main_replicas
from shardckpt.storage.direct import count_parallel_files
from shardckpt.storage.sums import sum_shards
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave
from shardckpt.tensors.memory import synchronize_devices
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from shardckpt.chunks.items import LocalItems, Sources
    from shardckpt.chunks.merge import LocalPlan
    from shardckpt.distributed.comm import Comm
    from shardckpt.manifest.names import Lineage
    from shardckpt.mapping.base import CommonStateDict, ShardedBase
    from shardckpt.storage.file_writer import FileWriter
    from shardckpt.storage.packed_shards import PackedShards
    from shardckpt.storage.writer import CheckpointWriter
    from shardckpt.strategy import PlanContext

IndexT = TypeVar("IndexT")
ObjectT = TypeVar("ObjectT")
_FileT = TypeVar("_FileT")
#: Several files are faster than one only if each has at least this many bytes.
_MIN_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class GlobalFiles(Generic[IndexT]):
    """The part that only the main rank writes: the index and the common state.

    Attributes:
        index: The items of all ranks, as the format describes them.
        save_id: A name that no other save has.
        common: The encoded common state.
        lineage: The checkpoint that the job was resumed from, and the step.
    """

    index: IndexT
    save_id: str
    common: bytes
    lineage: Lineage


class PlannedPart:
    """The pickle of the common part of all saves by one plan, made once: most of the bytes that a process is sent.

    It holds no values, as the plan does not.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._pickle = SharedPickle(b"")

    def pickle(self, fields: dict[str, Any]) -> SharedPickle:
        """Return the pickle of the fields: the last one, if they are the same objects."""
        known = self._fields
        if known.keys() != fields.keys() or any(known[name] is not value for name, value in fields.items()):
            self._fields, self._pickle = fields, SharedPickle(pickle_value(fields))
        return self._pickle


@dataclass(kw_only=True)
class ChunkWork(ABC, Generic[IndexT, ObjectT]):
    """Everything that a rank writes; see :class:`shardckpt.strategy.BackgroundWork`. A format adds its files.

    Attributes:
        tensors: The tensors.
        keys: Their keys.
        objects: The encoded objects, by unique key.
        aliases: Further keys of stored tensors, and the key by which each is stored; the same on every rank.
        stored: The boxes of the tensors, in the same order, and the objects; None if the caller needs none.
        global_files: The files that only the main rank writes; None on the others.
        one_by_one: Whether a data file is finished before the next is begun: complete files then survive a kill.
        planned: The pickle of the fields that are not of one save alone (:attr:`own_fields`), for all works of a plan.
    """

    #: Fields that each save has its own of: its values, and its identity.
    own_fields: ClassVar[frozenset[str]] = frozenset({"tensors", "objects", "global_files"})

    tensors: list[torch.Tensor]
    keys: list[str]
    objects: Mapping[str, ObjectT]
    aliases: dict[str, str] = field(default_factory=dict)
    stored: PackedShards | None = None
    global_files: GlobalFiles[IndexT] | None = None
    one_by_one: bool = False
    planned: PlannedPart = field(default_factory=PlannedPart, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name in self.own_fields}
        shared = {name: value for name, value in vars(self).items() if name not in own and name != "planned"}
        if self.global_files is not None:  # the index is as large as all else together
            without: Any = replace(self.global_files, index=None)  # type: ignore[arg-type] # until it is received
            own["global_files"], shared["index"] = without, self.global_files.index
        return own | {"planned": self.planned.pickle(shared)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = state.pop("planned").unpickle()
        if state["global_files"] is not None:
            state["global_files"] = replace(state["global_files"], index=shared.pop("index"))
        vars(self).update(shared | state, planned=PlannedPart())

    def write(self, writer: CheckpointWriter) -> None:
        """Write all files of this rank; meanwhile sum the bits of its tensors if fingerprints are wanted."""
        synchronize_devices(self.tensors)
        if not writer.fingerprints:
            self.write_files(writer)
            return
        with ThreadPoolExecutor(1, "shardckpt-sums") as lane:
            waiting = [lane.submit(sum_shards, *found) for found in self.list_stored()]
            self.write_files(writer)
            writer.sums += [sums.result() for sums in waiting]

    @abstractmethod
    def write_files(self, writer: CheckpointWriter) -> None:
        """Write all files of this rank, each item at its planned position."""

    def write_data(
        self,
        writer: CheckpointWriter,
        files: Sequence[_FileT],
        write: Callable[[CheckpointWriter, Sequence[_FileT]], list[FileWriter]],
    ) -> list[FileWriter]:
        """Write data files by a function that writes some concurrently; return those that the caller must finish."""
        unfinished: list[FileWriter] = []
        for some in [[file] for file in files] if self.one_by_one else [files]:
            for into in unfinished:
                writer.finish(into)
            unfinished = write(writer, some)
        return unfinished

    def list_stored(self) -> list[tuple[PackedShards, list[torch.Tensor], Mapping[str, str]]]:
        """Return the boxes that this rank stores, their values, and further keys of the tensors."""
        return [] if self.stored is None else [(self.stored, self.tensors, self.aliases)]

    def record_written(self, writer: CheckpointWriter, positions: Sequence[int], objects: Sequence[str]) -> None:
        """Report the shards that the files hold, so that the commit notices shards that a subclass has left out.

        ``positions`` are the positions of the written tensors in ``tensors``, in ascending order.
        """
        if self.stored is None:
            return
        is_all = len(positions) + len(objects) == self.stored.size
        written = self.stored if is_all else self.stored.select(positions, objects)
        writer.record_shards(written)
        rounds: list[dict[str, str]] = []  # each has one further key of a tensor
        taken: Counter[str] = Counter()
        for alias, key in self.aliases.items():
            if taken[key] == len(rounds):
                rounds.append({})
            rounds[taken[key]][key] = alias
            taken[key] += 1
        for names in rounds:
            writer.record_shards(written.rename(names))


@dataclass(frozen=True)
class SavePlan(Generic[IndexT, ObjectT]):
    """A rank's part of a plan, for saves of shards with the same metadata. It holds no values.

    Attributes:
        ties: The keys of the rank that share their memory.
        tie_finder: Finds the ties of the next save.
        sources: Where the values of each box come from.
        objects: The positions of the ShardedObjects among the rank's shards, by unique key.
        sizes: The properties of each encoded object that the layout depends on, by unique key.
        nbytes: The size of all tensors, in bytes.
        files: The number of files.
        work: The rank's writes, without values.
        index: The items of all ranks; None except on the main rank.
    """

    ties: list[tuple[str, ...]]
    tie_finder: TieFinder
    sources: Sources
    objects: dict[str, int]
    sizes: dict[str, Hashable]
    nbytes: int
    files: int
    work: ChunkWork[IndexT, ObjectT]
    index: IndexT | None

    def prepare(
        self, tensors: list[torch.Tensor], objects: Mapping[str, ObjectT], common: bytes, context: PlanContext
    ) -> PreparedSave:
        """Return a save of these values by this plan; needs no other rank."""
        files = None if self.index is None else GlobalFiles(self.index, context.save_id, common, context.lineage)
        one_by_one = bool(context.file_bytes)
        work = replace(self.work, tensors=tensors, objects=objects, global_files=files, one_by_one=one_by_one)
        return PreparedSave(work, plan=self)


class ChunkSaveStrategy(AsyncSaveStrategy, Generic[IndexT, ObjectT]):
    """Plans saves of boxes in files, balanced by bytes. A format encodes objects, lays out files, makes the index.

    ``IndexT`` is the format's index, ``ObjectT`` an encoded object.

    Args:
        keep_only_main_replica: Whether only the main replica of a shard may be written. If False, any rank with a copy
            may write it, and the bytes are balanced over all ranks.
        thread_count: Number of files per rank, balanced by bytes. By default one; on file systems known to write only
            through the page cache, as many as can be written concurrently, each of at least 32 MiB.

    Attributes:
        encoding: The format's treatment of objects, for errors: ``"pickling"``.
        finds_aliases: Whether tensors that are the same memory on all ranks are stored once.
    """

    encoding: ClassVar[str] = "encoding"
    computes_fingerprints = True
    stores_all_bytes = True
    finds_aliases: bool = False

    def __init__(self, *, keep_only_main_replica: bool = True, thread_count: int | None = None) -> None:
        check_annotated(ChunkSaveStrategy.__init__, locals())
        if thread_count is not None and thread_count < 1:
            raise CheckpointingException(f"thread_count={thread_count}: a rank writes at least one file")
        self._main_only = bool(keep_only_main_replica)
        self._files = None if thread_count is None else int(thread_count)

    @property
    def agreed_options(self) -> Mapping[str, object]:
        """Whether only main replicas are written: else the ranks share the copies out, by a collective."""
        return {"keep_only_main_replica": self._main_only}

    @property
    def plan_cache_key(self) -> Hashable:
        """The key of the plan besides the shards: the class and its options."""
        return type(self), self._main_only, self._files

    @abstractmethod
    def encode_objects(
        self, objects: Mapping[str, int], shards: Sequence[ShardedBase], context: PlanContext
    ) -> dict[str, ObjectT]:
        """Return a rank's encoded objects, by unique key.

        Args:
            objects: Their positions among the shards, by unique key.
            shards: The rank's shards.
            context: The caller's options.
        """

    @abstractmethod
    def encode_common(self, common: CommonStateDict, context: PlanContext) -> bytes:
        """Return the encoded common state; called on the main rank only."""

    @abstractmethod
    def measure(self, encoded: ObjectT) -> Hashable:
        """Return the size of an encoded object in bytes, and its other fields in the index."""

    @abstractmethod
    def lay_out(
        self,
        items: LocalItems,
        objects: Mapping[str, ObjectT],
        shards: Sequence[ShardedBase],
        rank: int,
        files: int,
    ) -> tuple[ChunkWork[IndexT, ObjectT], LocalPlan]:
        """Assign a rank's items to files by bytes, and give each a position.

        Args:
            items: The rank's tensors, and the positions of its objects among the shards.
            objects: The encoded objects, by unique key.
            shards: The rank's shards.
            rank: The rank, for the names of the files.
            files: How many files.

        Returns:
            The rank's work, and its plan for the other ranks.
        """

    @abstractmethod
    def make_index(self, plans: Sequence[LocalPlan], aliases: Mapping[str, str]) -> IndexT:
        """Return the index of all ranks' plans; called on the main rank only.

        Args:
            plans: The plans of all ranks, in their order.
            aliases: Further keys of stored tensors, and the key by which each is stored.

        Raises:
            ShardingError: Ranks disagree on a tensor, its boxes do not fill it exactly, or an object has its key.
        """

    def collect(
        self, shards: Sequence[ShardedBase], aliases: Mapping[str, str], context: PlanContext
    ) -> tuple[LocalItems, dict[str, ObjectT]]:
        """Collective: return the shards that this rank stores. By default its main replicas, which needs no other rank.

        Args:
            shards: This rank's shards.
            aliases: Keys of tensors that are not stored.
            context: The ranks that save together, and the caller's options.

        Returns:
            The items, and the encoded objects by unique key.
        """
        with context.comm.local_phase("planning"):
            items = collect_items(shards, aliases)
        with context.comm.local_phase(f"{self.encoding} objects"):
            return items, self.encode_objects(items.objects, shards, context)

    def merge(
        self, work: ChunkWork[IndexT, ObjectT], plan: LocalPlan, aliases: Mapping[str, str], comm: Comm
    ) -> tuple[ChunkWork[IndexT, ObjectT], IndexT | None]:
        """Collective: make the index of all ranks' plans. By default, the main rank makes all of it.

        Args:
            work: This rank's work.
            plan: The same as the other ranks need it.
            aliases: Further keys of stored tensors, and the key by which each is stored; the same on all ranks.
            comm: The ranks that save together.

        Returns:
            This rank's work, with its parts of the index if it has any; and the index, None except on the main rank.
        """
        plans = comm.gather(plan)
        with comm.local_phase("planning for all ranks"):
            return work, self.make_index(plans, aliases) if comm.is_main else None

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: plan with all ranks, and encode the objects and the common state; no tensor is read yet.

        Args:
            shards: This rank's shards.
            common: The common state; the main rank's is stored.
            context: The ranks that save together, and the target.

        Returns:
            This rank's part of the save, to be written without other ranks.

        Raises:
            ShardingError: Ranks disagree on a tensor, its boxes do not fill it, or the format cannot hold a key, a
                dtype or a value.
        """
        comm = context.comm
        if not self._main_only:
            shards = assign_main_replicas(shards, comm)
        stored_common = self._encode_common(common, context)
        tie_finder = TieFinder()
        with comm.local_phase("looking for tied tensors"):
            ties = self._find_ties(tie_finder, shards)
        aliases = agree_on_aliases(ties, shards, comm) if self.finds_aliases else {}
        items, objects = self.collect(shards, aliases, context)
        with comm.local_phase("assigning items to files"):
            nbytes = _count_bytes(items, shards)
            files = self._count_files(nbytes, context)
            work, local_plan = self.lay_out(items, objects, shards, comm.rank, files)
        work, index = self.merge(work, local_plan, aliases, comm)
        # The plan is kept for later saves, so it holds no values: a cached plan must not keep a model in memory.
        work = replace(work, tensors=[], objects={}, aliases=aliases)
        sizes = self._measure(objects)
        plan = SavePlan(ties, tie_finder, items.sources, items.objects, sizes, nbytes, files, work, index)
        return plan.prepare(items.tensors, objects, stored_common, context)

    def replan(
        self,
        plan: SavePlan[IndexT, ObjectT],
        shards: Sequence[ShardedBase],
        common: CommonStateDict,
        context: PlanContext,
    ) -> PreparedSave | None:
        """Collective: prepare a save by an earlier plan, for shards with the same metadata.

        Args:
            plan: The plan of the earlier save, on this rank.
            shards: This rank's shards.
            common: The common state; the main rank's is stored.
            context: The ranks that save together, and the target.

        Returns:
            The save; None on all ranks if an encoded object has another size now, other tensors are tied, or another
            number of files is better.
        """
        comm = context.comm
        stored_common = self._encode_common(common, context)
        with comm.local_phase(f"{self.encoding} objects"):
            objects = self.encode_objects(plan.objects, shards, context)
            files = self._count_files(plan.nbytes, context)
            ties = self._find_ties(plan.tie_finder, shards)
        # An object of another size would move all that is behind it in the file.
        same = self._measure(objects) == plan.sizes and files == plan.files and ties == plan.ties
        if not comm.all_true(same):
            return None
        return plan.prepare(view_tensors(plan.sources, shards), objects, stored_common, context)

    def _encode_common(self, common: CommonStateDict, context: PlanContext) -> bytes:
        """Encode the common state on the main rank; the others return empty bytes. Needs no other rank."""
        with context.comm.local_phase(f"{self.encoding} the common state"):
            return self.encode_common(common, context) if context.comm.is_main else b""

    def _count_files(self, nbytes: int, context: PlanContext) -> int:
        """Return the number of files that the caller requested, or that is fastest for so many bytes."""
        if context.file_bytes:
            return max(1, -(-nbytes // context.file_bytes))
        most = nbytes // _MIN_FILE_BYTES
        # the parts of an object are sent at a time: several objects would only take more memory
        if self._files or most <= 1 or context.is_streamed or context.staging is None:
            return self._files or 1
        return min(most, count_parallel_files(context.staging))

    def _find_ties(self, finder: TieFinder, shards: Sequence[ShardedBase]) -> list[tuple[str, ...]]:
        return finder.find(shards) if self.finds_aliases else []

    def _measure(self, objects: Mapping[str, ObjectT]) -> dict[str, Hashable]:
        return {key: self.measure(encoded) for key, encoded in objects.items()}


def _count_bytes(items: LocalItems, shards: Sequence[ShardedBase]) -> int:
    """Return the bytes of the tensors that this rank stores; a sparse one is a ShardingError."""
    try:
        return sum(tensor.nbytes for tensor in items.tensors)
    except RuntimeError:  # asked only then: a question to each of many small tensors takes its time
        for shard in shards:
            if isinstance(shard, ShardedTensor) and shard.data is not None and shard.data.layout != torch.strided:
                raise ShardingError(
                    f"{shard.key!r}: its data is sparse ({shard.data.layout}), and only dense tensors are stored: give "
                    "to_dense(), or indices() and values() as tensors of their own"
                ) from None
        raise
