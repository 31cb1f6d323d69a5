"""Read every dialect of ``.metadata`` that was ever written under (torch_dist, 1), recognised by content.

The version number is 1 from Megatron 0.6 to 0.20, but the content has changed:

- Megatron 0.6 to 0.18, and shardckpt: the common state is the file ``common.pt``. From 0.19 on it is an object in the
  data files. If both are there, the object counts: ``common.pt`` may be left from an older save into the directory.
- Megatron 0.8 to 0.15: a flattened optimizer shard is stored as a slice of a flattened grid cell, under a reformulated
  global shape: the number of fragments along each axis, then the elements of a cell. ``mcore_data`` has the true shape.
- Megatron 0.15: the pickled object is an MCoreMetadata. Megatron 0.11 to 0.15: it contains MCoreSavePlans.
- Plain torch.distributed.checkpoint: no ``metadata.json``. Values that are not tensors are stored one by one.
"""

from __future__ import annotations

import logging
import math
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive import describe, load_metadata
from shardckpt.chunks import Chunk, Item, StoredTensor
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.manifest import RECORD_NAME
from shardckpt.planning import Box, Ints, cut_flat_range
from shardckpt.storage import ParseCache, check_file_name
from shardckpt_torch_dist.dialects.index_file import parse_index
from shardckpt_torch_dist.dialects.stored import (
    COMMON_KEY,
    StoredIndex,
    parse_object_key,
    tensors_to_columns,
)
from shardckpt_torch_dist.file_names import COMMON_FILE, INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.manifest import Manifest, Record
    from shardckpt.storage import CheckpointReader

logger = logging.getLogger(__name__)

METADATA_FILE = ".metadata"

#: The largest offset in a file, in bytes.
_LARGEST = (1 << 63) - 1

#: The most axes of a tensor, as in torch.
_MAX_AXES = 64
#: The most keys and indices in the path of a value in a state dict.
MAX_PATH_LENGTH = 200

#: The indexes of our own files.
_own_indexes = ParseCache[StoredIndex]()

#: Where each stored value is, by key and offset (None for objects).
_Locations = dict[tuple[str, Ints | None], Item]


def read_index(reader: CheckpointReader) -> StoredIndex:
    """Return the index of a checkpoint, which callers share and must not change.

    It is read once per reader: from our own index file if shardckpt wrote the checkpoint, otherwise from ``.metadata``.
    A small index file of ours is not parsed again for a later reader of the same bytes.
    """
    return reader.parsed(METADATA_FILE, lambda: _read_uncached(reader))


def has_own_index(reader: CheckpointReader) -> bool:
    """Return whether the checkpoint has our own index file, of the same save as its other files.

    Only the record shows that: another library may have saved into the directory since.
    """
    record = reader.manifest.record
    return record is not None and any(file.name == INDEX_FILE for file in record.files)


def _read_uncached(reader: CheckpointReader) -> StoredIndex:
    record = reader.manifest.record
    if record is None or not has_own_index(reader):
        return read_metadata(reader)[1]
    source = f"{reader.directory}/{INDEX_FILE}"
    try:
        data = reader.read(INDEX_FILE)
    except StorageError:
        if (reader.place / INDEX_FILE).exists() or not (reader.place / METADATA_FILE).exists():
            raise
        lost = "%s: %s is missing: %s, which has the same and is slower to read, is read in its place"
        logger.warning(lost, reader.directory, INDEX_FILE, METADATA_FILE)
        return read_metadata(reader)[1]
    return _own_indexes.get(data, (source, record.self_digest), lambda: _parse_own_index(data, source, record))


def _parse_own_index(data: bytes, source: str, record: Record) -> StoredIndex:
    """Return the index in the bytes of our index file, of the save with this record."""
    index = parse_index(data, source)
    # A load allocates memory for each chunk, so the chunks must not claim more bytes together than their file has.
    sizes = {file.name: file.size for file in record.files}
    claimed = torch.bincount(index.chunks.file, weights=index.chunks.length, minlength=len(index.files))
    for name, nbytes in zip(index.files, claimed.tolist(), strict=True):
        if nbytes > sizes.get(name, 0):
            raise CorruptCheckpointError(
                f"{source}: its chunks claim {nbytes:.0f} bytes of {name}, which has {sizes.get(name, 0)}"
            )
    return replace(index, save=record.self_digest)


def read_metadata(reader: CheckpointReader, name: str = METADATA_FILE) -> tuple[Any, StoredIndex]:
    """Read ``.metadata`` of any dialect; return the result of :func:`shardckpt.archive.load_metadata`, and the index.

    ``name`` is the file's name, if it is another one.
    """
    record = reader.manifest.record
    if record is None and reader.has(INDEX_FILE):
        state = "damaged" if (reader.directory / RECORD_NAME).exists() else "missing"
        lost = "%s: %s is there and %s is %s: only %s is read, and no digest is checked"
        logger.warning(lost, reader.directory, INDEX_FILE, RECORD_NAME, state, name)
    source, data = f"{reader.directory}/{name}", reader.read(name)
    raw = load_metadata(data, source)
    try:
        # Types are not checked: a type that DCP does not write raises one of the errors below. Sizes are.
        index = _build_index(raw)
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{source}: {exc}") from exc
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as exc:
        raise CorruptCheckpointError(f"{source} is not DCP metadata: {type(exc).__name__}: {exc}") from exc
    return raw, replace(index, save=f"{zlib.crc32(data):08x}" if record is None else record.self_digest)


def _build_index(raw: Any) -> StoredIndex:
    locations = _locate_items(raw)
    flattened = getattr(raw, "mcore_data", None) or {}
    paths = getattr(raw, "planner_data", None) or {}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Item] = {}
    loose: dict[tuple[Any, ...], Item] = {}
    named: dict[str, Item] = {}
    common = None
    lists = set[int]()
    for key, entry in raw.state_dict_metadata.items():
        _require_text(key)
        if hasattr(entry, "chunks"):  # entries are inert records, whose class says nothing
            true_shape = (flattened.get(key) or {}).get("nd_reformulated_orig_global_shape")
            # A pickle of some bytes can name one long list of chunks for any number of tensors.
            if id(entry.chunks) in lists:
                raise CorruptCheckpointError(f"tensor {key!r} shares its list of chunks with another tensor")
            lists.add(id(entry.chunks))
            tensors[key] = _stored_tensor(key, entry, true_shape, locations)
            continue
        if (key, None) not in locations:
            raise CorruptCheckpointError(f"object {key!r} is listed but not stored: the save lost it")
        named[key] = item = locations[key, None]
        if key == COMMON_KEY:
            common = item
        elif (unique_key := parse_object_key(key)) is not None:
            objects[unique_key] = item
        else:
            _add_value(loose, _checked_path(paths.get(key, (key,)), key), key, item)
    # Only Megatron's planner writes true shapes, or objects without paths.
    by_megatron = True if objects else None
    # A dict in planner_data has the paths of plain DCP, whose users may name a key as Megatron names an object.
    if getattr(raw, "mcore_data", None) is not None:
        by_megatron = True
    elif loose or isinstance(getattr(raw, "planner_data", None), dict):
        by_megatron = False
    tensor_paths = {} if by_megatron else _find_tensor_paths(tensors, paths, loose)
    return StoredIndex(
        list(tensors),
        [tensor.dtype for tensor in tensors.values()],
        [tensor.shape for tensor in tensors.values()],
        *tensors_to_columns(tensors),
        objects,
        common,
        loose,
        tensor_paths,
        named,
        by_megatron=by_megatron,
    )


def needs_common_file(manifest: Manifest, index: StoredIndex) -> bool:
    """Return whether the checkpoint must have the file ``common.pt``, so that its common state is lost without it.

    Our own saves list their files. Plain DCP directories never have the file. Megatron's checkpoints, which have a
    ``metadata.json``, always have it, unless the common state is an object.
    """
    if manifest.record is not None:
        return any(file.name == COMMON_FILE for file in manifest.record.files)
    if index.common is not None or index.by_megatron is False:
        return False
    return bool(index.by_megatron) or manifest.recognised_as is None


def _locate_items(raw: Any) -> _Locations:
    locations: _Locations = {}
    for index, info in raw.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f"{index.fqn!r} is stored through DCP stream extensions {tuple(info.transform_descriptors)}, which are "
                "not supported: load it with torch.distributed.checkpoint and save it again"
            )
        offset = getattr(index, "offset", None)  # the pickle omits it if it is None
        place = None if offset is None else _checked_axes(offset)
        _require_text(index.fqn)
        item = Item(check_file_name(info.relative_path), int(info.offset), int(info.length))
        if item.offset < 0 or item.length < 0 or item.offset + item.length > _LARGEST:
            raise CorruptCheckpointError(f"{index.fqn!r} cannot be {item.length} bytes at {item.offset} of {item.file}")
        locations[index.fqn, place] = item
    return locations


def _require_text(key: Any) -> None:
    if type(key) is not str:
        raise TypeError(f"a key is a {type(key).__name__}")


def _stored_tensor(key: str, entry: Any, true_shape: Any, locations: _Locations) -> StoredTensor:
    size = _checked_axes(entry.size)
    shape = size if true_shape is None else _checked_axes(true_shape)
    dtype = entry.properties.dtype
    chunks: dict[Ints, Chunk] = {}
    claimed: dict[Item, int] = {}
    for stored in entry.chunks:
        offset, sizes = _checked_axes(stored.offsets), _checked_axes(stored.sizes)
        item = locations.get((key, offset))
        if item is None:
            continue  # the save lost it: only a load that needs the chunk fails, on the hole that it leaves
        volume = math.prod(sizes)
        # Several chunks may share an archive, but together they cannot have more bytes: a load allocates all of them.
        claimed[item] = claimed.get(item, 0) + volume * dtype.itemsize
        box = Box(offset, sizes)
        if not box.fits(size) or claimed[item] > item.length:
            raise CorruptCheckpointError(
                f"tensor {key!r} of shape {size} and {dtype} cannot have a chunk of {sizes} at {offset} "
                f"in {item.length} bytes of {item.file}, of which its chunks claim {claimed[item]}"
            )
        parts = [(box, 0)] if true_shape is None else _unflatten(shape, size, offset, sizes)
        chunks.update({part.offset: Chunk(part, item, first, volume) for part, first in parts})
    return StoredTensor(dtype, shape, chunks)


def _checked_axes(values: Any) -> Ints:
    """Return a shape or an offset as a tuple, if it has no more axes than a tensor can have."""
    if len(values) > _MAX_AXES:
        raise ValueError(f"{len(values)} axes")
    return tuple(values)


def _checked_path(path: Any, key: str) -> tuple[str | int, ...]:
    """Return the path of a value in the saved state dict, after a check of its length and types."""
    is_path = type(path) in (tuple, list) and 0 < len(path) <= MAX_PATH_LENGTH
    if not is_path or not all(type(part) in (str, int) for part in path):
        raise CorruptCheckpointError(f"{key!r} cannot be at {describe(path)} of a state dict")
    return tuple(path)


def _add_value(loose: dict[tuple[Any, ...], Item], path: tuple[str | int, ...], key: str, item: Item) -> None:
    if path in loose:
        raise CorruptCheckpointError(f"{key!r} is at {describe(path)} of a state dict, and so is another value")
    loose[path] = item


def _find_tensor_paths(
    keys: Collection[str], paths: Mapping[str, Any], loose: Collection[tuple[Any, ...]]
) -> dict[str, tuple[str | int, ...]]:
    """Return the paths of the tensors in the saved state dict, by key.

    It is a CorruptCheckpointError if a path is none, or a tensor is where another value is.
    """
    found = {key: _checked_path(paths[key], key) for key in keys if key in paths}
    for path in loose:
        if (name := ".".join(map(str, path))) in found:
            raise CorruptCheckpointError(f"{name!r} of a state dict is a tensor, and another value")
    # DCP's keys are the paths, joined. A planner that names tensors otherwise does not say where in an object one was.
    return {key: path if ".".join(map(str, path)) == key else (key,) for key, path in found.items()}


def _unflatten(true_shape: Ints, stored_shape: Ints, offset: Ints, sizes: Ints) -> list[tuple[Box, int]]:
    """Return the boxes of a flattened slice of a grid cell, in true coordinates, each with its first element's index.

    Example: a tensor of shape (4, 6) in a (2, 1) grid has cells of shape (2, 6), stored as (2, 1, 12). The slice at
    offset (1, 0, 3) with sizes (1, 1, 5) has elements 3 to 7 of the second cell: the box at (2, 3) of shape (1, 3),
    whose first element has index 0, and the box at (3, 0) of shape (1, 2), whose first element has index 3.
    """
    fragments, cell = stored_shape[:-1], offset[:-1]
    block = tuple(size // count for size, count in zip(true_shape, fragments, strict=True))
    corner = tuple(index * length for index, length in zip(cell, block, strict=True))
    return [(part.box.moved(corner), part.start) for part in cut_flat_range(block, offset[-1], offset[-1] + sizes[-1])]
