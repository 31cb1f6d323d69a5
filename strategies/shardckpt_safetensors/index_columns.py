"""Read and check the columns of the index; names, dtypes and shapes are decoded on first use."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import FEW
from shardckpt_safetensors.dtypes import parse_dtype
from shardckpt_safetensors.names import Lazy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning import Ints
    from shardckpt.storage import Columns
    from shardckpt_safetensors.names import Strings

_MAX_AXES = 64
#: Limit on a tensor's elements, checked here, and on its bytes, checked in ``index.py`` when boxes are read. Products
#: of sizes below it are exact in float64. A size of 0 counts as 1.
SIZE_LIMIT = 2.0**53


class TensorColumns(NamedTuple):
    """The tensors of an index, in columns.

    Attributes:
        keys: The names of the tensors, decoded on first use.
        dtypes: The dtypes, decoded on first use.
        shapes: The global shapes, decoded on first use.
        axes: The numbers of axes: integers of the stored dtype, of shape (tensors,).
        extents: The global shapes as a matrix: integers of the stored dtype, of shape (tensors, most axes). A row of a
            tensor with fewer axes ends with ones.
        bounds: int64 of shape (tensors + 1,): the boxes of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
    """

    keys: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Ints]
    axes: torch.Tensor
    extents: torch.Tensor
    bounds: torch.Tensor


def read_tensors(columns: Columns, strings: Strings, dtypes: Sequence[str]) -> TensorColumns:
    """Return the tensors of a file, after a check of all columns that need no decoding.

    Args:
        strings: The strings of the file, two of which make a tensor's name.
        dtypes: The names of dtypes in the file's header, which the column ``tensor_dtype`` numbers.
    """
    name_pairs = read_column(columns, "tensor", (-1, 2), len(strings))
    count = len(name_pairs)
    dtype_numbers = read_column(columns, "tensor_dtype", (count,), len(dtypes))
    axes = read_column(columns, "tensor_axes", (count,), _MAX_AXES + 1)
    fewest, most = find_limits(axes) if count else (0, 0)
    extents = read_column(columns, "tensor_shape", (count, most))
    if fewest < most:
        is_axis = torch.arange(most, device="cpu") < axes.view(-1, 1)
        check_column(
            bool((is_axis | (extents == 1)).all()),
            "tensor_shape",
            "has a size other than 1 behind a tensor's last axis",
        )
    check_column(are_below_limit(extents), "tensor_shape", "has too many elements")
    ends = read_column(columns, "tensor_end", (count,)).long()
    bounds = torch.cat([ends.new_zeros(1), ends])
    check_column(bool((bounds[:-1] <= bounds[1:]).all()), "tensor_end", "does not ascend")
    return TensorColumns(
        Lazy(count, lambda: strings.names("tensor", name_pairs)),
        Lazy(count, lambda: _decode_dtypes(dtypes, dtype_numbers)),
        Lazy(count, lambda: _decode_shapes(extents, axes)),
        axes,
        extents,
        bounds,
    )


def join_tensors(parts: Sequence[TensorColumns]) -> TensorColumns:
    """Return the tensors of several files as one index, file by file; their boxes are in the same order."""
    count, most = sum(len(part.keys) for part in parts), max((part.extents.shape[1] for part in parts), default=0)
    extents = torch.ones(count, most, dtype=torch.int64, device="cpu")
    bounds = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
    first = boxes = 0
    for part in parts:
        rows = slice(first, first := first + len(part.keys))
        extents[rows, : part.extents.shape[1]] = part.extents.long()
        bounds[rows.start + 1 : rows.stop + 1] = part.bounds[1:] + boxes
        boxes += int(part.bounds[-1])
    return TensorColumns(
        Lazy(count, lambda: [*chain.from_iterable(part.keys for part in parts)]),
        Lazy(count, lambda: [*chain.from_iterable(part.dtypes for part in parts)]),
        Lazy(count, lambda: [*chain.from_iterable(part.shapes for part in parts)]),
        torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(part.axes.long() for part in parts)]),
        extents,
        bounds,
    )


def read_column(columns: Columns, name: str, shape: Ints, below: int | None = None) -> torch.Tensor:
    """Return a column in its stored dtype, uint8 to int64, after a check of its shape and values.

    Args:
        shape: The expected shape; -1 stands for any size.
        below: An exclusive upper bound of every value. No value may be negative.
    """
    column = read_unchecked(columns, name, shape)
    low, high = find_limits(column)
    if low < 0:
        raise CorruptCheckpointError(f"its column {name!r} has the value {low}, expected 0 or more")
    if below is not None and high >= below:
        raise CorruptCheckpointError(f"its column {name!r} has the value {high}, expected less than {below}")
    return column


def find_limits(column: torch.Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value of a column; 0 and -1 if the column is empty."""
    count = column.numel()
    if count <= FEW:  # for a few values, Python is faster than a call of torch
        values: list[int] = column.view(-1).tolist() if count else []
        return min(values, default=0), max(values, default=-1)
    low, high = column.aminmax()
    return int(low), int(high)


def read_unchecked(columns: Columns, name: str, shape: Ints) -> torch.Tensor:
    """Return a column after a check of its shape alone; the arguments are as for :func:`read_column`."""
    column = columns.stored(name)
    actual = column.shape
    if len(actual) != len(shape) or any(size not in (-1, has) for size, has in zip(shape, actual, strict=True)):
        expected = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise CorruptCheckpointError(f"its column {name!r} is of shape {tuple(actual)}, expected ({expected})")
    return column


def are_below_limit(sizes: torch.Tensor) -> bool:
    """Return whether the product of each row of sizes, of shape (tensors, sizes), is below ``SIZE_LIMIT``."""
    if not len(sizes):
        return True
    # the largest size of each column bounds all products, mostly far below the limit
    bound = math.prod(max(size, 1) for size in sizes.amax(0).tolist())
    return bound < SIZE_LIMIT or bool((multiply_sizes(sizes) < SIZE_LIMIT).all())


def multiply_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """Return the product of each row of sizes as float64; a size of 0 counts as 1."""
    return sizes.clamp(min=1).double().prod(1)


def check_column(is_sound: bool, name: str, fault: str) -> None:
    """Raise CorruptCheckpointError with the fault of a column unless the column is sound."""
    if not is_sound:
        raise CorruptCheckpointError(f"its column {name!r} {fault}")


def _decode_dtypes(names: Sequence[str], numbers: torch.Tensor) -> list[torch.dtype]:
    """Return the dtype of each tensor by the number of its name; each name is parsed once."""
    listed = numbers.tolist()
    dtypes = {number: parse_dtype(names[number]) for number in set(listed)}
    return [dtypes[number] for number in listed]


def _decode_shapes(extents: torch.Tensor, axes: torch.Tensor) -> list[Ints]:
    """Return the global shape of each tensor: its row of the matrix, as far as it has axes."""
    return [tuple(row[:count]) for row, count in zip(extents.tolist(), axes.tolist(), strict=True)]
