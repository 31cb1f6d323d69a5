"""Leaving keys out of a stored checkpoint of any dialect: a new index, and what goes on of the data files."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import Table, make_column, repeat_values
from shardckpt.storage import SMALL_RECORD, KeptItem
from shardckpt.strategy import Removal
from shardckpt_torch_dist.archive import ARCHIVE_ALIGN, load_metadata
from shardckpt_torch_dist.dialects import (
    COMMON_KEY,
    INDEX_FILE,
    METADATA_FILE,
    Chunks,
    Item,
    StoredIndex,
    dump,
    encode,
    object_key,
    read_index,
)
from shardckpt_torch_dist.plan import our_archive
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.storage import CheckpointReader

DATA_SUFFIX = ".distcp"


def leave_out(prefix: str, reader: CheckpointReader) -> Removal:
    """What changes in a checkpoint without the tensors and Megatron's objects whose keys begin with the prefix.

    Raises:
        CorruptCheckpointError: the index is damaged, or is of no dialect that is known.
    """
    index = read_index(reader)  # has every check of what is read below
    record = reader.manifest.record
    if record is not None and reader.has(INDEX_FILE):
        return _of_ours(index, prefix, reader, record.save_id)
    return _of_others(index, prefix, reader)


def _of_ours(index: StoredIndex, prefix: str, reader: CheckpointReader, save_id: str) -> Removal:
    keys = frozenset(key for key in (*index.keys, *index.objects) if key.startswith(prefix))
    if not keys:
        return Removal(keys, {}, frozenset())
    kept = without(index, keys)
    before, after = _holdings(index), _holdings(kept)
    rewritten = {
        name: _packed(name, items, _cuts(kept, name), reader)
        for name, items in after.items()
        if len(items) < len(before[name])
    }
    moved = _moved(kept, rewritten)
    renewed = {METADATA_FILE: encode(moved, save_id), INDEX_FILE: dump(moved)}
    return Removal(keys, renewed, frozenset(index.files).difference(kept.files), rewritten)


def _holdings(index: StoredIndex) -> dict[str, dict[Item, str]]:
    """The archives in every file of ours, with their keys."""
    found: dict[str, dict[Item, str]] = {name: {} for name in index.files}
    chunks = index.chunks
    columns = (chunks.file, chunks.start, chunks.length, chunks.box.spec)
    for file, start, length, tensor in zip(*(column.tolist() for column in columns), strict=True):
        name = index.files[file]
        found[name][Item(name, start, length)] = index.keys[tensor]
    for key, item in index.objects.items():
        found.setdefault(item.file, {})[item] = key
    return found


def _packed(
    name: str, items: Mapping[Item, str], cuts: Mapping[Item, tuple[int, ...]], reader: CheckpointReader
) -> list[KeptItem]:
    """Archives of a file behind one another, each on a multiple of 64 bytes if all of them were.

    Raises:
        CorruptCheckpointError: they have more bytes together than the file: a rewrite would be larger than that.
    """
    size, claimed = reader.size(name), sum(item.length for item in items)
    if claimed > size:
        raise CorruptCheckpointError(f"{reader.directory / name} has {size} bytes, its items claim {claimed}")
    align = 1 if any(item.offset % ARCHIVE_ALIGN for item in items) else ARCHIVE_ALIGN
    found, position = [], 0
    for item in sorted(items):
        position += -position % align
        found.append(KeptItem(items[item], item.offset, item.length, position, cuts.get(item, ())))
        position += item.length
    return found


def _cuts(index: StoredIndex, name: str) -> dict[Item, tuple[int, ...]]:
    """Where the head and the payload of large archives in a file end, if they are such as we write.

    A load reads each by itself, and whole digests' worth of bytes of it.
    """
    chunks = index.chunks
    found: dict[Item, tuple[int, ...]] = {}
    if name not in index.files:
        return found
    rows = ((chunks.file == index.files.index(name)) & (chunks.length > SMALL_RECORD)).nonzero().view(-1)
    for number in set(chunks.box.spec[rows].tolist()):
        for chunk in index.tensor(number).chunks.values():
            ours = our_archive(index.dtypes[number], chunk.box.shape, chunk.item.length)
            if ours is not None:
                found[chunk.item] = (len(ours.head), chunk.item.length - len(ours.tail))
    return found


def _moved(index: StoredIndex, rewritten: Mapping[str, list[KeptItem]]) -> StoredIndex:
    """The same with the new places of what is in the files that are rewritten."""
    places, chunks = _places(rewritten), index.chunks
    rows = zip(chunks.file.tolist(), chunks.start.tolist(), chunks.length.tolist(), strict=True)
    starts = [places.get((index.files[file], start, length), start) for file, start, length in rows]
    objects = {key: item._replace(offset=places.get(item, item.offset)) for key, item in index.objects.items()}
    return replace(index, chunks=replace(chunks, start=make_column(starts)), objects=objects)


def without(index: StoredIndex, keys: Collection[str]) -> StoredIndex:
    """The same without some tensors and objects, and without files that hold nothing else."""
    kept = [key not in keys for key in index.keys]
    stays, counts = torch.tensor(kept, dtype=torch.bool, device="cpu"), index.bounds.diff()
    rows = repeat_values(stays, counts).nonzero().view(-1)
    objects = {key: item for key, item in index.objects.items() if key not in keys}
    numbers = set(index.chunks.file[rows].tolist())
    needed = {item.file for item in objects.values()}.union(index.files[number] for number in numbers)
    return StoredIndex(
        list(compress(index.keys, kept)),
        list(compress(index.dtypes, kept)),
        list(compress(index.shapes, kept)),
        torch.cat([index.bounds[:1], counts[stays].cumsum(0)]),
        _rows(index.chunks, rows, stays.cumsum(0) - 1, [name in needed for name in index.files]),
        [name for name in index.files if name in needed],
        objects,
    )


def _rows(chunks: Chunks, rows: torch.Tensor, renumbered: torch.Tensor, needed: list[bool]) -> Chunks:
    """Some of the chunks, with the new numbers of their tensors, and of their files among those that are needed."""
    box, files = chunks.box.rows(rows), make_column(list(accumulate(needed)))
    box = Table(renumbered[box.spec], box.offset, box.extent)
    others = (column[rows] for column in (chunks.start, chunks.length, chunks.first, chunks.volume))
    return Chunks(box, files[chunks.file[rows]] - 1, *others)


def _places(rewritten: Mapping[str, list[KeptItem]]) -> dict[tuple[str, int, int], int]:
    """Where what was somewhere (file, offset, length) in a file that is rewritten begins in the new one."""
    return {(name, item.start, item.nbytes): item.to for name, items in rewritten.items() for item in items}


def _of_others(index: StoredIndex, prefix: str, reader: CheckpointReader) -> Removal:
    source = f"{reader.directory}/{METADATA_FILE}"
    raw = load_metadata(reader.read(METADATA_FILE), source)
    try:
        keys = frozenset(key for key, entry in raw.state_dict_metadata.items() if _matches(key, entry, prefix))
        dropped, kept = _files_of(keys, raw)
        rewritten = {name: _packed(name, items, _cuts(index, name), reader) for name, items in kept.items()}
        renewed = {METADATA_FILE: pickle.dumps(_without(raw, keys, rewritten), protocol=4)} if keys else {}
    except (AttributeError, TypeError, ValueError, LookupError, RecursionError, pickle.PicklingError) as exc:
        raise CorruptCheckpointError(f"{source} is not DCP metadata: {type(exc).__name__}: {exc}") from exc
    return Removal(keys, renewed, dropped, rewritten)


def _matches(key: str, entry: Any, prefix: str) -> bool:
    """Whether the entry is a tensor or one of Megatron's objects, not common state, and has such a key."""
    if not key.startswith(prefix):
        return False
    return hasattr(entry, "chunks") or (key != COMMON_KEY and object_key(key) is not None)


def _files_of(keys: Collection[str], raw: Any) -> tuple[frozenset[str], dict[str, dict[Item, str]]]:
    """The data files that hold nothing but these keys, and what else is in those that hold other keys, too."""
    holders = {info.relative_path for index, info in raw.storage_data.items() if index.fqn in keys}
    others: dict[str, dict[Item, str]] = {}
    for index, info in raw.storage_data.items():
        if index.fqn not in keys:
            item = Item(info.relative_path, int(info.offset), int(info.length))
            others.setdefault(info.relative_path, {})[item] = index.fqn
    data = {name for name in holders if name.endswith(DATA_SUFFIX)}
    return frozenset(data - others.keys()), {name: others[name] for name in sorted(data & others.keys())}


def _without(raw: Any, keys: Collection[str], rewritten: Mapping[str, list[KeptItem]]) -> Metadata:
    """The same in torch's own classes, without some keys, and with the new places of what is in rewritten files.

    Plans of ranks (``all_local_plans``) are left out: they are of a save that had all keys, and only let Megatron skip
    its planning of the next save.
    """
    places = _places(rewritten)
    metadata = Metadata(
        state_dict_metadata={key: _entry(entry) for key, entry in raw.state_dict_metadata.items() if key not in keys},
        planner_data=_kept(getattr(raw, "planner_data", None), keys),
        storage_data=dict(
            _place(index, info, places) for index, info in raw.storage_data.items() if index.fqn not in keys
        ),
        storage_meta=_storage_meta(getattr(raw, "storage_meta", None)),
    )
    if getattr(raw, "version", None) is not None:
        metadata.version = raw.version
    if getattr(raw, "mcore_data", None) is not None:  # the true shapes of flattened tensors
        metadata.mcore_data = _kept(raw.mcore_data, keys)  # type: ignore[attr-defined]
    return metadata


def _kept(by_key: Any, keys: Collection[str]) -> Any:
    return {key: value for key, value in by_key.items() if key not in keys} if isinstance(by_key, dict) else by_key


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """A tensor or an object; of the properties every reader uses the dtype alone, torch has deprecated the others."""
    if not hasattr(entry, "chunks"):
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.properties.dtype), torch.Size(entry.size), chunks)


def _place(index: Any, info: Any, places: Mapping[tuple[str, int, int], int]) -> tuple[MetadataIndex, StorageInfo]:
    place = MetadataIndex(index.fqn, getattr(index, "offset", None), getattr(index, "index", None))
    name, offset, length = info.relative_path, int(info.offset), int(info.length)
    return place, StorageInfo(name, places.get((name, offset, length), offset), length)


def _storage_meta(raw: Any) -> StorageMeta | None:
    if raw is None:
        return None
    checkpoint_id = getattr(raw, "checkpoint_id", None)
    return StorageMeta(
        checkpoint_id=None if checkpoint_id is None else str(checkpoint_id),
        save_id=getattr(raw, "save_id", None),
        load_id=getattr(raw, "load_id", None),
        modules=list(getattr(raw, "modules", ())),
    )


__all__ = ["leave_out", "without"]
