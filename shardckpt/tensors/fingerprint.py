"""Sums of a tensor's bits that do not depend on how the tensor is cut: each box adds its own, in any order.

The bytes of a global tensor lie in rows, each along as few of its last axes as have 1024 bytes, and each row in blocks
of 1024 bytes, the last of a row with zeros behind it. The words of a block, of two bytes as signed little-endian
integers, are multiplied with a matrix of 4 columns of random integers from -2^28 to 2^28 - 1. The 4 products are
multiplied with random numbers of 64 bits, added, and multiplied with a random odd number of the block's position. The
sum of that over all blocks, modulo 2^64, is one sum of the tensor; other random numbers give the second. All of this is
linear in the words: words outside a box count as zeros, a word with one byte in a box as that byte, and the sums of
boxes that fill a tensor are those of the tensor. All of it is exact, since float64 has every integer up to 2^53 and 512
products are at most 2^52: so processors, numbers of threads, orders of additions and releases of torch do not matter.

**Odds.** The random numbers are always the same, so whoever wants two tensors with the same sums can make them: this
is no cryptographic hash. For tensors that were made without regard to these numbers, count over all choices of them.
Let two tensors of one shape differ in a block, and let 2^v be the largest power of two that divides the differences of
all its words: v is at most 15, and 0 where the lowest bit of a word differs. The differences of all 4 products are
multiples of 2^(v + j) for at most one choice of the matrix in 2^4j, j up to 29; after that only where they are 0, for
one in 2^116. Else let 2^k be the largest power that divides all four, and D the one that is an odd multiple of it, f
its factor, and m the number of the block's position. Other differences add a part with f, which is f B, one with m, and
a constant: for each m, a sum is equal for at most 2^i choices of f in 2^64, where 2^i divides m D + B. Where no other
block differs, i is k; else it is k + n or more for at most one m in 2^(n - 1), so that on average a sum is equal for at
most 65 choices in 2^(64 - k). Both sums, whose f and m are their own, are equal for one in 2^(115 - 2k). Over all j
that is at most one in 2^(114 - 2v). The worst case is v = 15, where nothing but signs of numbers differs: one in 2^84;
for most differences v is 0 or little more, and the odds are one in 2^114 or little more. Elements that change places
are such a difference. The key is not in the sums: fingerprints are stored and compared by key, so tensors that change
places show.
"""

from __future__ import annotations

import hashlib
import math
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.tensors.memory import plain_cpu, tensor_bytes, tensor_bytes_of_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Bytes of a row that are multiplied with the matrix together, in words of two. Float64 has their products exactly.
_BLOCK, _WORD = 1024, 2
_COLUMNS = 4
#: Blocks that are multiplied at a time: as float64 they take four times their bytes, and stay in a cache of a MiB.
_IN_CACHE = 256
#: Blocks that are summed at a time: fewer cost calls of torch, and the zeros of more would cost memory.
_AT_ONCE = 4096
#: Multipliers of MurmurHash3's finalizer, which spreads positions over all 64 bits.
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)

_Box = tuple[torch.Tensor, "Sequence[int]", "Sequence[int]"]


def sum_boxes(boxes: Sequence[_Box]) -> list[tuple[int, int]]:
    """Return the addends of each box in the sums of its global tensor: two numbers below 2^64, to be added modulo 2^64.

    A box has its values, where it begins in the global tensor along every axis, and the global shape. The values are
    any tensor that :func:`plain_cpu` accepts (one that is not contiguous is copied), and may lack leading axes of
    extent 1. A tensor whose values cannot be read is a ShardingError.
    """
    sums = torch.zeros(len(boxes), 2, dtype=torch.int64, device="cpu")
    # Small boxes of one form are multiplied together: a call of torch takes longer than to sum one of them. Numbers of
    # boxes and the positions of their first blocks, by form and by the byte of a block at which they begin.
    forms: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], tuple[_Form, dict[int, tuple[list[int], list[int]]]]]
    forms = {}
    for number, (tensor, offset, shape) in enumerate(boxes):
        kind = tensor.dtype, tensor.shape, tuple(shape)
        found = forms.get(kind)
        if found is None:
            found = forms[kind] = _Form.of(*kind), {}
        form, starts = found
        if form.is_cut:
            for wide in _widen(_view_bytes(tensor, form), (*offset[:-1], offset[-1] * form.itemsize), form):
                (added,) = sum_boxes([wide])  # one at a time: all of them have the rows' whole width
                sums[number] += torch.tensor([*map(_as_int64, added)], device="cpu")
        elif form.height * form.width:
            base, start = form.place(offset)
            if start not in starts:
                starts[start] = [], []
            numbers, bases = starts[start]
            numbers.append(number)
            bases.append(base)
    # Used again for all pieces: the system would take long to give new memory for each.
    memory = torch.empty(_AT_ONCE * _BLOCK if forms else 0, dtype=torch.int8, device="cpu")
    for form, starts in forms.values():
        for start, (numbers, bases) in starts.items():
            together = max(1, _AT_ONCE // (form.height * form.count_blocks(start)))
            for low in range(0, len(numbers), together):
                some = numbers[low : low + together]
                firsts = torch.tensor(bases[low : low + together], device="cpu").view(-1, 1)
                data = _join_bytes([boxes[number][0] for number in some]).view(len(some), form.height, form.width)
                sums[some] = sum(_sum_piece(data, firsts, piece, memory) for piece in form.cut(start))
    # two lists and as many tuples: a list for each box, too, would make the garbage collector look at all of torch
    first, second = sums.view(torch.uint64).t().tolist()
    return list(zip(first, second, strict=True))


def finish_fingerprint(dtype: str, shape: Sequence[int], sums: Sequence[int]) -> str:
    """Return the fingerprint of a tensor of a dtype (``"bfloat16"``), from both sums of all its boxes, modulo 2^64."""
    text = f"{dtype} {list(shape)} {' '.join(str(number % (1 << 64)) for number in sums)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Form(NamedTuple):
    """A box's form, and the rows of it and of its tensor: the properties that it shares with boxes at other places.

    Attributes:
        itemsize: Bytes of an element.
        extent: The box's extent, along all axes of the tensor.
        shape: The tensor's shape.
        axis: The first axis along a row.
        is_cut: Whether a row's bytes do not lie together: the box lacks some along a later axis.
        height: Number of rows of the box.
        width: Bytes of each.
        unit: Bytes of an index of ``axis``.
        strides: By how many blocks the position changes along each axis before ``axis``.
    """

    itemsize: int
    extent: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int
    is_cut: bool
    height: int
    width: int
    unit: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, dtype: torch.dtype, extent: Sequence[int], shape: tuple[int, ...]) -> _Form:
        """Return the form of boxes of a tensor; ``extent`` may lack leading axes."""
        itemsize, axis = dtype.itemsize, max(len(shape) - 1, 0)
        shape = shape or (1,)
        extent = (1,) * (len(shape) - len(extent)) + tuple(extent)
        while axis and math.prod(shape[axis:]) * itemsize < _BLOCK:
            axis -= 1
        unit = math.prod(shape[axis + 1 :]) * itemsize
        blocks = -(-shape[axis] * unit // _BLOCK)
        strides = tuple(math.prod(shape[place + 1 : axis]) * blocks for place in range(axis))
        is_cut = 0 not in extent and extent[axis + 1 :] != shape[axis + 1 :]
        height = math.prod(extent[:axis])
        return cls(itemsize, extent, shape, axis, is_cut, height, extent[axis] * unit, unit, strides)

    def place(self, offset: Sequence[int]) -> tuple[int, int]:
        """Return the position of a box's first block, and the byte in it at which the box begins."""
        if not any(offset):
            return 0, 0
        block, start = divmod(offset[self.axis] * self.unit, _BLOCK)
        return sum(map(mul, offset, self.strides)) + block, start

    def count_blocks(self, start: int) -> int:
        """Return the number of blocks of a row that have bytes of a box."""
        return -(-(start + self.width) // _BLOCK)

    def cut(self, start: int) -> Iterator[_Piece]:
        """Cut the rows of a box that begins at a byte of a block into pieces of at most :data:`_AT_ONCE` blocks."""
        blocks = self.count_blocks(start)
        # Rows that are shorter than a block have fewer bytes to multiply.
        nbytes = _BLOCK if blocks > 1 else -(-(start + self.width) // 8) * 8
        columns = min(blocks, _AT_ONCE)
        height = _AT_ONCE // columns
        for low in range(0, self.height, height):
            high = min(low + height, self.height)
            rows = self._place_rows(low, high)
            for first in range(0, blocks, columns):
                last = min(first + columns, blocks)
                left, right = max(first * _BLOCK - start, 0), min(last * _BLOCK - start, self.width)
                positions = (rows[:, None] + torch.arange(first, last, device="cpu")).flatten()
                yield _Piece(low, high, left, right, 0 if first else start, nbytes, positions)

    def _place_rows(self, low: int, high: int) -> torch.Tensor:
        """Return the positions of the first blocks of some rows, int64, relative to the box's first."""
        left, positions = (
            torch.arange(low, high, device="cpu"),
            torch.zeros(high - low, dtype=torch.int64, device="cpu"),
        )
        for size, stride in zip(self.extent[: self.axis][::-1], self.strides[::-1], strict=True):
            positions += left % size * stride
            left = left.div(size, rounding_mode="floor")
        return positions


class _Piece(NamedTuple):
    """A part of a box's rows that is multiplied at a time.

    Attributes:
        low: The first row.
        high: The row after the last.
        left: The first byte of each row.
        right: The byte after the last.
        begin: Zeros before these bytes, in the first block.
        nbytes: Bytes of a block.
        positions: The positions of its blocks, row by row, relative to the box's first.
    """

    low: int
    high: int
    left: int
    right: int
    begin: int
    nbytes: int
    positions: torch.Tensor


def _view_bytes(tensor: torch.Tensor, form: _Form) -> torch.Tensor:
    """Return the bytes of a box as int8, of the box's extent, with as many along the last axis as an element has."""
    return _join_bytes([tensor]).view(*form.extent[:-1], form.extent[-1] * form.itemsize)


def _widen(data: torch.Tensor, offset: tuple[int, ...], form: _Form) -> Iterator[_Box]:
    """Yield boxes of int8 with the bytes of one whose rows are cut, and with zeros that fill the rows' last axes."""
    axis, shape = form.axis, (*form.shape[:-1], form.shape[-1] * form.itemsize)
    lead, inner = tuple(data.shape[: axis + 1]), shape[axis + 1 :]
    # A box of few columns of many has many zeros: they are made for a part of it at a time.
    if max(lead) > 1 and math.prod(lead) * form.unit > _AT_ONCE * _BLOCK:
        along = lead.index(max(lead))
        low, moved = 0, list(offset)
        for part in data.chunk(2, along):
            moved[along] = offset[along] + low
            low += part.shape[along]
            yield from _widen(part, tuple(moved), form)
        return
    wide = torch.zeros(*lead, *inner, dtype=torch.int8, device="cpu")
    part = wide
    for place in range(axis + 1, len(shape)):
        part = part.narrow(place, offset[place], data.shape[place])
    part.copy_(data)
    yield wide, (*offset[: axis + 1], *[0] * len(inner)), shape


def _join_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors one after the other, as int8; a single tensor's without a copy."""
    if len(tensors) == 1:
        return torch.frombuffer(tensor_bytes(plain_cpu(tensors[0])), dtype=torch.int8)
    found = tensor_bytes_of_each(tensors) or [tensor_bytes(plain_cpu(tensor)) for tensor in tensors]
    return torch.frombuffer(bytearray().join(found), dtype=torch.int8)


def _sum_piece(data: torch.Tensor, bases: torch.Tensor, piece: _Piece, memory: torch.Tensor) -> torch.Tensor:
    """Return the addends of a piece of each box in its sums, int64 of shape (boxes, 2).

    ``data`` has the bytes of boxes of one form, of shape (boxes, rows, bytes), ``bases`` the position of the first
    block of each, of shape (boxes, 1). Bytes that a box does not have are zeros. ``memory`` is as many bytes as are
    multiplied at a time, which are overwritten.
    """
    part = data[:, piece.low : piece.high, piece.left : piece.right]
    row_bytes = len(piece.positions) // (piece.high - piece.low) * piece.nbytes
    end = piece.begin + piece.right - piece.left
    if part.is_contiguous() and end - piece.begin == row_bytes:
        padded = part  # it needs no zeros
    else:
        padded = memory[: math.prod(part.shape[:2]) * row_bytes].view(*part.shape[:2], row_bytes)
        padded[:, :, : piece.begin] = 0
        padded[:, :, piece.begin : end] = part
        padded[:, :, end:] = 0
    products = _multiply(padded.view(-1, piece.nbytes))
    weights = _mix((bases + piece.positions) ^ _SEEDS.view(2, 1, 1))
    values = torch.stack([products.mv(factors) for factors in _FACTORS]).view_as(weights)
    return (values * weights).sum(2).t()


def _multiply(blocks: torch.Tensor) -> torch.Tensor:
    """Return the products of blocks of bytes with the matrix, int64 of shape (blocks, columns)."""
    if blocks.data_ptr() % _WORD:
        blocks = blocks.clone()  # torch reads words at their addresses
    words = blocks.view(torch.int16)
    products = torch.empty(len(words), _COLUMNS, dtype=torch.float64, device="cpu")
    cached = torch.empty(min(len(words), _IN_CACHE), words.shape[1], dtype=torch.float64, device="cpu")
    weights = _MATRIX[: words.shape[1]]
    for low in range(0, len(words), _IN_CACHE):
        rows = cached[: len(words) - low]
        rows.copy_(words[low : low + _IN_CACHE])
        torch.mm(rows, weights, out=products[low : low + _IN_CACHE])
    return products.to(torch.int64)


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Return an odd number of 64 bits for each number, as int64."""
    for factor in _MIX:
        # A right shift of int64 repeats the sign: the upper bits are cleared.
        numbers = (numbers ^ ((numbers >> 33) & 0x7FFFFFFF)) * _as_int64(factor)
    return (numbers ^ ((numbers >> 33) & 0x7FFFFFFF)) | 1


def _as_int64(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _draw(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random numbers that are the same in every process and every release."""
    nbytes = math.prod(shape) * dtype.itemsize
    drawn = hashlib.shake_256(f"shardckpt fingerprint 2 {name}".encode()).digest(nbytes)
    return torch.frombuffer(bytearray(drawn), dtype=dtype).view(shape)


# Stored by columns, which are multiplied faster than rows of 4.
_MATRIX = (_draw("matrix", torch.int32, _COLUMNS, _BLOCK // _WORD) >> 3).double().t()
_FACTORS = _draw("factors", torch.int64, 2, _COLUMNS)
_SEEDS = _draw("positions", torch.int64, 2)
