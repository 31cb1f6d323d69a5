"""The columns of the index: read one by one, and those of tensors together; names and shapes when they are needed."""

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

_MOST_AXES = 64
#: What the bytes of a tensor, sizes of 0 left out, must be below. Floats compute products up to here exactly.
COUNTABLE = 2.0**53


class TensorColumns(NamedTuple):
    """The tensors of an index, in columns.

    Attributes:
        keys: Their names.
        shapes: Their global shapes.
        axes: Their numbers of axes, of shape (tensors,).
        extents: Their shapes, of shape (tensors, axes), with 1 along the axes that a tensor does not have.
        bounds: int64 of shape (tensors + 1,): the boxes of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
    """

    keys: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Ints]
    axes: torch.Tensor
    extents: torch.Tensor
    bounds: torch.Tensor


def read_tensors(columns: Columns, strings: Strings, dtypes: Sequence[str]) -> TensorColumns:
    """Return the tensors of a file: names, dtypes and shapes are decoded when they are asked for."""
    pairs = read_column(columns, "tensor", (-1, 2), len(strings))
    count = len(pairs)
    codes = read_column(columns, "tensor_dtype", (count,), len(dtypes))
    axes = read_column(columns, "tensor_axes", (count,), _MOST_AXES + 1)
    least, width = find_limits(axes) if count else (0, 0)
    extents = read_column(columns, "tensor_shape", (count, width))
    if least < width:
        lacked = torch.arange(width, device="cpu") >= axes.view(-1, 1)
        require(bool((~lacked | (extents == 1)).all()), "tensor_shape", "has a size of an axis too many")
    require(are_countable(extents), "tensor_shape", "has too many elements")
    ends = read_column(columns, "tensor_end", (count,)).long()
    bounds = torch.cat([ends.new_zeros(1), ends])
    require(bool((bounds[:-1] <= bounds[1:]).all()), "tensor_end", "does not ascend")
    return TensorColumns(
        Lazy(count, lambda: strings.names("tensor", pairs)),
        Lazy(count, lambda: _parse_dtypes(dtypes, codes)),
        Lazy(count, lambda: _trim(extents, axes)),
        axes,
        extents,
        bounds,
    )


def join_tensors(parts: Sequence[TensorColumns]) -> TensorColumns:
    """Return the tensors of several files, whose boxes follow each other in the same order."""
    count, width = sum(len(part.keys) for part in parts), max((part.extents.shape[1] for part in parts), default=0)
    extents = torch.ones(count, width, dtype=torch.int64, device="cpu")
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
    """Return a column in its stored dtype, uint8 to int64, after a check of its values.

    The file must have it, in the given shape; -1 stands for any size.
    """
    found = read_unchecked(columns, name, shape)
    low, high = find_limits(found)
    if low < 0:
        raise CorruptCheckpointError(f"its column {name!r} has {low}")
    if below is not None and high >= below:
        raise CorruptCheckpointError(f"its column {name!r} has {high}, expected less than {below}")
    return found


def find_limits(column: torch.Tensor) -> tuple[int, int]:
    """Return the smallest and the largest value; 0 and -1 if there is none."""
    count = column.numel()
    if count <= FEW:
        values: list[int] = column.view(-1).tolist() if count else []
        return min(values, default=0), max(values, default=-1)
    low, high = column.aminmax()
    return int(low), int(high)


def read_unchecked(columns: Columns, name: str, shape: Ints) -> torch.Tensor:
    """Return a column in its stored dtype, whatever its values; the arguments are those of :func:`read_column`."""
    found = columns.stored(name)
    actual = found.shape
    if len(actual) != len(shape) or any(size not in (-1, has) for size, has in zip(shape, actual, strict=True)):
        expected = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise CorruptCheckpointError(f"its column {name!r} is of shape {tuple(actual)}, expected ({expected})")
    return found


def are_countable(extents: torch.Tensor) -> bool:
    """Return whether tensors have few enough elements, sizes of 0 left out, to count them exactly."""
    if not len(extents):
        return True
    # the largest size of each axis first: with those no tensor has more
    largest = math.prod(max(size, 1) for size in extents.amax(0).tolist())
    return largest < COUNTABLE or bool((count_elements(extents) < COUNTABLE).all())


def count_elements(extents: torch.Tensor) -> torch.Tensor:
    """Return the products of sizes as floats, sizes of 0 left out."""
    return extents.clamp(min=1).double().prod(1)


def require(fine: bool, name: str, fault: str) -> None:
    """Raise CorruptCheckpointError with the fault of a column unless all is fine."""
    if not fine:
        raise CorruptCheckpointError(f"its column {name!r} {fault}")


def _parse_dtypes(names: Sequence[str], codes: torch.Tensor) -> list[torch.dtype]:
    found = codes.tolist()
    known = {code: parse_dtype(names[code]) for code in set(found)}
    return [known[code] for code in found]


def _trim(extents: torch.Tensor, axes: torch.Tensor) -> list[Ints]:
    return [tuple(row[:count]) for row, count in zip(extents.tolist(), axes.tolist(), strict=True)]
