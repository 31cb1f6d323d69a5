from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from shardckpt.planning import table as columns
from shardckpt.planning.table import (
    Boxes,
    Table,
    TensorSpec,
    are_equal_in_field,
    are_full,
    compute_weights,
    concat_tables,
    count_volumes,
    find_untiled,
    fingerprint,
    fingerprint_specs,
    make_column,
    make_matrix,
    number_groups,
    sort_unique,
)
from tests.planning.cuts import CutTensor, random_cut
from tests.tables import table

if TYPE_CHECKING:
    import pytest


def _table(cuts: list[CutTensor]) -> Table:
    boxes = Boxes()
    for number, cut in enumerate(cuts):
        for offset, extent in cut.boxes:
            boxes.add(number, offset, extent)
    return boxes.table()


def _specs(cuts: list[CutTensor]) -> list[TensorSpec]:
    return [TensorSpec("tensor", f"k{number}", "float32", cut.shape) for number, cut in enumerate(cuts)]


@table("seed", range(30))
def test_boxes_that_fill_their_wholes_have_the_expected_sums(seed: int) -> None:
    """However tensors of 0 to 4 axes are cut, and the boxes spread over ranks, the ranks' sums add up to those."""
    rng = random.Random(seed)
    cuts = [random_cut(rng) for _ in range(rng.randint(0, 12))]
    specs = _specs(cuts)
    table = _table(cuts)
    rank = torch.tensor([rng.randrange(3) for _ in table.spec], dtype=torch.int64)
    parts = [fingerprint(table.rows(rank == number), compute_weights(specs)) for number in range(3)]
    parts[0] = fingerprint(table.rows(rank == 0).pad_axes(7), compute_weights(specs))
    assert are_equal_in_field(
        [sum(lane) for lane in zip(*parts, strict=True)], fingerprint_specs(specs, compute_weights(specs))
    )
    assert find_untiled(table, [cut.shape for cut in cuts]) == []


@table("seed", range(60))
def test_a_wrong_box_changes_the_sums_and_is_found_by_its_whole(seed: int) -> None:
    """A box that is missing, there twice, moved or resized is noticed, and only its own tensor is named."""
    rng = random.Random(seed)
    cuts = [random_cut(rng, empty=False) for _ in range(rng.randint(1, 8))]
    specs, shapes = _specs(cuts), [cut.shape for cut in cuts]
    number = rng.randrange(len(cuts))
    boxes = cuts[number].boxes
    place = rng.randrange(len(boxes))
    offset, extent = boxes[place]
    axis = rng.randrange(len(offset)) if offset else None
    kind = rng.choice(["missing", "twice", "moved", "longer"])
    if kind == "missing" or (axis is None and kind != "twice"):
        del boxes[place]
    elif kind == "twice" or axis is None:
        boxes.append((offset, extent))
    elif kind == "moved":
        boxes[place] = ((*offset[:axis], offset[axis] + 1, *offset[axis + 1 :]), extent)
    else:
        boxes[place] = (offset, (*extent[:axis], extent[axis] + 1, *extent[axis + 1 :]))
    assert not are_equal_in_field(
        fingerprint(_table(cuts), compute_weights(specs)), fingerprint_specs(specs, compute_weights(specs))
    )
    assert find_untiled(_table(cuts), shapes) == [number]


def test_a_hole_is_not_made_good_by_an_overlap_of_the_same_size() -> None:
    """Sums are of places, not of volumes: what is missing here does not cancel what is there twice."""
    boxes = Boxes()
    for row in (0, 1, 1, 3):
        boxes.add(0, (row, 0), (1, 7))
    assert find_untiled(boxes.table(), [(4, 7)]) == [0]


def test_the_same_boxes_of_another_whole_have_other_sums() -> None:
    """Ranks that disagree on key, dtype or global shape cannot complete each other's boxes."""
    boxes = Boxes()
    boxes.add(0, (0,), (4,))
    whole = TensorSpec("tensor", "k", "float32", (4,))
    sums = fingerprint(boxes.table(), compute_weights([whole]))
    for other in (whole._replace(key="l"), whole._replace(dtype="int32"), whole._replace(kind="object")):
        assert not are_equal_in_field(fingerprint(boxes.table(), compute_weights([other])), sums)


def test_tables_of_different_axes_are_joined() -> None:
    """Rows keep their values, and get axes of extent 1 at offset 0 where others have more axes."""
    flat, deep = Boxes(), Boxes()
    flat.add(0, (3,), (2,))
    deep.add(1, (1, 2, 3), (4, 5, 6))
    table = concat_tables([flat.table(), deep.table()])
    assert table.offset.tolist() == [[3, 0, 0], [1, 2, 3]]
    assert table.extent.tolist() == [[2, 1, 1], [4, 5, 6]]
    assert table.volume().tolist() == [2, 120]


@table("seed", range(20))
def test_few_values_by_lists_as_many_by_columns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python computes of a few values is what torch computes of many, dtype and shape included."""
    rng = random.Random(seed)
    values = make_column([rng.randint(0, 9) for _ in range(rng.randint(0, 12))])
    axes = rng.randint(0, 3)
    extents = make_matrix([tuple(rng.randint(0, 5) for _ in range(axes)) for _ in range(len(values))], axes, 1)
    shifted = extents + torch.eye(len(values), axes, dtype=torch.int64)
    tables = [
        Table(torch.arange(len(values)), torch.zeros_like(extents), extents),
        Table(torch.arange(len(values)), shifted - extents, extents),
        Table(values, torch.zeros_like(extents), extents),
    ]

    def compute() -> list[torch.Tensor | bool]:
        volumes = [count_volumes(extents), tables[0].volume()]
        return [sort_unique(values), number_groups(values.cumsum(0)), *volumes, *(are_full(t, extents) for t in tables)]

    by_lists = compute()
    monkeypatch.setattr(columns, "FEW", -1)
    for one, other in zip(by_lists, compute(), strict=True):
        if isinstance(one, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        else:
            assert one is other


def test_volumes_beyond_64_bits_wrap_as_in_a_column() -> None:
    """What a hostile index claims is computed, and refused by those who check it; it is no other error."""
    huge = torch.tensor([[1 << 62, 4], [-(1 << 62), 8]])
    assert count_volumes(huge).tolist() == huge.prod(1).tolist()
