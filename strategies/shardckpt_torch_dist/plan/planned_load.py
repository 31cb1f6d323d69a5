"""Load by a planner of DCP, which plans the items, and gives the tensors that they are read into."""

from __future__ import annotations

import io
import math
from collections import Counter
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType

from shardckpt.adapters import get_local_tensor
from shardckpt.archive import decode_object
from shardckpt.chunks import LateRegion, ObjectRead, check_cast
from shardckpt.errors import CorruptCheckpointError, ShardingError, UnsafePickleError, listed
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.planning import Box, refuse_cast, refuse_changed_values
from shardckpt.state_dict import list_nested_values
from shardckpt.tensors import is_quantized, kind, may_be_changed, synchronize_devices
from shardckpt_torch_dist.dialects import to_dcp_tensor
from shardckpt_torch_dist.plan.custom_planner import list_leaves, scatter_plans
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
from shardckpt_torch_dist.plan.regions import ArchiveReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import TypeGuard

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from shardckpt.mapping import ShardedBase
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext
    from shardckpt_torch_dist.dialects import StoredIndex

#: The first bytes of a torch.save archive; torch.load reads anything else as a plain pickle.
_ARCHIVE_MAGIC = b"PK\x03\x04"


class PlannedLoad:
    """The reads of one rank by a planner, whose methods are called as ``dcp.load`` calls them.

    The constructor makes the plan of this rank, without the other ranks. The engine has compared the shapes and dtypes
    of the shards with the stored ones.
    """

    def __init__(
        self, planner: ShardedLoadPlanner, wanted: Sequence[ShardedBase], index: StoredIndex, context: LoadContext
    ) -> None:
        self._planner = planner
        self._wanted = [shard for shard in wanted if not isinstance(shard, PlainObject)]
        self._index = index
        self._context = context
        metadata = make_dcp_metadata(index)
        objects = {key: BytesStorageMetadata() for key in index.objects}  # in today's spelling, too
        metadata.state_dict_metadata = {**objects, **metadata.state_dict_metadata}
        with planner.allowing(context.allow_globals):
            planner.set_up_planner(
                state_dict=list_leaves(wanted), metadata=metadata, is_coordinator=context.comm.is_main
            )
            self._plan = planner.create_local_plan()
        agreed = {(shard.key, shard.dtype) for shard in self._wanted if isinstance(shard, ShardedTensor)}
        self._destinations = CheckedPlanner(planner, index, context.allow_globals, agreed=agreed)
        self._reads: list[PlannedRead] = []

    def share(self) -> None:
        """Collective: make the plan of all ranks; until it is made, no destination changes.

        A plan that leaves out elements of a shard is a ShardingError.
        """
        comm = self._context.comm
        plans = comm.gather(self._plan)
        with comm.local_phase("planning for all ranks"):
            plans = self._planner.create_global_plan(plans) if comm.is_main else []
        plan = scatter_plans(plans, comm)
        with comm.local_phase("finishing the plan"):
            self._refuse_gaps(plan)
            plan = self._planner.finish_plan(plan)
            self._refuse_gaps(plan)
            self._reads = plan_items(plan.items, self._destinations, self._index)
        comm.sync_errors()

    def read(self) -> None:
        """Read everything into the destinations that the planner gives."""
        with self._planner.allowing(self._context.allow_globals):
            read_items(self._reads, self._destinations, self._context.reader, self._index)

    def _refuse_gaps(self, plan: LoadPlan) -> None:
        """Raise if the items of a key have fewer elements than its shards: a destination would keep what it holds."""
        planned, wanted = Counter[str](), Counter[str]()
        copies = Counter[tuple[str, tuple[int, ...]]]()
        for shard in self._wanted:
            if isinstance(shard, ShardedObject):
                wanted[shard.unique_key] = 1
            elif isinstance(shard, ShardedTensor):
                copies[shard.key, tuple(shard.global_offset)] += 1
                wanted[shard.key] += 0 if shard.allow_shape_mismatch else math.prod(shard.data_shape)
        # A shard that is planned twice must not hide another. Several shards of a rank may be one place of a tensor:
        # the number in dest_index, which does not count in a comparison, tells them apart.
        numbers: dict[Any, set[int]] = {}
        for item in plan.items:
            place = (item.dest_index, item.dest_offsets, item.lengths, item.type)
            numbers.setdefault(place, set()).add(item.dest_index.index or 0)
        for (dest, _, lengths, kind_of_item), found in numbers.items():
            times = min(len(found), max(copies[dest.fqn, tuple(dest.offset or ())], 1))
            planned[dest.fqn] += 1 if kind_of_item == LoadItemType.BYTE_IO else times * math.prod(lengths)
        if left_out := [repr(key) for key, count in wanted.items() if planned[key] < count]:
            raise ShardingError(
                f"{type(self._planner).__qualname__} leaves out all or a part of {listed(sorted(left_out))}, which "
                "would keep the values that it has: leave it out of the state dict instead"
            )


def make_dcp_metadata(
    index: StoredIndex, written: Mapping[str, Any] = MappingProxyType({}), paths: Any = None
) -> Metadata:
    """Return an index in DCP's classes.

    ``written`` are the entries of ``.metadata`` whose chunks count, instead of those of the index. ``paths`` has the
    path of each key in the saved state dict, if they are known.
    """
    entries: dict[str, Any] = {}
    for number, (key, dtype, shape) in enumerate(zip(index.keys, index.dtypes, index.shapes, strict=True)):
        chunks = written[key].chunks if key in written else None
        boxes = index.tensor(number).boxes() if chunks is None else ((each.offsets, each.sizes) for each in chunks)
        entries[key] = to_dcp_tensor(dtype, shape, boxes)
    entries |= {key: BytesStorageMetadata() for key in index.named}
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_meta=StorageMeta())


class PlannedRead(NamedTuple):
    """An item of a plan, and how it is read."""

    read: LateRegion | ObjectRead
    item: ReadItem


def plan_items(items: Iterable[ReadItem], destinations: CheckedPlanner, index: StoredIndex) -> list[PlannedRead]:
    """Return how items are read, in the order of the index; one that is not stored is an error."""
    planned = [PlannedRead(_plan_read(item, destinations, index), item) for item in items]
    return sorted(planned, key=lambda each: each.read.item)


def read_items(
    planned: Sequence[PlannedRead],
    destinations: CheckedPlanner,
    reader: CheckpointReader,
    index: StoredIndex,
) -> None:
    """Read items into the tensors that the planner gives for them.

    If the planner does nothing on ``commit_tensor``, as DCP's own, its tensors are the destinations: several threads
    fill them. Any other planner is asked for one tensor at a time, by this thread.
    """
    archives = ArchiveReader(reader, index)
    if _keeps_no_part(destinations.planner):
        tensors = [(read, item) for read, item in planned if not isinstance(read, ObjectRead)]
        regions = [read.fill(destinations.destination(item)) for read, item in tensors]
        archives.read_in_order(read for read, _ in planned if isinstance(read, ObjectRead))
        synchronize_devices(region.target for region in regions)
        archives.read_units([(region,) for region in regions])
        for (_, item), region in zip(tensors, regions, strict=True):
            destinations.note_cast(item, region.target)
    else:
        archives.read_in_order(read for read, _ in planned)
    for item, wanted in destinations.suspects:  # one after the other: a tensor of the stored dtype each
        key = item.storage_index.fqn
        source = torch.empty(tuple(item.lengths), dtype=index.dtypes[index.numbers[key]], device="cpu")
        archives.read_units([(_plan_region(item, destinations, index).fill(source),)])
        refuse_changed_values(key, source, wanted)


def _plan_read(item: ReadItem, destinations: CheckedPlanner, index: StoredIndex) -> LateRegion | ObjectRead:
    if item.type != LoadItemType.BYTE_IO:
        return _plan_region(item, destinations, index)
    key = item.storage_index.fqn
    if key not in index.objects and key not in index.named:
        raise _make_planner_error(destinations, f"the object {key!r}, which the checkpoint does not have")
    return ObjectRead(index.find_object(key), key, lambda data: destinations.load_bytes(item, io.BytesIO(data)))


def _plan_region(item: ReadItem, destinations: CheckedPlanner, index: StoredIndex) -> LateRegion:
    """Return how a tensor item is read; if it is not stored, that is a CorruptCheckpointError."""
    key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    if key not in index.numbers:
        raise _make_planner_error(destinations, f"the tensor {key!r}, which the checkpoint does not have")
    number = index.numbers[key]
    chunk = index.tensor(number).chunks.get(offset)
    if chunk is None:
        raise CorruptCheckpointError(
            f"tensor {key!r}: its chunk at {offset} is not stored: the save lost it, or "
            f"{type(destinations.planner).__qualname__} plans to read a chunk that the checkpoint does not list"
        )
    shape, start, lengths = tuple(chunk.box.shape), tuple(item.storage_offsets), tuple(item.lengths)
    if not Box(start, lengths).fits(shape):
        raise _make_planner_error(
            destinations, f"{lengths} elements at {start} of a chunk of {key!r} that has the shape {shape}"
        )
    return LateRegion(
        number,
        chunk,
        start,
        lengths == shape,
        partial(destinations.resolve_tensor, item),
        partial(destinations.commit_tensor, item),
    )


def _make_planner_error(destinations: CheckedPlanner, read: str) -> ShardingError:
    return ShardingError(f"{type(destinations.planner).__qualname__} plans to read {read}: mend its plan")


def _keeps_no_part(planner: LoadPlanner) -> TypeGuard[DefaultLoadPlanner]:
    """Return whether the planner's ``commit_tensor`` is DCP's own, which does nothing."""
    return getattr(planner.commit_tensor, "__func__", None) is DefaultLoadPlanner.commit_tensor


class CheckedPlanner:
    """A planner behind our own checks: archives and casts that our reader refuses are refused before it gets them.

    With ``allow_cast`` a cast may lose more than precision. ``agreed`` are tensors, by key, and dtypes that they may be
    cast to in any case. ``suspects`` are items whose values a cast may have changed, with the dtypes of their
    destinations.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        index: StoredIndex,
        allow_globals: tuple[Any, ...],
        *,
        allow_cast: bool = False,
        agreed: Collection[tuple[str, torch.dtype]] = (),
    ) -> None:
        self.planner = planner
        self._index = index
        self._allow = allow_globals
        self._allow_cast = allow_cast
        self._agreed = agreed
        self.suspects: list[tuple[ReadItem, torch.dtype]] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Give an object's archive to the planner, if our reader accepts it."""
        if not isinstance(self.planner, ShardedLoadPlanner):  # that one checks by its own allow-list
            archive, what = value.getvalue(), f"object {read_item.storage_index.fqn!r}"
            if not archive.startswith(_ARCHIVE_MAGIC):
                raise UnsafePickleError(
                    f"{what} is not a torch.save archive: the planner would load it as a plain pickle, and run what "
                    "it names; nothing was run. Save it as a tensor or a plain value"
                )
            decode_object(archive, what, self._allow)
        self.planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to fill, ready for this thread."""
        target = self.destination(read_item)
        synchronize_devices([target])
        return target

    def destination(self, item: ReadItem) -> torch.Tensor:
        """Return the tensor to fill, which its device may still be using."""
        target = self.planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise ShardingError(
                f"tensor {item.dest_index.fqn!r}: the planner gave a destination of shape {tuple(target.shape)} for "
                f"{tuple(item.lengths)} elements"
            )
        self._refuse_part_of_quantized(item, target)
        key, stored = item.storage_index.fqn, self._get_stored_dtype(item)
        if not self._may_lose_values(item, target):
            refuse_cast(key, stored, target.dtype)
        check_cast(key, stored, target.dtype)
        return target

    def _get_stored_dtype(self, item: ReadItem) -> torch.dtype:
        return self._index.dtypes[self._index.numbers[item.storage_index.fqn]]

    def _may_lose_values(self, item: ReadItem, target: torch.Tensor) -> bool:
        """Return whether the caller of the load has allowed any cast of an item to the dtype of its destination."""
        return self._allow_cast or (item.storage_index.fqn, target.dtype) in self._agreed

    def _refuse_part_of_quantized(self, item: ReadItem, target: torch.Tensor) -> None:
        """Raise if the planner narrows a quantized tensor, and does nothing with the part when it is filled."""
        if not _keeps_no_part(self.planner):
            return
        lengths, failure = tuple(item.lengths), ""
        try:
            found = [self.planner.lookup_tensor(item.dest_index)]
        except Exception as exc:  # noqa: BLE001 - it resolves by names of its own: any of its tensors may be meant
            failure = f" (which of them cannot be told: lookup_tensor raised {type(exc).__name__}: {exc})"
            found = [get_local_tensor(each) for each in self._list_tensors()]
        quantized = [whole for whole in found if is_quantized(whole)]
        # if lookup_tensor has failed, a plain target may be a copy of a part, though one of the tensors has its shape
        is_known = is_quantized(target) or not failure
        if not quantized or (is_known and any(tuple(whole.shape) == lengths for whole in quantized)):
            return
        # a buffer of the planner's own, or a part of a plain tensor, is the same each time; a copy is not
        if is_quantized(target) or self.planner.resolve_tensor(item).data_ptr() != target.data_ptr():
            described = " or ".join(dict.fromkeys(f"{tuple(whole.shape)} of a {kind(whole)}" for whole in quantized))
            raise ShardingError(
                f"tensor {item.dest_index.fqn!r}: {type(self.planner).__qualname__} fills {lengths} of the "
                f"{described}{failure}, and a part of it is a copy, or has the scales of all: pass "
                "planner=shardckpt_torch_dist.ShardedLoadPlanner() to dcp.load, which fills it whole, or load into a "
                "plain tensor, and quantize that"
            )

    def _list_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the state dict that the planner fills, if it keeps one as DCP's planners do."""
        leaves = list_nested_values(getattr(self.planner, "state_dict", {}))
        return [each for each in leaves if isinstance(each, torch.Tensor)]

    def note_cast(self, item: ReadItem, target: torch.Tensor) -> None:
        """Note an item that has been read, if its destination's dtype may have changed a value."""
        if not self._may_lose_values(item, target) and may_be_changed(target, self._get_stored_dtype(item)):
            self.suspects.append((item, target.dtype))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Tell the planner that the tensor is filled."""
        self.note_cast(read_item, tensor)
        self.planner.commit_tensor(read_item, tensor)
