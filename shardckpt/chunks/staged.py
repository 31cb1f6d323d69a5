"""Destinations that cannot be filled region by region (quantized, above all): read into a plain tensor first."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError
from shardckpt.planning.boxes import part_view
from shardckpt.tensors.memory import synchronize_devices
from shardckpt.tensors.wrappers import check_destination, dequantize, fill, inner_tensors, is_quantized

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.planning.boxes import FlatPart


class StagedDestination:
    """The ``data`` of a ShardedTensor, and a plain CPU tensor that its items are read into first.

    The plain tensor lives from the first item that is resolved until the last one is committed, in any order and in any
    threads. Then the destination is filled from it; if it ``keeps``, elements that no item has keep their values. If an
    item fails, the destination stays unchanged.
    """

    def __init__(self, shard: ShardedTensor, destination: torch.Tensor, items: int, *, keeps: bool = False) -> None:
        if is_quantized(destination):
            check_destination(shard.key, destination)
        self._shard = shard
        self._destination = destination
        self._missing = items
        self._keeps = keeps
        self._plain: torch.Tensor | None = None
        self._lock = threading.Lock()

    def view(self, part: FlatPart, place: tuple[slice, ...] = ()) -> torch.Tensor:
        """Return the view of the plain tensor that the items of a part, or one of them at its place, are read into."""
        with self._lock:
            if self._plain is None:
                self._plain = self._allocate()
            return part_view(dataclasses.replace(self._shard, data=self._plain), part)[place]

    def commit(self, _view: torch.Tensor | None = None) -> None:
        """Note that an item is read; after the last one, fill the destination."""
        with self._lock:
            self._missing -= 1
            if self._missing or self._plain is None:
                return
            plain, self._plain = self._plain, None
        self._fill(plain)

    def zero_if_empty(self) -> None:
        """Fill the destination with zeros if no item is read into it (its shape may differ from the stored one)."""
        if not self._missing and self._destination.numel():
            self._fill(self._allocate())

    def _allocate(self) -> torch.Tensor:
        if self._keeps:
            return dequantize(self._destination).to("cpu").contiguous()
        make = torch.zeros if self._shard.allow_shape_mismatch else torch.empty
        return make(self._shard.data_shape, dtype=self._destination.dtype, device="cpu")

    def _fill(self, plain: torch.Tensor) -> None:
        fill(self._shard.key, self._destination, plain)
        synchronize_devices([self._destination])  # this thread's stream is not the caller's


def needs_staging(destination: torch.Tensor, stored: torch.dtype) -> bool:
    """Return whether stored values must go through a plain tensor to get into a destination."""
    if is_quantized(destination):
        return True
    return destination.is_neg() and destination.dtype != stored  # torch loses signs in a cast into a negated view


class _Memory(NamedTuple):
    """Addresses [start, end) of a device that hold a tensor's elements, and any bytes between them."""

    device: str
    start: int
    end: int

    def begins_in(self, other: _Memory) -> bool:
        """Return whether it begins in other memory, which begins no later."""
        return self.device == other.device and self.start < other.end


class _InnerMemory(NamedTuple):
    """The memory of one inner tensor of a destination, and of all of them."""

    memory: _Memory
    key: str
    whole: tuple[_Memory, ...]


def check_no_partial_overlap(shards: Iterable[ShardedTensor]) -> None:
    """Refuse destinations that are views of one quantized tensor: that share some of their memory, but not all of it.

    The scales of the tensor belong to all of its views: to quantize one changes the values of the others.
    """
    destinations = [(shard.key, tuple(_list_memory(shard.data))) for shard in shards if shard.data is not None]
    ordered = sorted(_InnerMemory(memory, key, whole) for key, whole in destinations for memory in whole)
    # In the order of their starts, one overlaps an earlier one only if it overlaps the one that ends last.
    last: _InnerMemory | None = None
    for each in ordered:
        if last is None or not each.memory.begins_in(last.memory):
            last = each
        elif each.whole != last.whole:
            raise ShardingError(
                f"{last.key!r} and {each.key!r} would be loaded into views of one quantized tensor, whose scales "
                "belong to both: describe the tensor as one shard, or load into plain tensors and quantize those "
                "yourself"
            )
        elif each.memory.end > last.memory.end:
            last = each


def _list_memory(tensor: torch.Tensor) -> Iterable[_Memory]:
    """Yield the memory of a plain tensor, or of the inner tensors of a wrapper, at any depth."""
    if is_quantized(tensor) or hasattr(tensor, "__tensor_flatten__"):
        for inner in inner_tensors(tensor).values():
            yield from _list_memory(inner)
    elif tensor.numel() and tensor.device.type != "meta":
        reach = sum(step * (size - 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        yield _Memory(str(tensor.device), start, start + (reach + 1) * tensor.element_size())
