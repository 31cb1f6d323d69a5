"""Requested shards, and the boxes of files they are read from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import part_view, shard_parts
from shardckpt.tensors import is_quantized
from shardckpt_torch_checkpointing.files import LocalTensor, join_path
from shardckpt_torch_dist import NestedState

if TYPE_CHECKING:
    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import FlatPart, Ints
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_checkpointing.files import Path
    from shardckpt_torch_checkpointing.index import Index, Part

#: Bytes that the tensors of an object may have, whatever the sizes of the files.
_FREE = 1 << 20


class Read(NamedTuple):
    """A box to read.

    Attributes:
        key: The tensor's key, for errors.
        local: The tensor in a file.
        start: Where the box begins in it, along every axis.
        target: The tensor to fill; its shape is the box's.
    """

    key: str
    local: LocalTensor
    start: Ints
    target: torch.Tensor

    @property
    def place(self) -> tuple[str, int]:
        """File and offset, to read each file from front to back."""
        return self.local.file, self.local.offset

    def run(self, reader: CheckpointReader) -> None:
        """Read it."""
        self.local.read(reader, self.start, self.target, self.key)


class RequestedTensor:
    """A shard of a tensor, and where its elements are.

    It is a CorruptCheckpointError if not all elements are stored, or a file has another tensor than is declared.
    """

    def __init__(self, shard: ShardedTensor, index: Index) -> None:
        # what is no plain memory is filled by the core, from another tensor
        self._shard = shard.without_data() if is_quantized(shard.data) else shard
        self._found: list[tuple[FlatPart, list[Part]]] = []
        for part in shard_parts(self._shard):
            if not shard.allow_shape_mismatch:
                index.check_stored(shard.key, part.box)
            self._found.append((part, index.find_parts(shard.key, part.box)))

    def reads(self) -> list[Read]:
        """Return what to read; a shard without data gets CPU memory."""
        shard = self._shard
        shard.init_data("cpu")
        reads = []
        for part, stored in self._found:
            view = part_view(shard, part)
            if shard.allow_shape_mismatch:
                view.zero_()
            reads += [Read(shard.key, each.local, each.start, view[each.box.within(part.box)]) for each in stored]
        return reads

    def value(self) -> torch.Tensor | None:
        """Return the tensor, after everything was read."""
        return self._shard.data


class RequestedObject:
    """An object that is put together from values and from entire tensors."""

    def __init__(self, key: str, nested: NestedState, tensors: dict[str, RequestedTensor | _EntireTensor]) -> None:
        self._key = key
        self._nested = nested
        self._tensors = tensors

    def reads(self) -> list[Read]:
        """Return what to read."""
        return [read for tensor in self._tensors.values() for read in tensor.reads()]

    def value(self) -> Any:
        """Return the object, after everything was read."""
        return self._nested.build(self._key, {key: tensor.value() for key, tensor in self._tensors.items()})


class _EntireTensor:
    """A tensor of one rank, which is not a part of another."""

    def __init__(self, key: str, local: LocalTensor) -> None:
        self._key = key
        self._local = local
        self._target = torch.empty(0, device="cpu")

    def reads(self) -> list[Read]:
        self._target = torch.empty(self._local.shape, dtype=self._local.dtype, device="cpu")
        return [Read(self._key, self._local, (0,) * self._target.dim(), self._target)]

    def value(self) -> torch.Tensor:
        return self._target


def plan_shard(shard: ShardedBase, index: Index) -> RequestedTensor | RequestedObject:
    """Return what a requested shard is read from.

    What is neither a tensor nor an object, or an object of another number of ranks than saved, is a ShardingError.
    """
    if isinstance(shard, ShardedTensor):
        return RequestedTensor(shard, index)
    if not isinstance(shard, ShardedObject):
        raise ShardingError(f"{shard.key!r} is a {type(shard).__name__}: only tensors and objects can be loaded")
    contents = index.per_rank.get(shard.key)
    if contents is not None:
        if tuple(shard.global_shape) != (len(contents),):
            raise ShardingError(
                f"{shard.key!r} has an object for each of {len(contents)} ranks, and one of a grid of "
                f"{tuple(shard.global_shape)} is requested"
            )
        return _plan_content(shard.key, contents[sorted(contents)[shard.global_offset[0]]], index)
    described = [index.tensors[key] for key in index.nested.tensors(shard.key)]
    _check_size(shard.key, sum(math.prod(t.shape) * t.dtype.itemsize for t in described), index)
    tensors = (ShardedTensor.from_global_shape(tensor.key, tensor.dtype, tensor.shape) for tensor in described)
    return RequestedObject(shard.key, index.nested, {tensor.key: RequestedTensor(tensor, index) for tensor in tensors})


def _plan_content(key: str, content: dict[Path, Any], index: Index) -> RequestedObject:
    """Return what an item of one rank is read from."""
    found = {path: value for path, value in content.items() if isinstance(value, LocalTensor)}
    _check_size(key, sum(math.prod(t.shape) * t.dtype.itemsize for t in found.values()), index)
    values = [path for path in content if path not in found]
    nested = NestedState(values, {join_path(path): path for path in found}, content.__getitem__)
    tensors = {join_path(path): _EntireTensor(join_path(path), value) for path, value in found.items()}
    return RequestedObject(key, nested, {**tensors})


def _check_size(key: str, nbytes: int, index: Index) -> None:
    """Refuse the tensors of an object that are much larger than the files: they name the same bytes repeatedly."""
    if nbytes > _FREE + 2 * index.nbytes:
        raise CorruptCheckpointError(f"{key!r} has tensors of {nbytes:,} bytes, and all files have {index.nbytes:,}")
