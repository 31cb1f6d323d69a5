"""State dicts of one rank for a drawn case, and checks that a load has filled them as the global tensors say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from shardckpt.distributed.comm import rank_and_size
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.memory import TensorInMemory, place_in_memory, squeezed
from shardckpt.testing.tensors import TensorSpec

if TYPE_CHECKING:
    from shardckpt.testing.cases import SaveLoadCase, TensorCase
    from shardckpt.testing.shard_specs import ShardSpec

COMMON = {"step": 17, "nest": {"rates": [0.1, 2, None], "name": "run"}}


def make_state_dict(batch: SaveLoadCase) -> dict[str, Any]:
    """The state that this rank saves."""
    rank, _ = rank_and_size()
    cells = [(cell, number) for cell in batch.objects for number, saver in enumerate(cell.savers) if saver == rank]
    return {
        "tensors": {case.key: saved_shards(case, rank) for case in batch.cases},
        "objects": [ShardedObject("objects", cell.value, batch.grid, cell.offset, number) for cell, number in cells],
        **COMMON,
    }


def saved_shards(case: TensorCase, rank: int) -> list[ShardedTensor]:
    """A rank's shards of one tensor, filled."""
    values = case.spec.values()
    return [_filled(case.spec, piece, piece.slice_of(values)) for piece in case.saved if piece.rank == rank]


def _filled(whole: TensorSpec, piece: ShardSpec, part: torch.Tensor) -> ShardedTensor:
    axis = None if whole.constant_axis is None or piece.flat else whole.constant_axis - piece.lead
    thin = piece.thin and axis is not None and axis >= 0
    data = squeezed(part, axis or 0) if thin else place_in_memory(part, piece.memory).view
    return describe(whole.key, piece, data.dtype, whole.shape, data)


def describe(
    key: str,
    piece: ShardSpec,
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
    """The destinations of a load.

    Attributes:
        piece: The place.
        shard: The description.
        memory: The caller's own, or None where the load allocates.
    """

    piece: ShardSpec
    shard: ShardedTensor
    memory: TensorInMemory | None


class Destinations:
    """This rank's part of a batch to load: the state dict, and the memory that it must fill."""

    def __init__(self, batch: SaveLoadCase) -> None:
        self._batch = batch
        self._rank, _ = rank_and_size()
        self.places = {
            case.key: [_destination(case, piece) for piece in case.loaded if piece.rank == self._rank]
            for case in batch.cases
        }

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
        """Every loaded element is the global tensor's, bit for bit; memory between them is unchanged."""
        for case in self._batch.cases:
            whole = case.wanted()
            for place, value in zip(self.places[case.key], loaded["tensors"].get(case.key, []), strict=True):
                check(
                    place.memory is None or value is place.memory.view,
                    f"{case.key!r}: the destination was not filled in place",
                )
                _check_filled(case, place, value, place.piece.slice_of(whole))
        mine = [cell.value for cell in self._batch.objects for loader in cell.loaders if loader == self._rank]
        check(loaded["objects"] == mine, f"objects: {loaded['objects']!r} instead of {mine!r}")
        common = {key: loaded.get(key) for key in COMMON}
        check(common == COMMON, f"common state: {common!r} instead of {COMMON!r}")

    def check_memory(self) -> None:
        """The same for a load that gives nothing back."""
        for case in self._batch.cases:
            whole = case.wanted()
            for place in self.places[case.key]:
                check(place.shard.data is not None, f"{case.key!r}: the shard got no data")
                _check_filled(case, place, cast("torch.Tensor", place.shard.data), place.piece.slice_of(whole))


def _destination(case: TensorCase, piece: ShardSpec) -> Destination:
    shape = piece.local_shape if piece.flat is None else (piece.size,)
    memory = None if piece.thin else place_in_memory(_blank(shape, case.dtype), piece.memory)
    other = case.shape != case.spec.shape
    data = None if memory is None else memory.view
    shard = describe(case.key, piece, case.dtype, case.shape, data, allow_shape_mismatch=other)
    return Destination(piece, shard, memory)


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return TensorSpec("", dtype, shape, 1234).values()


def _check_filled(case: TensorCase, place: Destination, value: torch.Tensor, expected: torch.Tensor) -> None:
    what = f"{case.spec!r}, {place.piece!r}"
    if case.dtype != case.spec.dtype:
        same = (value.dtype, tuple(value.shape)) == (expected.dtype, tuple(expected.shape))
        check(same, f"{what}: {value.dtype} {tuple(value.shape)} is not {expected.dtype} {tuple(expected.shape)}")
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
        return
    check_same(value, expected, what)
    if place.memory is not None:
        check_same(place.memory.base, place_in_memory(expected, place.piece.memory).base, f"memory around {what}")


def check_region(case: TensorCase, region: tuple[slice, ...], value: torch.Tensor) -> None:
    """Check that a region of the saved tensor has its values."""
    check_same(value, case.spec.values()[region], f"{case.spec!r}[{region}]")
