"""The zarr arrays of a checkpoint: one folder for each tensor, with ``.zarray`` and one file for each chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError, describe_invalid
from shardckpt.manifest import parse_json
from shardckpt.planning import Box, Ints
from shardckpt_zarr.compressed import check_compressor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.storage import CheckpointReader

ARRAY_FILE = ".zarray"
#: Largest size of an array's JSON that is read, in bytes; honest ones have a few hundred.
_ARRAY_LIMIT = 1 << 20
#: Most axes of an array, as in numpy.
_MOST_AXES = 64

#: "bfloat16" is Megatron's own: zarr wrote "<V2", and Megatron replaced it.
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "|b1": torch.bool,
    "|u1": torch.uint8,
    "|i1": torch.int8,
    "<i2": torch.int16,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<c8": torch.complex64,
    "<c16": torch.complex128,
}

#: A tuple here is a list in JSON.
_Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 62)], ...], Field(max_length=_MOST_AXES, strict=False)]


class _ArrayFile(BaseModel):
    """``.zarray`` of zarr's format 2; other fields are ignored."""

    model_config = ConfigDict(strict=True)

    zarr_format: int
    shape: _Shape
    chunks: _Shape
    dtype: Any
    order: str = "C"
    compressor: dict[str, Any] | None = None
    filters: list[Any] | None = None
    dimension_separator: str = "."


@dataclass(frozen=True)
class ChunkedArray:
    """A stored tensor.

    Attributes:
        key: Its key, which is the path of its folder.
        shape: Its global shape.
        chunks: Shape of every chunk; those at the end of an axis are stored in full size, too.
        compressor: The id of the chunks' compressor; ``""`` where they are the bytes of the values.
    """

    key: str
    dtype: torch.dtype
    shape: Ints
    chunks: Ints
    compressor: str

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk in bytes, when it is not compressed."""
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """The box of the full tensor."""
        return Box.from_shape(self.shape)

    def touching(self, box: Box) -> Iterator[tuple[str, Box]]:
        """Yield the file and the box of every chunk that has elements of a box; one may reach beyond the tensor."""
        if not box.volume:
            return
        axes = zip(box.offset, box.end, self.chunks, strict=True)
        for place in _walk_grid([range(start // size, (end - 1) // size + 1) for start, end, size in axes]):
            offset = tuple(index * size for index, size in zip(place, self.chunks, strict=True))
            name = ".".join(map(str, place)) or "0"  # the only chunk of a tensor without axes
            yield f"{self.key}/{name}", Box(offset, self.chunks)

    def check_chunk(self, file: str, reader: CheckpointReader) -> None:
        """Raise an error that names the tensor and the file if a chunk is missing or has another size."""
        try:
            found = reader.size(file)
        except CheckpointReplacedError:
            raise
        except CheckpointingException as exc:
            raise type(exc)(f"tensor {self.key!r}: {exc}") from exc.__cause__
        if not self.compressor and found != self.chunk_nbytes:
            raise CorruptCheckpointError(
                f"tensor {self.key!r}: {reader.directory / file} has {found:,} bytes; a chunk of shape {self.chunks} "
                f"and {self.dtype} has {self.chunk_nbytes:,}"
            )


def _walk_grid(ranges: Sequence[range]) -> Iterator[Ints]:
    """Yield the places in a grid in order. Not ``itertools.product``, which keeps all of each range in memory."""
    if not ranges:
        yield ()
        return
    for index in ranges[0]:
        for rest in _walk_grid(ranges[1:]):
            yield (index, *rest)


def read_array(key: str, reader: CheckpointReader) -> ChunkedArray:
    """Return the description of a tensor: shape, dtype and chunks.

    One that Megatron did not write, and that is stored in a way that is not read, is a CheckpointingException.
    """
    name = f"{key}/{ARRAY_FILE}"
    path = reader.directory / name
    nbytes = reader.size(name)
    if nbytes > _ARRAY_LIMIT:
        raise CorruptCheckpointError(f"tensor {key!r}: {path} has {nbytes:,} bytes, more than {_ARRAY_LIMIT:,}")
    try:
        found = _ArrayFile.model_validate(parse_json(reader.read(name)))
    except ValueError as exc:
        raise CorruptCheckpointError(f"tensor {key!r}: {path} is damaged: {describe_invalid(exc):.500}") from exc
    if len(found.shape) != len(found.chunks) or any(
        size and not chunk for size, chunk in zip(found.shape, found.chunks, strict=True)
    ):
        raise CorruptCheckpointError(f"tensor {key!r}: {path}: shape {found.shape} has chunks {found.chunks}")
    dtype = _DTYPES.get(found.dtype) if isinstance(found.dtype, str) else None
    layout = found.zarr_format, found.order, found.dimension_separator
    if layout != (2, "C", ".") or found.filters or dtype is None:
        raise CheckpointingException(
            f"tensor {key!r}: {path} has zarr_format, order and dimension_separator {layout}, filters {found.filters} "
            f"and dtype {found.dtype!r}: Megatron wrote {(2, 'C', '.')}, no filters and torch's dtypes, and only that "
            "is read; convert the array with the zarr package"
        )
    compressor = "" if found.compressor is None else str(found.compressor.get("id"))
    array = ChunkedArray(key, dtype, found.shape, found.chunks, compressor)
    if compressor:
        check_compressor(compressor, array.chunk_nbytes, f"tensor {key!r}: {path}")
    return array
