"""Our own index file: the content of ``.metadata`` in columns, read without an object for every chunk."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.chunks import Chunks, Item
from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import Table, make_column, make_matrix, number_groups
from shardckpt.storage import Column, Columns, check_file_name, pack_columns
from shardckpt_torch_dist.dialects.stored import StoredIndex, parse_object_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning import Ints

_LARGEST = torch.iinfo(torch.int64).max
#: Below this number of elements, computed in floats, the size in bytes does not overflow int64.
_COUNTABLE = 2.0**58
#: Chunks that are checked at a time, so that the columns stay in the processor's cache.
_BLOCK = 1 << 13


def encode_index(index: StoredIndex) -> bytes:
    """Encode an index of one of our own saves as the index file: each archive has one box, and no value is loose."""
    axes = [len(shape) for shape in index.shapes]
    width = max(axes, default=0)
    chunks, box = index.chunks, index.chunks.box.pad_axes(width)
    objects = index.objects.values()
    files = {name: number for number, name in enumerate(dict.fromkeys([*index.files, *(at.file for at in objects)]))}
    grids = index.grids
    plain = {key: at for key, at in index.objects.items() if key not in grids}
    return pack_columns(
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
            **_object_columns("object", grids, files),
            # apart from the others, for releases that do not know them
            **(_object_columns("plain_object", plain, files) if plain else {}),
        }
    )


def _object_columns(name: str, objects: dict[str, Item], files: dict[str, int]) -> dict[str, Column]:
    places = [(files[at.file], at.offset, at.length) for at in objects.values()]
    return {f"{name}s": list(objects), f"{name}_places": make_matrix(places, 3, 0)}


def parse_index(data: bytes, source: str) -> StoredIndex:
    """Decode an index file, and check it; return the index, with an empty ``save``."""
    try:
        return _parse(Columns(data, source))
    except CorruptCheckpointError as exc:
        raise exc if str(exc).startswith(source) else CorruptCheckpointError(f"{source}: {exc}") from exc


def _parse(columns: Columns) -> StoredIndex:
    files = [check_file_name(name) for name in columns.texts("files")]
    tensors = _parse_tensors(columns)
    bounds = _read_integers(columns, "bounds", (len(tensors.keys) + 1,))
    if int(bounds[0]) != 0 or not bool((bounds[:-1] <= bounds[1:]).all()):
        raise CorruptCheckpointError("its column 'bounds' does not ascend from 0")
    grids = _parse_objects(columns, "object", files)
    for key in grids:
        if parse_object_key(key) != key:
            raise CorruptCheckpointError(f"{key!r} is not the key of a sharded object")
    plain = _parse_objects(columns, "plain_object", files) if columns.has("plain_objects") else {}
    objects = {**grids, **plain}
    keys = [*tensors.keys, *grids, *plain]
    if len(set(keys)) < len(keys):
        raise CorruptCheckpointError(f"it has {len(keys)} keys, but only {len(set(keys))} different ones")
    chunks = _parse_chunks(columns, tensors, bounds, len(files))
    return StoredIndex(tensors.keys, tensors.dtypes, tensors.shapes, bounds, chunks, files, objects, named=objects)


class _Tensors(NamedTuple):
    """The tensors of an index file.

    Attributes:
        shapes: Their global shapes.
        itemsizes: Bytes per element, int64 of shape (tensors,).
        sizes: The shapes as int64 of shape (tensors, most axes), with 1 along axes that a tensor lacks.
        lacked: bool of the same shape: which axes a tensor lacks.
        huge: Whether the number of elements of a box may overflow.
    """

    keys: list[str]
    dtypes: list[torch.dtype]
    shapes: list[Ints]
    itemsizes: torch.Tensor
    sizes: torch.Tensor
    lacked: torch.Tensor
    huge: bool


def _parse_tensors(columns: Columns) -> _Tensors:
    keys, names = columns.texts("keys"), columns.texts("dtypes")
    if len(names) != len(keys):
        raise CorruptCheckpointError(f"it has {len(keys)} keys and {len(names)} dtypes")
    known: dict[str, torch.dtype] = {}
    for name in set(names):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpointError(f"torch {torch.__version__} has no dtype {name!r}: a newer one may have it")
        known[name] = dtype
    dtypes = [known[name] for name in names]
    axes = _read_integers(columns, "axes", (len(keys),))
    counts = axes.tolist()
    width = max(counts, default=0)
    sizes = _read_integers(columns, "shapes", (len(keys), width))
    lacked = torch.arange(width, device="cpu") >= axes.view(-1, 1)
    if min(counts, default=0) < width:
        _require_all((sizes == 1) | ~lacked, keys, "has a size along an axis that it lacks")
    shapes = [tuple(row[:count]) for row, count in zip(sizes.tolist(), counts, strict=True)]
    huge = bool(keys) and math.prod(sizes.amax(0).tolist()) >= _COUNTABLE
    return _Tensors(keys, dtypes, shapes, make_column([dtype.itemsize for dtype in dtypes]), sizes, lacked, huge)


def _parse_objects(columns: Columns, name: str, files: list[str]) -> dict[str, Item]:
    keys = columns.texts(f"{name}s")
    if len(set(keys)) < len(keys):
        raise CorruptCheckpointError(f"its column '{name}s' has a key twice")
    places = _read_integers(columns, f"{name}_places", (len(keys), 3))
    if not keys:
        return {}
    file, start, length = places.unbind(1)
    _require_all((file < len(files)) & (start <= _LARGEST - length), keys, "is in no file")
    return {key: Item(files[row[0]], *row[1:]) for key, row in zip(keys, places.tolist(), strict=True)}


def _parse_chunks(columns: Columns, tensors: _Tensors, bounds: torch.Tensor, files: int) -> Chunks:
    count = int(bounds[-1])
    file, start, length = (_read_integers(columns, name, (count,)) for name in ("file", "start", "length"))
    offset, extent = (_read_integers(columns, name, (count, tensors.sizes.shape[1])) for name in ("offset", "extent"))
    table = Table(number_groups(bounds[1:]), offset, extent)
    chunks = Chunks(table, file, start, length, torch.zeros_like(file), table.volume())
    for row in range(0, count, _BLOCK):
        _check_chunks(chunks, slice(row, row + _BLOCK), tensors, files)
    return chunks


def _check_chunks(chunks: Chunks, rows: slice, tensors: _Tensors, files: int) -> None:
    """Check that the boxes lie inside their tensors, and that their archives are large enough and lie inside files."""
    tensor, extent, length = chunks.box.spec[rows], chunks.box.extent[rows], chunks.length[rows]
    inside = chunks.box.offset[rows] <= tensors.sizes.index_select(0, tensor) - extent
    inside &= extent >= tensors.lacked.index_select(0, tensor)
    inside = inside.all(1)
    counted = extent.double().prod(1) < _COUNTABLE if tensors.huge else inside
    in_file = (chunks.file[rows] < files) & (chunks.start[rows] <= _LARGEST - length)
    large_enough = chunks.volume[rows] * tensors.itemsizes.index_select(0, tensor) <= length
    if bool((inside & counted & in_file & large_enough).all()):
        return
    _require_all(inside, tensors.keys, "has a chunk that is not inside its shape", tensor)
    _require_all(counted, tensors.keys, "has a chunk of too many elements to count", tensor)
    _require_all(in_file, tensors.keys, "has a chunk that is in no file", tensor)
    _require_all(large_enough, tensors.keys, "has a chunk that is larger than its archive", tensor)


def _read_integers(columns: Columns, name: str, shape: Ints) -> torch.Tensor:
    found = columns.integers(name)
    if found.shape != shape:
        raise CorruptCheckpointError(f"its column {name!r} is of shape {tuple(found.shape)}, expected {shape}")
    return found


def _require_all(fine: torch.Tensor, keys: Sequence[str], fault: str, numbers: torch.Tensor | None = None) -> None:
    """Raise CorruptCheckpointError with the key of the first row that is not fine.

    ``fine`` is bool of shape (rows,). ``keys`` are the keys of the rows, or of the numbers. ``numbers`` has the
    position of each row's key in ``keys``; None if row and position are the same.
    """
    if not bool(fine.all()):
        row = int((~fine).nonzero()[0, 0])
        raise CorruptCheckpointError(f"{keys[row if numbers is None else int(numbers[row])]!r} {fault}")
