"""State dicts of one rank for a batch, and whether a load has filled them as the global tensors say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.property.memory import Laid, bits, lay, squeezed
from tests.property.tensors import Whole

if TYPE_CHECKING:
    from tests.property.batches import Batch, Case
    from tests.property.layouts import Piece

COMMON = {"step": 17, "nest": {"rates": [0.1, 2, None], "name": "run"}}


def whereabouts() -> tuple[int, int]:
    """(rank, world size), without a process group too."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def to_save(batch: Batch) -> dict[str, Any]:
    """What this rank saves."""
    rank, _ = whereabouts()
    cells = [(cell, number) for cell in batch.objects for number, saver in enumerate(cell.savers) if saver == rank]
    return {
        "tensors": {case.key: saved_shards(case, rank) for case in batch.cases},
        "objects": [ShardedObject("objects", cell.value, batch.grid, cell.offset, number) for cell, number in cells],
        **COMMON,
    }


def saved_shards(case: Case, rank: int) -> list[ShardedTensor]:
    """A rank's shards of one tensor, filled."""
    values = case.whole.values()
    return [_filled(case.whole, piece, piece.of(values)) for piece in case.saved if piece.rank == rank]


def _filled(whole: Whole, piece: Piece, part: torch.Tensor) -> ShardedTensor:
    axis = None if whole.alike is None or piece.flat else whole.alike - piece.lead
    thin = piece.thin and axis is not None and axis >= 0
    data = squeezed(part, axis or 0) if thin else lay(part, piece.way).view
    return describe(whole.key, piece, data.dtype, whole.shape, data)


def describe(
    key: str,
    piece: Piece,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    data: torch.Tensor | None,
    *,
    allow_shape_mismatch: bool = False,
) -> ShardedTensor:
    """The ShardedTensor that stands for a piece."""
    return ShardedTensor(
        key,
        data,
        dtype,
        piece.local_shape,
        shape,
        piece.offset,
        piece.grid,
        piece.replica,
        piece.lead,
        allow_shape_mismatch,
        slice(*piece.flat) if piece.flat else None,
    )


@dataclass
class Destination:
    """What a load is to fill.

    Attributes:
        piece: The place.
        shard: The description.
        memory: The caller's own, or None where the load allocates.
    """

    piece: Piece
    shard: ShardedTensor
    memory: Laid | None


class Wanted:
    """What this rank loads of a batch: the state dict, and the memory that it must fill."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rank, _ = whereabouts()
        self.places = {case.key: _destinations(case, self._rank) for case in batch.cases}

    def state(self) -> dict[str, Any]:
        """The state dict, its keys in another order on every rank."""
        cells = [
            (c.offset, n) for c in self._batch.objects for n, loader in enumerate(c.loaders) if loader == self._rank
        ]
        keys = sorted(self.places, reverse=bool(self._rank % 2))
        return {
            "objects": [ShardedObject("objects", None, self._batch.grid, offset, n) for offset, n in cells],
            "tensors": {key: [place.shard for place in self.places[key]] for key in keys if self.places[key]},
        }

    def check(self, loaded: dict[str, Any]) -> None:
        """Every loaded element is the global tensor's, bit for bit; memory between them is as it was."""
        for case in self._batch.cases:
            whole = case.wanted()
            for place, value in zip(self.places[case.key], loaded["tensors"].get(case.key, []), strict=True):
                assert place.memory is None or value is place.memory.view, case.key
                _check_filled(case, place, value, place.piece.of(whole))
        mine = [cell.value for cell in self._batch.objects for loader in cell.loaders if loader == self._rank]
        assert loaded["objects"] == mine
        assert {key: loaded[key] for key in COMMON} == COMMON

    def check_memory(self) -> None:
        """The same for a load that gives nothing back."""
        for case in self._batch.cases:
            whole = case.wanted()
            for place in self.places[case.key]:
                assert place.shard.data is not None
                _check_filled(case, place, place.shard.data, place.piece.of(whole))


def _destinations(case: Case, rank: int) -> list[Destination]:
    return [_destination(case, piece) for piece in case.loaded if piece.rank == rank]


def _destination(case: Case, piece: Piece) -> Destination:
    shape = piece.local_shape if piece.flat is None else (piece.size,)
    memory = None if piece.thin else lay(_blank(shape, case.dtype), piece.way)
    other = case.shape != case.whole.shape
    data = None if memory is None else memory.view
    shard = describe(case.key, piece, case.dtype, case.shape, data, allow_shape_mismatch=other)
    return Destination(piece, shard, memory)


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return Whole("", dtype, shape, 1234).values()


def _check_filled(case: Case, place: Destination, value: torch.Tensor, expected: torch.Tensor) -> None:
    context = (case.whole, place.piece)
    assert (value.dtype, tuple(value.shape)) == (expected.dtype, tuple(expected.shape)), context
    if case.dtype != case.whole.dtype:
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
        return
    assert torch.equal(bits(value), bits(expected)), context
    if place.memory is not None:
        untouched = lay(expected, place.piece.way)
        assert torch.equal(bits(place.memory.base), bits(untouched.base)), context


def check_region(case: Case, region: tuple[slice, ...], value: torch.Tensor) -> None:
    """A region of the saved tensor is what it is."""
    expected = case.whole.values()[region]
    assert (value.dtype, tuple(value.shape)) == (expected.dtype, tuple(expected.shape)), (case.whole, region)
    assert torch.equal(bits(value), bits(expected)), (case.whole, region)


__all__ = ["COMMON", "Wanted", "check_region", "describe", "saved_shards", "to_save", "whereabouts"]
