"""Sums of a tensor's bits: the same however it is cut, and others for other bits."""

from __future__ import annotations

import math
import random
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.tensors import fingerprint
from shardckpt.tensors.fingerprint import finish_fingerprint, sum_boxes
from shardckpt.testing.tensors import DTYPES
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Rows shorter than a block, as long as one, of several blocks, along several axes, of many; none; none but a scalar.
SHAPES = [
    (),
    (0,),
    (1,),
    (5, 3),
    (2, 3, 256),
    (7, 1300),
    (3, 5, 7, 11),
    (4, 6, 30, 5),
    (1, 9000),
    (1_100_001,),
    (5000, 2),
    (0, 4),
    (4, 0),
]


def _sum_box(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    return sum_boxes([(tensor, offset, shape)])[0]


def _bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(tuple(shape))


def _cut(shape: Sequence[int], rng: random.Random, depth: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box at random places, over and over: offsets and extents."""
    boxes = [(tuple([0] * len(shape)), tuple(shape))]
    for _ in range(depth):
        offset, extent = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape)) if shape else -1
        if axis < 0 or extent[axis] < 2:
            boxes.append((offset, extent))
            continue
        at = rng.randrange(1, extent[axis])
        left, right, moved = list(extent), list(extent), list(offset)
        left[axis], right[axis], moved[axis] = at, extent[axis] - at, offset[axis] + at
        boxes += [(offset, tuple(left)), (tuple(moved), tuple(right))]
    return boxes


def _sum_of_boxes(tensor: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    totals = [0, 0]
    views = [
        tensor[tuple(slice(low, low + size) for low, size in zip(offset, extent, strict=True))]
        for offset, extent in boxes
    ]
    parts = sum_boxes([(view, offset, tensor.shape) for view, (offset, _) in zip(views, boxes, strict=True)])
    for part in parts:
        totals = [total + each for total, each in zip(totals, part, strict=True)]
    return [total % (1 << 64) for total in totals]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@table("dtype", DTYPES, ids=str)
def test_sums_do_not_depend_on_the_cut(dtype: torch.dtype) -> None:
    """Boxes of any form, cut along any axes, add up to the sums of the tensor: of all dtypes, also without elements."""
    rng = random.Random(str(dtype))
    for shape in SHAPES:
        tensor = _bits(shape, dtype)
        whole = _sum_box(tensor, (0,) * len(shape), shape)
        for depth in (1, 8):
            assert _sum_of_boxes(tensor, _cut(shape, rng, depth)) == [*whole], (shape, depth)


def _sum_slowly(rows: list[bytes]) -> tuple[int, ...]:
    """The sums of a tensor's rows, in Python's integers, as the module's docstring describes them."""
    word = (1 << 64) - 1
    weights = fingerprint._MATRIX.tolist()
    totals = [0, 0]
    for row, data in enumerate(rows):
        count = -(-len(data) // 1024)
        for block in range(count):
            part = data[block * 1024 : block * 1024 + 1024]
            part += bytes(len(part) % 2)
            words = [int.from_bytes(part[low : low + 2], "little", signed=True) for low in range(0, len(part), 2)]
            products = [
                sum(word * int(line[column]) for word, line in zip(words, weights, strict=False)) for column in range(4)
            ]
            for number in range(2):
                mixed = (row * count + block) ^ (fingerprint._SEEDS[number].item() & word)
                for factor in fingerprint._MIX:
                    mixed = ((mixed ^ (mixed >> 33)) * factor) & word
                mixed = (mixed ^ (mixed >> 33)) | 1
                factors = fingerprint._FACTORS[number].tolist()
                totals[number] += mixed * sum(x * y for x, y in zip(products, factors, strict=True))
    return tuple(total & word for total in totals)


@table(
    ("shape", "width"),
    [((1,), 4), ((3, 5), 60), ((4, 256), 1024), ((2, 3, 270), 1080), ((700,), 2800), ((3, 9, 40), 1440)],
)
def test_sums_are_those_that_the_docstring_describes(shape: tuple[int, ...], width: int) -> None:
    """Another program can compute fingerprints: a plain one of 20 lines gets the same."""
    tensor = _bits(shape, torch.int32)
    data = bytes(tensor.view(torch.uint8).view(-1).tolist())
    rows = [data[low : low + width] for low in range(0, len(data), width)]
    assert _sum_box(tensor, (0,) * len(shape), shape) == _sum_slowly(rows)


def test_every_bit_counts() -> None:
    """A tensor with any one bit flipped, or with the signs of any two elements flipped, has other sums."""
    tensor = _bits((3, 71), torch.float32)
    nbits = 8 * tensor.nbytes
    flipped = tensor.view(torch.uint8).view(1, -1).repeat(nbits, 1)
    for bit in range(nbits):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    pairs = [(first, second) for first in range(60) for second in range(first)]
    signs = tensor.view(1, -1).repeat(len(pairs), 1)
    for number, pair in enumerate(pairs):
        signs[number, list(pair)] *= -1
    changed = [*flipped.view(torch.float32).view(-1, 3, 71), *signs.view(-1, 3, 71)]
    sums = sum_boxes([(each, (0, 0), tensor.shape) for each in [tensor, *changed]])
    assert len(set(sums)) == 1 + nbits + len(pairs)


def test_places_count() -> None:
    """Elements, rows or blocks that change places change the sums, and so does a box at another place."""
    tensor = _bits((8, 512), torch.float32)
    sums = _sum_box(tensor, (0, 0), tensor.shape)
    assert _sum_box(tensor.roll(1, 0), (0, 0), tensor.shape) != sums
    assert _sum_box(tensor.roll(1, 1), (0, 0), tensor.shape) != sums
    assert _sum_box(tensor.roll(256, 1), (0, 0), tensor.shape) != sums
    boxes = [(tensor[:1, :1], (row, column), tensor.shape) for row in range(8) for column in range(512)]
    assert len(set(sum_boxes(boxes))) == len(boxes)


@table("side", [3, 40, 300])
@table("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_a_transposed_tensor_has_other_sums(dtype: torch.dtype, side: int) -> None:
    """A square weight that a loader has transposed by mistake shows, also where rows are shorter than a block."""
    tensor = _bits((side, side), dtype)
    zeros = torch.zeros(side, side, dtype=dtype)
    zeros[0, 1] = 1  # nothing but one element, which moves to [1, 0]
    for values in (tensor, zeros):
        assert len(set(sum_boxes([(each, (0, 0), values.shape) for each in (values, values.T)]))) == 2


@table("shape", [(40, 3, 5), (6, 700)])
def test_two_swapped_elements_show(shape: tuple[int, ...]) -> None:
    """Any two elements of other values that change places change the sums: 500 pairs, of one block and of several."""
    rng = random.Random(0)
    tensor = torch.arange(float(math.prod(shape))).view(shape)
    swapped = tensor.view(1, -1).repeat(500, 1)
    for values in swapped:
        pair = rng.sample(range(tensor.numel()), 2)
        values[pair] = values[pair[::-1]]
    boxes = [(values.view(shape), (0,) * len(shape), shape) for values in [tensor, *swapped]]
    assert len(set(sum_boxes(boxes))) == 1 + len({tuple(values.tolist()) for values in swapped})


def test_columns_of_short_rows_are_summed_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box of few columns of many short rows adds up with the others, made wide piece by piece."""
    monkeypatch.setattr(fingerprint, "_AT_ONCE", 4)
    tensor = _bits((50, 70, 9), torch.int32)
    boxes = [((0, 0, 0), (50, 70, 4)), ((0, 0, 4), (50, 33, 5)), ((0, 33, 4), (50, 37, 5))]
    assert _sum_of_boxes(tensor, boxes) == [*_sum_box(tensor, (0, 0, 0), tensor.shape)]


def test_columns_are_made_wide_one_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a box of few columns, the memory that its zeros take does not grow with it."""
    monkeypatch.setattr(fingerprint, "_AT_ONCE", 4)
    living: set[int] = set()
    most = 0

    def watched(*sizes: int, **options: Any) -> torch.Tensor:
        nonlocal most
        made = torch.zeros(*sizes, **options)
        if options.get("dtype") == torch.int8:
            living.add(id(made))
            weakref.finalize(made, living.discard, id(made))
            most = max(most, len(living))
        return made

    monkeypatch.setattr(fingerprint, "torch", SimpleNamespace(**{**vars(torch), "zeros": watched}))
    _sum_box(torch.ones(500, 4, dtype=torch.int32), (0, 0), (500, 9))
    assert 0 < most <= 2


def test_a_large_box_is_summed_as_its_parts_are() -> None:
    """A box of more blocks than are summed, or multiplied, at a time has the sums of its parts, with zeros or not."""
    for width in (1024, 1000):
        tensor = _bits((fingerprint._AT_ONCE + 300, width), torch.uint8)
        boxes = [((row, 0), (min(97, len(tensor) - row), width)) for row in range(0, len(tensor), 97)]
        assert _sum_of_boxes(tensor, boxes) == [*_sum_box(tensor, (0, 0), tensor.shape)]


def test_the_largest_products_are_exact() -> None:
    """Blocks of the least and the largest words have the sums of Python's integers, as have words at odd addresses."""
    for byte in (b"\x00\x80", b"\xff\x7f", b"\xff\xff"):
        data = byte * 1024
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1)
        assert _sum_box(tensor, (0, 0), (1, 2048)) == _sum_slowly([data])
        moved = torch.frombuffer(bytearray(b"x" + data), dtype=torch.uint8)[1:].view(1, -1)
        assert moved.data_ptr() % 2
        assert _sum_box(moved, (0, 0), (1, 2048)) == _sum_slowly([data])


def test_settings_of_torch_do_not_matter() -> None:
    """What lets torch multiply float32 with fewer bits leaves the sums as they are."""
    tensor = _bits((9, 700), torch.bfloat16)
    found = _sum_box(tensor, (0, 0), tensor.shape)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert _sum_box(tensor, (0, 0), tensor.shape) == found
    finally:
        torch.set_float32_matmul_precision(before)


def test_fingerprints_are_those_of_every_release() -> None:
    """Fingerprints that were stored or logged can be compared with those of later releases and other machines."""
    tensor = torch.arange(1000, dtype=torch.int32).view(10, 100)
    sums = _sum_box(tensor, (0, 0), (10, 100))
    assert finish_fingerprint("int32", (10, 100), sums) == "b7911460b2b72b29965b560f85d6dce3"
    assert finish_fingerprint("float32", (10, 100), sums) != finish_fingerprint("int32", (10, 100), sums)
    assert finish_fingerprint("int32", (100, 10), sums) != finish_fingerprint("int32", (10, 100), sums)
