from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from shardckpt.planning import box_overlaps, boxes
from shardckpt.planning.box_overlaps import Overlaps, _compare, find_overlaps, list_rows
from shardckpt.planning.boxes import Box
from shardckpt.planning.table import Boxes, make_column
from tests.planning.cuts import random_cut
from tests.tables import table

if TYPE_CHECKING:
    import pytest

    from shardckpt.planning.table import Table
    from tests.planning.cuts import CutTensor


def _brute(wanted: list[tuple[int, Box]], stored: list[tuple[int, Box]], axes: int) -> set[tuple[object, ...]]:
    found: set[tuple[object, ...]] = set()
    for one, (whole, box) in enumerate(wanted):
        for other, (number, chunk) in enumerate(stored):
            common = boxes.intersect(box, chunk) if whole == number else None
            if common is not None:
                pad = axes - len(common.offset)
                found.add((one, other, (*common.offset, *(0,) * pad), (*common.shape, *(1,) * pad)))
    return found


def _pieces(cuts: list[CutTensor]) -> list[tuple[int, Box]]:
    return [(number, Box(*box)) for number, cut in enumerate(cuts) for box in cut.boxes]


def _boxes(pieces: list[tuple[int, Box]]) -> Boxes:
    collected = Boxes()
    for number, box in pieces:
        collected.add(number, *box)
    return collected


@table(
    ("few", "pairs", "pairs_of_box"),
    [(-1, 1 << 20, 16), (-1, 7, 16), (-1, 1 << 20, -1), (-1, 7, -1), (1 << 20, 7, 16)],
    ids=["at once", "blocks", "near", "near, in blocks", "lists"],
)
@table("seed", range(25))
def test_overlaps_are_those_of_every_pair(
    seed: int, few: int, pairs: int, pairs_of_box: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes of two random cuts of the same tensors share what comparing each pair says, by columns and by lists."""
    monkeypatch.setattr(box_overlaps, "_PAIRS", pairs)
    monkeypatch.setattr(box_overlaps, "_PAIRS_OF_BOX", pairs_of_box)
    monkeypatch.setattr(box_overlaps, "FEW", few)
    rng = random.Random(seed)
    stored = [random_cut(rng) for _ in range(rng.randint(1, 6))]
    pieces = _pieces(stored)
    counts = [len(cut.boxes) for cut in stored]
    bounds = make_column([sum(counts[:number]) for number in range(len(counts) + 1)])
    wanted = [piece for piece in pieces if rng.random() < 0.4]
    for number, cut in enumerate(stored):
        corner = tuple(rng.randint(0, size) for size in cut.shape)
        wanted.append(
            (number, Box(corner, tuple(rng.randint(0, s - c) for s, c in zip(cut.shape, corner, strict=True))))
        )
    rng.shuffle(wanted)
    found = find_overlaps(_boxes(wanted).table(), _boxes(pieces).table(), bounds)
    rows = zip(*(column.tolist() for column in found), strict=True)
    got = [(one, other, tuple(offset), tuple(extent)) for one, other, offset, extent in rows if 0 not in extent]
    assert set(got) == _brute(wanted, pieces, found.offset.shape[1])
    assert len(got) == len(set(got))


@table("few", [-1, 64], ids=["columns", "lists"])
def test_rows_of_wholes_follow_each_other(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wholes without rows have none, and the others theirs in order."""
    monkeypatch.setattr(box_overlaps, "FEW", few)
    bounds = make_column([0, 2, 2, 5])
    assert list_rows(torch.tensor([2, 1, 0]), bounds).tolist() == [2, 3, 4, 0, 1]
    assert list_rows(torch.tensor([1]), bounds).tolist() == []


@table("turn", [1, -1], ids=["rows", "columns"])
def test_thousands_of_boxes_are_compared_with_the_near_ones(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand boxes wanted of four thousand stored ones make as few pairs as overlap, not eight million."""
    compared = []

    def compare(wanted: Table, one: torch.Tensor, stored: Table, other: torch.Tensor) -> Overlaps:
        compared.append(len(one))
        return _compare(wanted, one, stored, other)

    monkeypatch.setattr(box_overlaps, "_compare", compare)
    stored, wanted = (
        _boxes([(0, Box((start, 0)[::turn], (size, 4)[::turn])) for start in range(0, 8000, size)]) for size in (2, 4)
    )
    found = find_overlaps(wanted.table(), stored.table(), make_column([0, len(stored.spec)]))
    assert len(found.wanted) == 4000
    assert sum(compared) <= 8000
