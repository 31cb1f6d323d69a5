from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.mapping import ShardedTensor
from shardckpt.planning.boxes import Box, cut_flat_range, intersect, part_view, shard_parts

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_flat_parts_are_the_slice(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The boxes of a flattened slice hold exactly its elements, in its order, and are at most 2·axes - 1."""
    volume = math.prod(shape)
    start = data.draw(st.integers(0, volume))
    stop = data.draw(st.integers(start, volume))
    block = torch.arange(volume).reshape(shape)
    parts = cut_flat_range(shape, start, stop)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    found: list[int] = []
    for box, first in parts:
        assert first == len(found)
        view = block
        for axis, (low, length) in enumerate(zip(box.offset, box.shape, strict=True)):
            view = view.narrow(axis, low, length)
        found.extend(view.reshape(-1).tolist())
    assert found == list(range(start, stop))


def _boxes(dimensions: int) -> st.SearchStrategy[Box]:
    axis = st.lists(st.integers(0, 5), min_size=dimensions, max_size=dimensions).map(tuple)
    return st.builds(Box, axis, axis)


def test_a_box_of_untrusted_numbers_fits_a_tensor_or_not() -> None:
    """A box fits a shape if no axis begins or ends outside of it, and both have as many axes."""
    fitting = [((0, 1), (2, 2)), ((2, 3), (0, 0)), ((0, 0), (2, 3))]
    others = [((-1, 0), (1, 1)), ((1, 0), (-1, 1)), ((1, 0), (2, 1)), ((3, 0), (0, 1)), ((0,), (1,)), ((0, 0), (1,))]
    assert all(Box(*box).fits((2, 3)) for box in fitting)
    assert not any(Box(*box).fits((2, 3)) for box in others)
    assert Box((), ()).fits(())


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(_boxes(n), _boxes(n))))
def test_intersection_is_what_both_have(pair: tuple[Box, Box]) -> None:
    """The common box has the elements of both, and None means that they share nothing."""
    a, b = pair
    both = _elements(a) & _elements(b)
    common = intersect(a, b)
    assert (_elements(common) if common is not None else set()) == both


def _elements(box: Box) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for low, high in zip(box.offset, box.end, strict=True):
        found = {(*index, i) for index in found for i in range(low, high)}
    return found


def test_views_share_the_shards_memory() -> None:
    """A part's view has the part's shape and is the shard's own memory, for strided and flattened data too."""
    full = torch.arange(24.0).reshape(4, 6)
    strided = ShardedTensor.from_rank_offsets("w", full[:, :3], (0, 1, 2), prepend_axis_num=1)
    (part,) = shard_parts(strided)
    assert part.box == Box((1, 0, 0), (1, 4, 3))
    view = part_view(strided, part)
    assert view.shape == (1, 4, 3)
    assert view.data_ptr() == full.data_ptr()
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(9.0), (4, 3), flattened_range=slice(1, 10))
    views = [part_view(flat, part) for part in shard_parts(flat)]
    assert [view.shape for view in views] == [(1, 2), (2, 3), (1, 1)]
    views[1].zero_()
    assert flat.data is not None
    assert flat.data.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 8]


def test_box_from_shape_is_the_full_tensor() -> None:
    """The box of a shape begins at the first element of every axis, and has all elements; also without axes."""
    assert Box.from_shape(torch.Size((2, 3))) == Box((0, 0), (2, 3))
    assert Box.from_shape(()) == Box((), ())
