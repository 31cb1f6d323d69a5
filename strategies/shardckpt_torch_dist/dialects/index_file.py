"""Our own index beside ``.metadata``: the same in columns, read without an object for every chunk."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import Table, make_column, make_matrix, number_groups
from shardckpt.storage import Columns, check_file_name, pack
from shardckpt_torch_dist.dialects.stored import Chunks, Item, StoredIndex, object_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning import Ints

INDEX_FILE = "shardckpt-index.safetensors"

_LARGEST = torch.iinfo(torch.int64).max
#: Where floats count fewer elements, integers count their bytes.
_COUNTABLE = 2.0**58
#: Chunks that are checked at a time: what that takes stays in the processor's cache.
_BLOCK = 1 << 13


def dump(index: StoredIndex) -> bytes:
    """The bytes of the file.

    Args:
        index: What one of our own saves stores: every archive has one box, nothing is loose.
    """
    axes = [len(shape) for shape in index.shapes]
    width = max(axes, default=0)
    chunks, box = index.chunks, index.chunks.box.pad_axes(width)
    objects = index.objects.values()
    files = {name: number for number, name in enumerate(dict.fromkeys([*index.files, *(at.file for at in objects)]))}
    return pack(
        {
            "keys": index.keys,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in index.dtypes],
            "axes": make_column(axes),
            "shapes": make_matrix(index.shapes, width, 1),
            "bounds": index.bounds,
            "offset": box.offset[:, :width],
            "extent": box.extent[:, :width],
            "file": chunks.file,
            "start": chunks.start,
            "length": chunks.length,
            "files": list(files),
            "objects": list(index.objects),
            "object_places": make_matrix([(files[at.file], at.offset, at.length) for at in objects], 3, 0),
        }
    )


def parse(data: bytes, source: str) -> StoredIndex:
    """What the bytes of the file say.

    Args:
        data: The bytes.
        source: Named in errors.

    Raises:
        CorruptCheckpointError: they are not what :func:`dump` gives, or what they say cannot be.
    """
    try:
        return _parsed(Columns(data, source))
    except CorruptCheckpointError as exc:
        raise exc if str(exc).startswith(source) else CorruptCheckpointError(f"{source}: {exc}") from exc


def _parsed(columns: Columns) -> StoredIndex:
    files = [check_file_name(name) for name in columns.texts("files")]
    specs = _specs(columns)
    bounds = _bounds(columns, len(specs.keys))
    objects = _objects(columns, files)
    keys = [*specs.keys, *columns.texts("objects")]
    if len(set(keys)) < len(keys):
        raise CorruptCheckpointError(f"it has {len(keys)} keys, of which {len(set(keys))} differ")
    chunks = _chunks(columns, specs, bounds, len(files))
    return StoredIndex(specs.keys, specs.dtypes, specs.shapes, bounds, chunks, files, objects)


class _Specs(NamedTuple):
    """The tensors.

    Attributes:
        keys: Of them.
        dtypes: Of every one.
        shapes: Of every one.
        itemsizes: int64 of shape (n,).
        sizes: int64 of shape (n, most axes): the shapes, and 1 along axes that a tensor lacks.
        lacked: bool of the same shape: which axes those are.
        huge: Whether a box in one may have more elements than can be counted.
    """

    keys: list[str]
    dtypes: list[torch.dtype]
    shapes: list[Ints]
    itemsizes: torch.Tensor
    sizes: torch.Tensor
    lacked: torch.Tensor
    huge: bool


def _specs(columns: Columns) -> _Specs:
    keys, names = columns.texts("keys"), columns.texts("dtypes")
    if len(names) != len(keys):
        raise CorruptCheckpointError(f"it has {len(keys)} keys and {len(names)} dtypes")
    dtypes = _dtypes(names)
    axes = _integers(columns, "axes", (len(keys),))
    counts = axes.tolist()
    width = max(counts, default=0)
    sizes = _integers(columns, "shapes", (len(keys), width))
    lacked = torch.arange(width, device="cpu") >= axes.view(-1, 1)
    if min(counts, default=0) < width:
        _all_fine((sizes == 1) | ~lacked, keys, "has a size along an axis that it lacks")
    shapes = [tuple(row[:count]) for row, count in zip(sizes.tolist(), counts, strict=True)]
    huge = bool(keys) and math.prod(sizes.amax(0).tolist()) >= _COUNTABLE
    return _Specs(keys, dtypes, shapes, make_column([dtype.itemsize for dtype in dtypes]), sizes, lacked, huge)


def _dtypes(names: list[str]) -> list[torch.dtype]:
    known: dict[str, torch.dtype] = {}
    for name in set(names):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpointError(f"torch {torch.__version__} has no dtype {name!r}: a newer one may have it")
        known[name] = dtype
    return [known[name] for name in names]


def _bounds(columns: Columns, count: int) -> torch.Tensor:
    bounds = _integers(columns, "bounds", (count + 1,))
    if int(bounds[0]) != 0 or not bool((bounds[:-1] <= bounds[1:]).all()):
        raise CorruptCheckpointError("its column 'bounds' does not ascend from 0")
    return bounds


def _objects(columns: Columns, files: list[str]) -> dict[str, Item]:
    keys = columns.texts("objects")
    for key in keys:
        if object_key(key) != key:
            raise CorruptCheckpointError(f"{key!r} is not the key of a sharded object")
    places = _integers(columns, "object_places", (len(keys), 3))
    if not keys:
        return {}
    file, start, length = places.unbind(1)
    _all_fine((file < len(files)) & (start <= _LARGEST - length), keys, "is in no file")
    return {key: Item(files[row[0]], *row[1:]) for key, row in zip(keys, places.tolist(), strict=True)}


def _chunks(columns: Columns, specs: _Specs, bounds: torch.Tensor, files: int) -> Chunks:
    count = int(bounds[-1])
    file, start, length = (_integers(columns, name, (count,)) for name in ("file", "start", "length"))
    offset, extent = (_integers(columns, name, (count, specs.sizes.shape[1])) for name in ("offset", "extent"))
    table = Table(number_groups(bounds[1:]), offset, extent)
    chunks = Chunks(table, file, start, length, torch.zeros_like(file), table.volume())
    for row in range(0, count, _BLOCK):
        _check(chunks, slice(row, row + _BLOCK), specs, files)
    return chunks


def _check(chunks: Chunks, rows: slice, specs: _Specs, files: int) -> None:
    """Whether the boxes are inside their tensors, and their archives, large enough for them, inside files."""
    spec, extent, length = chunks.box.spec[rows], chunks.box.extent[rows], chunks.length[rows]
    inside = chunks.box.offset[rows] <= specs.sizes.index_select(0, spec) - extent
    inside &= extent >= specs.lacked.index_select(0, spec)
    inside = inside.all(1)
    counted = extent.double().prod(1) < _COUNTABLE if specs.huge else inside
    in_file = (chunks.file[rows] < files) & (chunks.start[rows] <= _LARGEST - length)
    large_enough = chunks.volume[rows] * specs.itemsizes.index_select(0, spec) <= length
    if bool((inside & counted & in_file & large_enough).all()):
        return
    _all_fine(inside, specs.keys, "has a chunk that is not inside its shape", spec)
    _all_fine(counted, specs.keys, "has a chunk of more elements than can be", spec)
    _all_fine(in_file, specs.keys, "has a chunk that is in no file", spec)
    _all_fine(large_enough, specs.keys, "has a chunk that is larger than its archive", spec)


def _integers(columns: Columns, name: str, shape: Ints) -> torch.Tensor:
    """A column of integers, of the shape that it must have."""
    found = columns.integers(name)
    if found.shape != shape:
        raise CorruptCheckpointError(f"its column {name!r} is of shape {tuple(found.shape)}, expected {shape}")
    return found


def _all_fine(fine: torch.Tensor, keys: Sequence[str], fault: str, numbers: torch.Tensor | None = None) -> None:
    """Refuse what has a row that is not fine, naming the first one's key; ``numbers`` are those of the rows' keys."""
    if not bool(fine.all()):
        row = int((~fine).nonzero()[0, 0])
        raise CorruptCheckpointError(f"{keys[row if numbers is None else int(numbers[row])]!r} {fault}")


__all__ = ["INDEX_FILE", "dump", "parse"]
