from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.planning.boxes import Box, intersect
from shardckpt.planning.coverage import find_hole, find_overlap
from shardckpt.planning.lookup import BoxFinder


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape of 0 to 3 axes and boxes that tile it, cut at random and shuffled."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    boxes = [Box.from_shape(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        low, high = list(box.shape), list(box.shape)
        low[axis], high[axis] = cut, box.shape[axis] - cut
        start = list(box.offset)
        start[axis] += cut
        boxes += [Box(box.offset, tuple(low)), Box(tuple(start), tuple(high))]
    return shape, draw(st.permutations([box for box in boxes if box.volume]))


@given(tilings())
def test_a_tiling_has_neither_overlap_nor_hole(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Boxes that fill a tensor exactly pass, however they are cut."""
    shape, boxes = case
    assert find_overlap(boxes) is None
    assert find_hole(shape, boxes) is None


@given(tilings(), st.data())
def test_a_box_taken_out_is_found_as_a_hole(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """A missing box is noticed, and the region named is in it."""
    shape, boxes = case
    lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    hole = find_hole(shape, boxes)
    assert hole is not None
    assert intersect(hole, lost) == hole
    assert all(intersect(hole, box) is None for box in boxes)


@given(tilings(), st.data())
def test_a_box_put_in_twice_is_found_as_an_overlap(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """A box that meets another is noticed, and what both have is named."""
    _, boxes = case
    extra = data.draw(st.sampled_from(boxes))
    overlap = find_overlap([*boxes, extra])
    assert overlap is not None
    assert overlap.common == extra


@given(tilings(), st.data())
def test_a_finder_finds_all_boxes_that_touch(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """The quick look-up gives what comparing with every box gives."""
    shape, boxes = case
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(shape, start, strict=True))
    wanted = Box(start, extent)
    slow = {(n, intersect(box, wanted)) for n, box in enumerate(boxes) if intersect(box, wanted) is not None}
    assert set(BoxFinder(boxes).touching(wanted)) == slow
