"""A load planner for plain ``dcp.load`` that fills ShardedTensors and ShardedObjects."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shardckpt.archive import decode_object
from shardckpt.chunks import (
    StagedDestination,
    check_cast,
    check_no_partial_overlap,
    make_finder,
    match_parts,
    needs_staging,
)
from shardckpt.distributed import Comm  # noqa: F401 - DCP then keeps no process group: see tensors.torch_private
from shardckpt.errors import KeyMismatchError, listed
from shardckpt.mapping import PlainObject, ShardedTensor
from shardckpt.planning import Box, FlatPart, check_dtypes, check_shapes, part_view
from shardckpt.state_dict import map_reduce
from shardckpt.tensors import is_quantized, movable
from shardckpt_torch_dist.plan.split import RestValues, split_shards

if TYPE_CHECKING:
    import io
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardckpt.mapping import ShardedObject
    from shardckpt.planning import BoxFinder


class ShardedLoadPlanner(DefaultLoadPlanner):
    """Fills the ``data`` of ShardedTensors and ShardedObjects of any sharding, and other leaves as DCP does.

    Global shapes are checked before anything is filled; one error lists all mismatches. A ShardedTensor without data
    gets CPU memory. Objects go through the allow-list, never through plain pickle.

    A quantized destination (of a tensor class with its own ``dequantize``), in a ShardedTensor, a DTensor or by itself,
    is read into a plain CPU tensor, and quantized when its last item is committed. ``dcp.load`` reads file by file: the
    plain tensor of a destination that spans several files stays until the last of these is read.

    Args:
        *args: As for DCP's DefaultLoadPlanner.
        allow_globals: Classes and functions that objects may name, in addition to the plain ones.
        allow_dtype_cast: For ShardedTensors, as for :func:`shardckpt.dist_checkpointing.load`.
        allow_shape_mismatch: Keys of ShardedTensors that are loaded as with ``allow_shape_mismatch=True``.
        **kwargs: As for DCP's DefaultLoadPlanner.

    Example::

        dcp.load(state, storage_reader=CheckpointStorageReader(path), planner=ShardedLoadPlanner())
    """

    def __init__(
        self,
        *args: Any,
        allow_globals: Iterable[Any] = (),
        allow_dtype_cast: bool = False,
        allow_shape_mismatch: Iterable[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.allow_dtype_cast = allow_dtype_cast
        self._may_differ = frozenset(allow_shape_mismatch)
        self._allow_globals = tuple(allow_globals)
        #: The caller's tensors, and the same as they are planned: tensors that may have another shape are copies.
        self._given: list[ShardedTensor] = []
        self._tensors: list[ShardedTensor] = []
        #: ShardedObjects by unique key: several may request the same object.
        self._objects: dict[str, list[ShardedObject]] = {}
        #: The destinations of the planned tensor items, by the number in their ``dest_index``.
        self._targets: list[torch.Tensor | _StagedPart] = []
        self._to_zero: list[torch.Tensor] = []
        self._staged: list[StagedDestination] = []
        self._stored: dict[str, Any] = {}
        self._rest = RestValues({})

    @contextmanager
    def allowing(self, allow_globals: Iterable[Any]) -> Iterator[None]:
        """Allow further classes and functions in objects, and any cast, for one load of a strategy.

        The engine has compared dtypes, and refused casts that the caller of the load does not allow.
        """
        before = self._allow_globals, self.allow_dtype_cast
        self._allow_globals, self.allow_dtype_cast = (*self._allow_globals, *allow_globals), True
        try:
            yield
        finally:
            self._allow_globals, self.allow_dtype_cast = before

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Split the state dict; see :class:`torch.distributed.checkpoint.LoadPlanner`."""
        self._given, objects, rest = split_shards(state_dict)
        self._tensors = [
            dataclasses.replace(shard, allow_shape_mismatch=True) if shard.key in self._may_differ else shard
            for shard in self._given
        ]
        wanted = [shard for shard in objects if not isinstance(shard, PlainObject)]  # those are for other readers
        self._objects = map_reduce(wanted, lambda shard: shard.unique_key, lambda shard: shard, list)
        self._stored = metadata.state_dict_metadata if metadata is not None else {}
        super().set_up_planner(rest, metadata, is_coordinator)
        self._rest = RestValues(state_dict)
        for key, path in self.mappings.items():
            if isinstance(self.state_dict.get(key), torch.Tensor):
                self._rest.set(path, self.state_dict[key])  # DCP has replaced meta tensors by real ones

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan, after a check that each requested element is stored once.

        Raises:
            KeyMismatchError: Keys are not in the checkpoint.
            ShardingError: Global shapes or dtypes do not match, or destinations are views of one quantized tensor.
            CorruptCheckpointError: Stored chunks overlap, or elements are missing.
        """
        self._check()
        self._targets.clear()
        self._to_zero.clear()
        self._staged.clear()
        plan = super().create_local_plan()
        finders: dict[str, BoxFinder] = {}
        items = [item for shard in self._tensors for item in self._tensor_items(shard, finders)]
        for given, shard in zip(self._given, self._tensors, strict=True):
            given.data = shard.data  # a shard without data has memory now
        zero = torch.Size((0,))
        objects = map(MetadataIndex, sorted(self._objects))
        items += [ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero) for index in objects]
        quantized = [shard for shard in self._tensors if is_quantized(shard.data)]
        rest = self._stage_leaves(plan.items, quantized)
        check_no_partial_overlap(quantized)
        return dataclasses.replace(plan, items=[*items, *rest])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Zero the destinations that the checkpoint may not cover.

        DCP calls this after all ranks have planned: if a rank cannot plan, no destination changes.

        Args:
            new_plan: This rank's part of the global plan.

        Returns:
            The plan to read.
        """
        for target in self._to_zero:
            movable(target).zero_()  # torch has no kernel for packed dtypes, but their zeros are zero bytes
        for staged in self._staged:
            staged.zero_if_empty()
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the ShardedObjects of its key, or into its place in the caller's state dict."""
        key = read_item.dest_index.fqn
        shards = self._objects.get(key)
        loaded = decode_object(value.getvalue(), f"object {key!r}", self._allow_globals)
        if not shards:
            self._rest.set(self.mappings.get(key, (key,)), loaded)
            return
        for shard in shards:  # Megatron stores a list of the objects that share the key
            shard.data = loaded[0] if isinstance(loaded, list) and loaded else loaded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the view that an item fills: of the destination, or of the plain tensor for a quantized one."""
        if not isinstance(read_item.dest_index, _Target):
            return super().resolve_tensor(read_item)  # type: ignore[no-any-return]
        planned = self._targets[read_item.dest_index.index or 0]
        target = planned.staged.view(planned.part) if isinstance(planned, _StagedPart) else planned
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that an item is read; after the last one, a quantized destination is filled."""
        index = read_item.dest_index
        target = self._targets[index.index or 0] if isinstance(index, _Target) else None
        if isinstance(target, _StagedPart):
            target.staged.commit()
        else:
            super().commit_tensor(read_item, tensor)

    def _stage_leaves(self, items: Sequence[ReadItem], quantized: list[ShardedTensor]) -> list[ReadItem]:
        """Return DCP's items, with those for quantized leaves as items for staged destinations, which it notes."""
        # a part of such a leaf is a copy, or shares the scales of the other parts: DCP cannot fill it
        counts = Counter(item.dest_index for item in items if item.type != LoadItemType.BYTE_IO)
        targets: dict[MetadataIndex, _Target] = {}
        for index, count in counts.items():
            local = self.lookup_tensor(index)
            if is_quantized(local):
                shard = ShardedTensor.from_rank_offsets(index.fqn, local)
                quantized.append(shard)
                self._staged.append(StagedDestination(shard, local, count, keeps=True))
                whole = Box.from_shape(local.shape)
                targets[index] = _Target(index.fqn, torch.Size(whole.offset), len(self._targets))
                self._targets.append(_StagedPart(self._staged[-1], FlatPart(whole, 0)))
        return [dataclasses.replace(item, dest_index=targets.get(item.dest_index, item.dest_index)) for item in items]

    def validate_global_shapes(self, metadata: Metadata, tensors: Iterable[ShardedTensor]) -> None:
        """Check that tensors are stored, with the global shapes that are wanted; called before anything is planned.

        Args:
            metadata: The stored metadata.
            tensors: The tensors; the shape of one with ``allow_shape_mismatch`` may differ.

        Raises:
            KeyMismatchError: It names all tensors that are not stored.
            ShapeMismatchError: It names all tensors that are stored in another shape, with both shapes.
        """
        tensors = list(tensors)
        stored: Mapping[str, Any] = metadata.state_dict_metadata
        _require_all(_list_absent(tensors, stored))
        check_shapes(tensors, {shard.key: tuple(stored[shard.key].size) for shard in tensors})

    def _check(self) -> None:
        """Raise one error with all keys that are missing, or whose global shape or dtype does not match."""
        wanted = [*self._objects, *self._may_differ]
        _require_all([*_list_absent(self._tensors, self._stored), *(key for key in wanted if key not in self._stored)])
        self.validate_global_shapes(Metadata(state_dict_metadata=self._stored), self._tensors)
        dtypes = {shard.key: self._stored[shard.key].properties.dtype for shard in self._tensors}
        check_dtypes(self._tensors, dtypes, allow_cast=self.allow_dtype_cast)
        for shard in self._tensors:
            check_cast(shard.key, dtypes[shard.key], shard.dtype)

    def _tensor_items(self, shard: ShardedTensor, finders: dict[str, BoxFinder]) -> Iterable[ReadItem]:
        if shard.key not in finders:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._stored[shard.key].chunks]
            finders[shard.key] = make_finder(shard.key, boxes)
        finder = finders[shard.key]
        found = match_parts(shard, finder)
        shard.init_data("cpu")  # only now: the checkpoint has all its elements
        staged = None
        if shard.data is not None and needs_staging(shard.data, self._stored[shard.key].properties.dtype):
            staged = StagedDestination(shard, shard.data, sum(map(len, found.values())))
            self._staged.append(staged)
        for part, touched in found.items():
            target = _Target(shard.key, torch.Size(part.box.offset), len(self._targets))
            self._targets.append(part_view(shard, part) if staged is None else _StagedPart(staged, part))
            if staged is None and shard.allow_shape_mismatch:
                self._to_zero.append(part_view(shard, part))
            for chunk, common in touched:
                stored = finder.box(chunk)
                yield ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=target,
                    dest_offsets=torch.Size(common.offset_in(part.box)),
                    storage_index=MetadataIndex(shard.key, torch.Size(stored.offset)),
                    storage_offsets=torch.Size(common.offset_in(stored)),
                    lengths=torch.Size(common.shape),
                )


def _list_absent(tensors: Iterable[ShardedTensor], stored: Mapping[str, Any]) -> list[str]:
    return [shard.key for shard in tensors if not isinstance(stored.get(shard.key), TensorStorageMetadata)]


def _require_all(absent: Collection[str]) -> None:
    if absent:
        raise KeyMismatchError(f"not in the checkpoint: {listed(sorted(set(absent)))}")


class _StagedPart(NamedTuple):
    """A part of a staged destination."""

    staged: StagedDestination
    part: FlatPart


class _Target(MetadataIndex):
    """Marks an item as one of ours; its ``index`` is the destination's number."""

    # DCP sends plans to the coordinator and back, so an item can only name its destination, not hold it.
