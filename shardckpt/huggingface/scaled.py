"""Dequantize weights of 8-bit floats with block scales while they are read.

This is the scheme of DeepSeek-V3 and of transformers' ``quant_method: fp8``: a matrix ``x.weight_scale_inv`` has one
value for each block of 128 x 128 of ``x.weight`` (``weight_block_size``), and the weight is their product in float32.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.huggingface.dtypes import is_unpacked_float
from shardckpt.storage.scatter import StoredArray, read_box
from shardckpt.tensors.wrappers import copy_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.scatter import Source

SCALE_ENDING = "_scale_inv"
#: Suffixes of the scales of other schemes, which need not be factors of blocks.
_OTHER_SUFFIXES = ("_scale", "_scale_2")
_BLOCK = (128, 128)
#: Elements that are dequantized at a time, about 1 MiB in float32.
_ELEMENTS = 1 << 18
_AXES = 2


class Scaled(NamedTuple):
    """A stored matrix with block scales, or a stack of them along leading axes.

    ``weight`` has the 8-bit values, ``scale`` one value for each block, and ``block`` the rows and columns of a block.
    """

    weight: StoredArray
    scale: StoredArray
    block: tuple[int, int]

    def check(self, name: str) -> None:
        """Raise :class:`CorruptCheckpointError` unless there is one floating-point scale for each block."""
        shape, (rows, columns) = self.weight.shape, self.block
        expected = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)) if len(shape) >= _AXES else ()
        if self.scale.shape != expected or not expected or not is_unpacked_float(self.scale.dtype):
            raise CorruptCheckpointError(
                f"{name!r} of shape {shape} needs scales of shape {expected} for blocks of {rows} x {columns}, floats, "
                f"and {name + SCALE_ENDING!r} has {self.scale.shape} of {self.scale.dtype}"
            )

    def read(self, source: Source, start: Ints, target: torch.Tensor, what: str) -> None:
        """Fill a tensor with the dequantized values from an index on, a few rows at a time; ``what`` is its key."""
        rows, columns = target.shape[-2:]
        step = max(1, _ELEMENTS // max(1, columns))
        for index in product(*map(range, target.shape[:-2])):
            lead = tuple(base + place for base, place in zip(start, index, strict=False))
            for row in range(0, rows, step):
                part = target[index][row : row + step]
                copy_values(part, self._values(source, lead, (start[-2] + row, start[-1]), part.shape, what))

    def _values(self, source: Source, lead: Ints, corner: tuple[int, int], shape: Any, what: str) -> torch.Tensor:
        """Return a dequantized box of one matrix, in float32."""
        ones = (1,) * len(lead)
        weight = torch.empty((*ones, *shape), dtype=self.weight.dtype, device="cpu")
        read_box(source, self.weight, (*lead, *corner), weight, what)
        # the first block that the box touches, and the number of blocks, along each axis
        first = tuple(place // size for place, size in zip(corner, self.block, strict=True))
        spans = zip(corner, shape, self.block, first, strict=True)
        counts = (-(-(place + length) // size) - base for place, length, size, base in spans)
        scale = torch.empty((*ones, *counts), dtype=torch.float32, device="cpu")
        read_box(source, self.scale, (*lead, *first), scale, what + SCALE_ENDING)
        factors = scale.view(scale.shape[-2:])
        for axis, (place, base, length) in enumerate(zip(corner, first, shape, strict=True)):
            size = self.block[axis]
            factors = factors.repeat_interleave(size, axis).narrow(axis, place - base * size, length)
        return weight.view(weight.shape[-2:]).float() * factors


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of a block by a model's ``config.json``; 128 x 128 if it says nothing."""
    quantization = config.get("quantization_config")
    found = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if found is None:
        return _BLOCK
    if not isinstance(found, list) or len(found) != _AXES or not all(type(n) is int and n > 0 for n in found):
        raise CorruptCheckpointError(f"config.json: weight_block_size {found!r} is not two numbers above 0")
    return found[0], found[1]


def refuse_other_schemes(name: str, names: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ShardingError if a folder of these names and ``config.json`` quantizes a tensor by another scheme."""
    # a cast of 8-bit values without their scales would be wrong
    scales = [name + ending for ending in _OTHER_SUFFIXES if name + ending in names]
    if scales or config.get("quantization_config"):
        raise ShardingError(
            f"{name!r} is quantized, and {name + SCALE_ENDING!r} is not there"
            f"{f' (but {scales})' if scales else ''}: only 8-bit floats with block scales can be dequantized; "
            "load it in its stored dtype"
        )
