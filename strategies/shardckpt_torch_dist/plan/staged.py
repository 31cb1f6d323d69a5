"""Quantized destinations of a load, and their like: read into a plain tensor first, and filled when that is whole."""

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
    """The ``data`` of a ShardedTensor, and the plain CPU tensor that its items are read into meanwhile.

    That tensor lives from the first item that is resolved to the last that is committed, in whatever order and
    threads. Where an item fails, the destination stays as it was.
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
        """What the items of a part are read into."""
        with self._lock:
            if self._plain is None:
                self._plain = self._new()
            return part_view(dataclasses.replace(self._shard, data=self._plain), part)

    def is_open(self) -> bool:
        """Whether the plain tensor lives."""
        return self._plain is not None

    def commit(self) -> None:
        """An item is read; with the last one, fill the destination."""
        with self._lock:
            self._missing -= 1
            if self._missing or self._plain is None:
                return
            plain, self._plain = self._plain, None
        self._fill(plain)

    def zero_if_empty(self) -> None:
        """Zeros, where the checkpoint has nothing for a destination whose shape may mismatch."""
        if not self._missing and self._destination.numel():
            self._fill(self._new())

    def _new(self) -> torch.Tensor:
        make = torch.zeros if self._shard.allow_shape_mismatch else torch.empty
        return make(self._shard.data_shape, dtype=self._destination.dtype, device="cpu")

    def _fill(self, plain: torch.Tensor) -> None:
        fill(self._shard.key, self._destination, plain)
        synchronize_devices([self._destination])  # this thread's stream is not the caller's


class StagedPart(NamedTuple):
    """A part of such a destination."""

    staged: StagedDestination
    part: FlatPart

    def view(self) -> torch.Tensor:
        """What its items are read into."""
        return self.staged.view(self.part)


def check_apart(shards: Iterable[ShardedTensor]) -> None:
    """Refuse views of one quantized tensor: its scales are for all of them, and quantizing one changes the others.

    Raises:
        ShardingError: two destinations share some of their memory, not all of it.
    """
    owned = [(shard.key, tuple(_spans(shard.data))) for shard in shards if shard.data is not None]
    reach: _Owned | None = None  # of the memory seen so far, the piece that ends last
    for found in sorted(_Owned(span, key, spans) for key, spans in owned for span in spans):
        if reach is None or not reach.span.overlaps(found.span):
            reach = found
        elif found.all_spans != reach.all_spans:
            raise ShardingError(
                f"{reach.key!r} and {found.key!r} are to be loaded into views of one quantized tensor, whose scales "
                "belong to both: describe the tensor as one shard, or load into plain tensors and quantize those "
                "yourself"
            )
        else:
            reach = max(reach, found, key=lambda owned: owned.span.end)


class _Span(NamedTuple):
    """Memory that a tensor's elements lie in; bytes between them count as well."""

    device: str
    start: int
    end: int

    def overlaps(self, later: _Span) -> bool:
        """Whether a span that does not begin earlier has some of the same memory."""
        return self.device == later.device and later.start < self.end


class _Owned(NamedTuple):
    """A span of a destination, and all that this one has."""

    span: _Span
    key: str
    all_spans: tuple[_Span, ...]


def _spans(tensor: torch.Tensor) -> Iterable[_Span]:
    """The memory of a wrapper's inner tensors, of wrappers in it too, or of a plain tensor."""
    if is_quantized(tensor) or hasattr(tensor, "__tensor_flatten__"):
        for inner in inner_tensors(tensor).values():
            yield from _spans(inner)
    elif tensor.numel() and tensor.device.type != "meta":
        reach = sum(step * (size - 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        yield _Span(str(tensor.device), start, start + (reach + 1) * tensor.element_size())


__all__ = ["StagedDestination", "StagedPart", "check_apart"]
