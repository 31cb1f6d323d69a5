"""Destinations that cannot be filled region by region (quantized, above all): read into a plain tensor first."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError
from shardckpt.planning import part_view
from shardckpt.tensors import check_outward_dtype, fill, inner_tensors, is_quantized, synchronize_devices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.mapping import ShardedTensor
    from shardckpt.planning import FlatPart


class StagedDestination:
    """The ``data`` of a ShardedTensor, and a plain CPU tensor that its items are read into first.

    The plain tensor lives from the first item that is resolved until the last one is committed, in any order and in any
    threads. Then the destination is filled from it. If an item fails, the destination stays as it was.

    Args:
        shard: The ShardedTensor.
        destination: Its ``data``.
        items: How many items it is read by.
    """

    def __init__(self, shard: ShardedTensor, destination: torch.Tensor, items: int) -> None:
        if is_quantized(destination):
            check_outward_dtype(shard.key, destination)
        self._shard = shard
        self._destination = destination
        self._missing = items
        self._plain: torch.Tensor | None = None
        self._lock = threading.Lock()

    def view(self, part: FlatPart) -> torch.Tensor:
        """Return the view of the plain tensor that the items of a part are read into."""
        with self._lock:
            if self._plain is None:
                self._plain = self._allocate()
            return part_view(dataclasses.replace(self._shard, data=self._plain), part)

    def is_open(self) -> bool:
        """Return whether the plain tensor is allocated."""
        return self._plain is not None

    def commit(self) -> None:
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
        make = torch.zeros if self._shard.allow_shape_mismatch else torch.empty
        return make(self._shard.data_shape, dtype=self._destination.dtype, device="cpu")

    def _fill(self, plain: torch.Tensor) -> None:
        fill(self._shard.key, self._destination, plain)
        synchronize_devices([self._destination])  # this thread's stream is not the caller's


class StagedPart(NamedTuple):
    """A part of a staged destination."""

    staged: StagedDestination
    part: FlatPart

    def view(self) -> torch.Tensor:
        """Return the view of the plain tensor that its items are read into."""
        return self.staged.view(self.part)


def check_no_partial_overlap(shards: Iterable[ShardedTensor]) -> None:
    """Refuse destinations that are views of one quantized tensor.

    The scales of the tensor belong to all of its views: to quantize one changes the values of the others.

    Args:
        shards: The shards with quantized destinations.

    Raises:
        ShardingError: Two destinations share some of their memory, but not all of it.
    """
    owned = [(shard.key, tuple(_spans(shard.data))) for shard in shards if shard.data is not None]
    reach: _Owned | None = None  # the span, of those seen so far, that ends last
    for found in sorted(_Owned(span, key, spans) for key, spans in owned for span in spans):
        if reach is None or not reach.span.overlaps(found.span):
            reach = found
        elif found.all_spans != reach.all_spans:
            raise ShardingError(
                f"{reach.key!r} and {found.key!r} would be loaded into views of one quantized tensor, whose scales "
                "belong to both: describe the tensor as one shard, or load into plain tensors and quantize those "
                "yourself"
            )
        else:
            reach = max(reach, found, key=lambda owned: owned.span.end)


class _Span(NamedTuple):
    """A range of memory [start, end) that holds a tensor's elements, and any bytes between them."""

    device: str
    start: int
    end: int

    def overlaps(self, later: _Span) -> bool:
        """Return whether a span that begins at or after this one shares memory with it."""
        return self.device == later.device and later.start < self.end


class _Owned(NamedTuple):
    """A span of a destination, with the destination's key and all its spans."""

    span: _Span
    key: str
    all_spans: tuple[_Span, ...]


def _spans(tensor: torch.Tensor) -> Iterable[_Span]:
    """Yield the memory of a plain tensor, or of the inner tensors of a wrapper, at any depth."""
    if is_quantized(tensor) or hasattr(tensor, "__tensor_flatten__"):
        for inner in inner_tensors(tensor).values():
            yield from _spans(inner)
    elif tensor.numel() and tensor.device.type != "meta":
        reach = sum(step * (size - 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        yield _Span(str(tensor.device), start, start + (reach + 1) * tensor.element_size())


__all__ = ["StagedDestination", "StagedPart", "check_no_partial_overlap"]
