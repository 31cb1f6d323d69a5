"""What a rank holds after several splits, compared with what torch's own placements cut."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from shardckpt.errors import ShardingError
from shardckpt.planning.placements import Split, compute_local_shape, find_held_runs, list_held_boxes, make_empty_box
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = (0, 1, 2, 5, 7, 8, 12)
STEPS = [(count, factor) for count in (1, 2, 3) for factor in (1, 2, 3)]


def _cut(whole: torch.Tensor, split: Split) -> torch.Tensor:
    """What torch's placement leaves of a tensor."""
    place = Shard(split.dim) if split.factor == 1 else _StridedShard(split.dim, split_factor=split.factor)
    parts, _ = place._split_tensor(whole, split.count, with_padding=False)
    return parts[split.index]


def _chains(dims: tuple[int, ...]) -> Iterator[list[Split]]:
    """All ranks' splits of a mesh whose dimensions cut these axes one after the other."""
    for steps in product(STEPS, repeat=len(dims)):
        for indices in product(*(range(count) for count, _ in steps)):
            yield [Split(d, n, i, f) for d, (n, f), i in zip(dims, steps, indices, strict=True)]


def _assembled(whole: torch.Tensor, splits: list[Split]) -> torch.Tensor:
    """The local tensor, put together from the pieces."""
    shape = tuple(whole.shape)
    local = torch.full(compute_local_shape(shape, splits), -1)
    for piece in list_held_boxes(shape, splits):
        assert 0 not in piece.box.shape
        here = tuple(slice(a, a + n) for a, n in zip(piece.place, piece.box.shape, strict=True))
        local[here] = whole[tuple(slice(a, a + n) for a, n in zip(piece.box.offset, piece.box.shape, strict=True))]
    return local


@table("dims", [(0,), (0, 0), (1, 0), (0, 1)])
@table("size", SIZES)
def test_the_pieces_are_what_torch_cuts(size: int, dims: tuple[int, ...]) -> None:
    """Any chain of plain and strided splits leaves, element by element, the local tensor that torch's would."""
    whole = torch.arange(size * 3).view(size, 3)
    for splits in _chains(dims):
        expected = whole
        for split in splits:
            expected = _cut(expected, split)
        assert torch.equal(_assembled(whole, splits), expected), splits


def test_runs_that_follow_each_other_are_one() -> None:
    """FSDP2 over tensor parallelism, strided and then plain, is one run a rank, as is any split that cuts nothing."""
    assert find_held_runs((8,), [Split(0, 2, 1, factor=2)]) == (((2, 4), (6, 8)),)
    assert find_held_runs((8,), [Split(0, 2, 1, factor=2), Split(0, 2, 1)]) == (((6, 8),),)
    assert find_held_runs((8, 3), [Split(0, 1, 0, factor=4)]) == (((0, 8),), ((0, 3),))


def test_strides_along_two_axes_are_a_grid_of_boxes() -> None:
    """Pieces come in the order of the local tensor's elements, each with its place there."""
    found = list_held_boxes((4, 4), [Split(0, 2, 1, factor=2), Split(1, 2, 0, factor=2)])

    assert [(piece.box.offset, piece.place) for piece in found] == [
        ((1, 0), (0, 0)),
        ((1, 2), (0, 1)),
        ((3, 0), (1, 0)),
        ((3, 2), (1, 1)),
    ]
    assert {piece.box.shape for piece in found} == {(1, 1)}


def test_a_scalar_is_one_piece_and_an_empty_tensor_none() -> None:
    """0-D tensors have a box without axes; a box inside the global shape stands for an empty local tensor."""
    assert [(piece.box.shape, piece.place) for piece in list_held_boxes((), [])] == [((), ())]
    assert list_held_boxes((2, 3), [Split(0, 4, 3)]) == []
    assert make_empty_box((2, 3), [Split(0, 4, 3)]) == ((2, 0), (0, 3))
    assert make_empty_box((5, 0), [Split(0, 2, 1)]) == ((3, 0), (2, 0))


@table("split", [Split(1, 2, 0), Split(-1, 2, 0), Split(0, 2, 2), Split(0, 2, -1), Split(0, 2, 0, 0)])
def test_a_step_that_does_not_exist_is_refused(split: Split) -> None:
    """An axis that the tensor lacks, a shard behind the last, or no block at all is an error that says which."""
    with pytest.raises(ShardingError, match=rf"Split\(dim={split.dim}"):
        list_held_boxes((4,), [split])
