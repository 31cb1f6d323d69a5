"""Every dialect of ``.metadata`` that was ever written under (torch_dist, 1), recognised by content.

The version number never changed from Megatron 0.6 to 0.20; what did:

- 0.6 to 0.18 and we ourselves: the common state is the file ``common.pt``; from 0.19 on, an object among the tensors.
  The object wins where both are there: a ``common.pt`` may be left from an older save into the same directory.
- 0.8 to 0.15: a flattened optimizer shard is stored as a slice of a flattened grid cell, under a reformulated global
  shape (fragments along every axis, then the cell's elements); ``mcore_data`` has the true shape.
- 0.15: the pickled object is Megatron's MCoreMetadata; 0.11 to 0.15: plans of Megatron's MCoreSavePlan lie in it.
- plain torch.distributed.checkpoint: no ``metadata.json``; values that are not tensors are stored one by one.
"""

from __future__ import annotations

import logging
import math
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import RECORD_NAME
from shardckpt.planning import Box, Ints, cut_flat_range
from shardckpt.storage import check_file_name
from shardckpt_torch_dist.archive import brief, load_metadata
from shardckpt_torch_dist.dialects.index_file import INDEX_FILE, parse
from shardckpt_torch_dist.dialects.stored import (
    COMMON_FILE,
    COMMON_KEY,
    Chunk,
    Item,
    StoredIndex,
    StoredTensor,
    columns_of,
    object_key,
)

if TYPE_CHECKING:
    from shardckpt.manifest import Manifest
    from shardckpt.storage import CheckpointReader

logger = logging.getLogger(__name__)

METADATA_FILE = ".metadata"

#: Where the bytes of a file end at most.
_LARGEST = (1 << 63) - 1

#: Axes that a tensor has at most, as in torch.
_AXES = 64
#: Steps that the path of a value in a state dict has at most.
STEPS = 200

_Places = dict[tuple[str, Ints | None], Item]


def read_index(reader: CheckpointReader) -> StoredIndex:
    """What the checkpoint stores; read once in the life of a reader, from our own index where we have written one."""
    return reader.parsed(METADATA_FILE, lambda: _read(reader))


def _read(reader: CheckpointReader) -> StoredIndex:
    """The index that was written with the checkpoint; beside files of other libraries it may be from an older save."""
    record = reader.manifest.record
    sizes = {} if record is None else {file.name: file.size for file in record.files}
    if INDEX_FILE not in sizes:
        if record is None and reader.has(INDEX_FILE):
            logger.warning(
                "%s: %s is there and %s is not: it is read by %s alone, and no digest is checked",
                reader.directory,
                INDEX_FILE,
                RECORD_NAME,
                METADATA_FILE,
            )
        source = f"{reader.directory}/{METADATA_FILE}"
        data = reader.read(METADATA_FILE)
        index = index_of(load_metadata(data, source), source)
        return replace(index, save=save_of(reader, data))
    source = f"{reader.directory}/{INDEX_FILE}"
    index = parse(reader.read(INDEX_FILE), source)
    _check_claims(index, sizes, source)
    return index if record is None else replace(index, save=record.self_digest)


def save_of(reader: CheckpointReader, metadata: bytes) -> str:
    """What tells the save from every other: the digest of its record, or of the ``.metadata`` of another library's."""
    record = reader.manifest.record
    return f"{zlib.crc32(metadata):08x}" if record is None else record.self_digest


def _check_claims(index: StoredIndex, sizes: dict[str, int], source: str) -> None:
    """Refuse chunks that have more bytes together than their file: a load would take memory for each of them."""
    claimed = torch.bincount(index.chunks.file, weights=index.chunks.length, minlength=len(index.files))
    for name, nbytes in zip(index.files, claimed.tolist(), strict=True):
        if nbytes > sizes.get(name, 0):
            raise CorruptCheckpointError(
                f"{source}: its chunks claim {nbytes:.0f} bytes of {name}, which has {sizes.get(name, 0)}"
            )


def index_of(raw: Any, source: str) -> StoredIndex:
    """What a ``.metadata`` file stores, of any dialect.

    Args:
        raw: What :func:`shardckpt_torch_dist.archive.unpickle.load_metadata` gave.
        source: The file, named in errors.
    """
    try:
        return _index(raw)  # what is not as DCP writes it fails somehow; what would take long is looked for
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{source}: {exc}") from exc
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as exc:
        raise CorruptCheckpointError(f"{source} is not DCP metadata: {type(exc).__name__}: {exc}") from exc


def _index(raw: Any) -> StoredIndex:
    places = _places(raw)
    flattened = getattr(raw, "mcore_data", None) or {}
    paths = getattr(raw, "planner_data", None) or {}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Item] = {}
    loose: dict[tuple[Any, ...], Item] = {}
    named: dict[str, Item] = {}
    common = None
    lists = set[int]()
    for key, entry in raw.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            true_shape = (flattened.get(key) or {}).get("nd_reformulated_orig_global_shape")
            if id(entry.chunks) in lists:
                raise CorruptCheckpointError(f"tensor {key!r} has the list of chunks of another one")
            lists.add(id(entry.chunks))
            tensors[key] = _tensor(key, entry, true_shape, places)
            continue
        if (key, None) not in places:
            raise CorruptCheckpointError(f"object {key!r} is named and not stored: the save lost it")
        named[key] = item = places[key, None]
        if key == COMMON_KEY:
            common = item
        elif (unique_key := object_key(key)) is not None:
            objects[unique_key] = item
        else:
            loose[_path(paths.get(key, (key,)), key)] = item
    dtypes, shapes = [tensor.dtype for tensor in tensors.values()], [tensor.shape for tensor in tensors.values()]
    return StoredIndex(
        list(tensors),
        dtypes,
        shapes,
        *columns_of(tensors),
        objects,
        common,
        loose,
        named,
        by_megatron=_by_megatron(raw, objects, loose),
    )


def _by_megatron(raw: Any, objects: dict[str, Item], loose: dict[tuple[Any, ...], Item]) -> bool | None:
    """Whose planner has made the metadata: Megatron's alone has true shapes beside it, or objects and no paths."""
    if getattr(raw, "mcore_data", None) is not None:
        return True
    if loose or isinstance(getattr(raw, "planner_data", None), dict):
        return False
    return True if objects else None


def needs_common_file(manifest: Manifest, index: StoredIndex) -> bool:
    """Whether the checkpoint has to have ``common.pt``: without it, its common state is lost.

    A save of ours says which files there are. Of others, plain DCP directories never have one; a ``metadata.json``
    that Megatron wrote has one beside it, unless the common state is among the tensors.
    """
    if manifest.record is not None:
        return any(file.name == COMMON_FILE for file in manifest.record.files)
    if index.common is not None or index.by_megatron is False:
        return False
    return bool(index.by_megatron) or manifest.recognised_as is None


def _places(raw: Any) -> _Places:
    """Where every stored item is, by key and offset (None for objects)."""
    places: _Places = {}
    for index, info in raw.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f"{index.fqn!r} is stored through DCP stream extensions {tuple(info.transform_descriptors)}, which are "
                "not supported: load it with torch.distributed.checkpoint and save it again"
            )
        offset = getattr(index, "offset", None)  # left out of the pickle where it is None
        place = None if offset is None else _axes(offset)
        if type(index.fqn) is not str:
            raise TypeError(f"a key is a {type(index.fqn).__name__}")
        item = Item(check_file_name(info.relative_path), int(info.offset), int(info.length))
        if item.offset < 0 or item.length < 0 or item.offset + item.length > _LARGEST:
            raise CorruptCheckpointError(f"{index.fqn!r} cannot be {item.length} bytes at {item.offset} of {item.file}")
        places[index.fqn, place] = item
    return places


def _tensor(key: str, entry: Any, true_shape: Any, places: _Places) -> StoredTensor:
    size = _axes(entry.size)
    shape = size if true_shape is None else _axes(true_shape)
    dtype = entry.properties.dtype
    chunks: dict[Ints, Chunk] = {}
    claimed: dict[Item, int] = {}
    for stored in entry.chunks:
        offset, sizes = _axes(stored.offsets), _axes(stored.sizes)
        item = places.get((key, offset))
        if item is None:
            continue  # a save that lost it: a load that needs it finds a hole
        volume = math.prod(sizes)
        claimed[item] = claimed.get(item, 0) + volume * dtype.itemsize
        if not _fits(size, offset, sizes) or claimed[item] > item.length:
            raise CorruptCheckpointError(
                f"tensor {key!r} of shape {size} and {dtype} cannot have a chunk of {sizes} at {offset} "
                f"in {item.length} bytes of {item.file}, of which its chunks claim {claimed[item]}"
            )
        parts = [(Box(offset, sizes), 0)]
        if true_shape is not None:
            parts = _flattened(shape, size, offset, sizes)
        chunks.update({box.offset: Chunk(box, item, first, volume) for box, first in parts})
    return StoredTensor(dtype, shape, chunks)


def _axes(values: Any) -> Ints:
    """A shape or an offset; a long one may stand for any number of chunks."""
    if len(values) > _AXES:
        raise ValueError(f"{len(values)} axes")
    return tuple(values)


def _path(path: Any, key: str) -> tuple[str | int, ...]:
    """Where a value was in the saved state dict."""
    if len(path) > STEPS or not all(type(step) in (str, int) for step in path):
        raise CorruptCheckpointError(f"{key!r} cannot be at {brief(path)} of a state dict")
    return tuple(path)


def _fits(shape: Ints, offset: Ints, sizes: Ints) -> bool:
    """Whether a chunk lies inside a tensor of the stored shape."""
    if not len(shape) == len(offset) == len(sizes):
        return False
    return all(low >= 0 <= n and low + n <= size for low, n, size in zip(offset, sizes, shape, strict=True))


def _flattened(true_shape: Ints, stored_shape: Ints, offset: Ints, sizes: Ints) -> list[tuple[Box, int]]:
    """The boxes of a flattened slice of a grid cell, in true coordinates, with their first element in the slice."""
    fragments, cell = stored_shape[:-1], offset[:-1]
    block = tuple(size // count for size, count in zip(true_shape, fragments, strict=True))
    corner = tuple(index * length for index, length in zip(cell, block, strict=True))
    return [(part.box.moved(corner), part.start) for part in cut_flat_range(block, offset[-1], offset[-1] + sizes[-1])]


__all__ = ["METADATA_FILE", "STEPS", "index_of", "needs_common_file", "read_index", "save_of"]
