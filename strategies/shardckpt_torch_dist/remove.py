"""Remove keys from a stored checkpoint of any dialect: plan a new index, and which bytes of the data files to keep."""

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
    parse_object_key,
    read_index,
)
from shardckpt_torch_dist.plan import build_own_archive
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.storage import CheckpointReader

DATA_SUFFIX = ".distcp"


def plan_removal(prefix: str, reader: CheckpointReader) -> Removal:
    """Plan the removal of the tensors and of Megatron's objects whose keys begin with a prefix.

    Args:
        prefix: The prefix of their keys.
        reader: The checkpoint's files.

    Returns:
        The files to create, to delete and to rewrite; nothing is changed yet.

    Raises:
        CorruptCheckpointError: The index is damaged, or of an unknown dialect.
    """
    index = read_index(reader)  # this checks the metadata that is read again below
    record = reader.manifest.record
    if record is not None and reader.has(INDEX_FILE):
        return _plan_own_format(index, prefix, reader, record.save_id)
    return _plan_foreign_format(index, prefix, reader)


def _plan_own_format(index: StoredIndex, prefix: str, reader: CheckpointReader, save_id: str) -> Removal:
    keys = frozenset(key for key in (*index.keys, *index.objects) if key.startswith(prefix))
    if not keys:
        return Removal(keys, {}, frozenset())
    kept = without(index, keys)
    before, after = _archives_by_file(index), _archives_by_file(kept)
    rewritten = {
        name: _repack(name, items, _digest_boundaries(kept, name), reader)
        for name, items in after.items()
        if len(items) < len(before[name])
    }
    updated = _with_new_offsets(kept, rewritten)
    renewed = {METADATA_FILE: encode(updated, save_id), INDEX_FILE: dump(updated)}
    return Removal(keys, renewed, frozenset(index.files).difference(kept.files), rewritten)


def _archives_by_file(index: StoredIndex) -> dict[str, dict[Item, str]]:
    """Return the archives of each file with their keys, for our own index: each archive has one key."""
    found: dict[str, dict[Item, str]] = {name: {} for name in index.files}
    chunks = index.chunks
    columns = (chunks.file, chunks.start, chunks.length, chunks.box.spec)
    for file, start, length, tensor in zip(*(column.tolist() for column in columns), strict=True):
        name = index.files[file]
        found[name][Item(name, start, length)] = index.keys[tensor]
    for key, item in index.objects.items():
        found.setdefault(item.file, {})[item] = key
    return found


def _repack(
    name: str, items: Mapping[Item, str], boundaries: Mapping[Item, tuple[int, ...]], reader: CheckpointReader
) -> list[KeptItem]:
    """Place the archives of a file behind one another, each at a multiple of 64 bytes if all of them are now.

    Raises:
        CorruptCheckpointError: They claim more bytes together than the file has, so the rewrite could be of any size.
    """
    size, claimed = reader.size(name), sum(item.length for item in items)
    if claimed > size:
        raise CorruptCheckpointError(f"{reader.directory / name} has {size} bytes, its items claim {claimed}")
    align = 1 if any(item.offset % ARCHIVE_ALIGN for item in items) else ARCHIVE_ALIGN
    found, position = [], 0
    for item in sorted(items):
        position += -position % align
        found.append(KeptItem(items[item], item.offset, item.length, position, boundaries.get(item, ())))
        position += item.length
    return found


def _digest_boundaries(index: StoredIndex, name: str) -> dict[Item, tuple[int, ...]]:
    """Return where the head and the payload of the large archives of a file end, for archives as we write them.

    A load reads head and payload separately, in whole ranges of digests, so a range must end at each boundary.
    """
    chunks = index.chunks
    found: dict[Item, tuple[int, ...]] = {}
    if name not in index.files:
        return found
    rows = ((chunks.file == index.files.index(name)) & (chunks.length > SMALL_RECORD)).nonzero().view(-1)
    for number in set(chunks.box.spec[rows].tolist()):
        for chunk in index.tensor(number).chunks.values():
            ours = build_own_archive(index.dtypes[number], chunk.box.shape, chunk.item.length)
            if ours is not None:
                found[chunk.item] = (len(ours.head), chunk.item.length - len(ours.tail))
    return found


def _with_new_offsets(index: StoredIndex, rewritten: Mapping[str, list[KeptItem]]) -> StoredIndex:
    """Return the index with the new offsets of the items in the rewritten files."""
    offsets, chunks = _new_offsets(rewritten), index.chunks
    rows = zip(chunks.file.tolist(), chunks.start.tolist(), chunks.length.tolist(), strict=True)
    starts = [offsets.get((index.files[file], start, length), start) for file, start, length in rows]
    objects = {key: item._replace(offset=offsets.get(item, item.offset)) for key, item in index.objects.items()}
    return replace(index, chunks=replace(chunks, start=make_column(starts)), objects=objects)


def without(index: StoredIndex, keys: Collection[str]) -> StoredIndex:
    """Return the index without some tensors and objects, and without the files that hold nothing else."""
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
        _select_chunks(index.chunks, rows, stays.cumsum(0) - 1, [name in needed for name in index.files]),
        [name for name in index.files if name in needed],
        objects,
    )


def _select_chunks(chunks: Chunks, rows: torch.Tensor, renumbered: torch.Tensor, needed: list[bool]) -> Chunks:
    """Return some of the chunks, with the new numbers of their tensors and of their files."""
    box, files = chunks.box.rows(rows), make_column(list(accumulate(needed)))
    box = Table(renumbered[box.spec], box.offset, box.extent)
    others = (column[rows] for column in (chunks.start, chunks.length, chunks.first, chunks.volume))
    return Chunks(box, files[chunks.file[rows]] - 1, *others)


def _new_offsets(rewritten: Mapping[str, list[KeptItem]]) -> dict[tuple[str, int, int], int]:
    """Return the new offset of each item of the rewritten files, by its (file, offset, length) now."""
    return {(name, item.start, item.nbytes): item.to for name, items in rewritten.items() for item in items}


def _plan_foreign_format(index: StoredIndex, prefix: str, reader: CheckpointReader) -> Removal:
    source = f"{reader.directory}/{METADATA_FILE}"
    raw = load_metadata(reader.read(METADATA_FILE), source)
    try:
        keys = frozenset(key for key, entry in raw.state_dict_metadata.items() if _is_removed(key, entry, prefix))
        dropped, kept = _split_files(keys, raw)
        rewritten = {
            name: _repack(name, items, _digest_boundaries(index, name), reader) for name, items in kept.items()
        }
        renewed = {METADATA_FILE: pickle.dumps(_copy_metadata(raw, keys, rewritten), protocol=4)} if keys else {}
    except (AttributeError, TypeError, ValueError, LookupError, RecursionError, pickle.PicklingError) as exc:
        raise CorruptCheckpointError(f"{source} is not DCP metadata: {type(exc).__name__}: {exc}") from exc
    return Removal(keys, renewed, dropped, rewritten)


def _is_removed(key: str, entry: Any, prefix: str) -> bool:
    """Return whether the key has the prefix, and the entry is a tensor or a sharded object, not the common state."""
    if not key.startswith(prefix):
        return False
    return hasattr(entry, "chunks") or (key != COMMON_KEY and parse_object_key(key) is not None)


def _split_files(keys: Collection[str], raw: Any) -> tuple[frozenset[str], dict[str, dict[Item, str]]]:
    """Return the data files that hold only these keys, and the other items of the data files that hold more."""
    holders = {info.relative_path for index, info in raw.storage_data.items() if index.fqn in keys}
    others: dict[str, dict[Item, str]] = {}
    for index, info in raw.storage_data.items():
        if index.fqn not in keys:
            item = Item(info.relative_path, int(info.offset), int(info.length))
            others.setdefault(info.relative_path, {})[item] = index.fqn
    data = {name for name in holders if name.endswith(DATA_SUFFIX)}
    return frozenset(data - others.keys()), {name: others[name] for name in sorted(data & others.keys())}


def _copy_metadata(raw: Any, keys: Collection[str], rewritten: Mapping[str, list[KeptItem]]) -> Metadata:
    """Return the metadata in torch's own classes, without some keys, and with the new offsets of the other items.

    The plans of the ranks (``all_local_plans``) are left out: they list all keys, and they only let Megatron skip the
    planning of its next save.
    """
    offsets = _new_offsets(rewritten)
    metadata = Metadata(
        state_dict_metadata={
            key: _copy_entry(entry) for key, entry in raw.state_dict_metadata.items() if key not in keys
        },
        planner_data=_drop_keys(getattr(raw, "planner_data", None), keys),
        storage_data=dict(
            _copy_location(index, info, offsets) for index, info in raw.storage_data.items() if index.fqn not in keys
        ),
        storage_meta=_copy_storage_meta(getattr(raw, "storage_meta", None)),
    )
    if getattr(raw, "version", None) is not None:
        metadata.version = raw.version
    if getattr(raw, "mcore_data", None) is not None:  # the true shapes of flattened tensors
        metadata.mcore_data = _drop_keys(raw.mcore_data, keys)  # type: ignore[attr-defined]
    return metadata


def _drop_keys(by_key: Any, keys: Collection[str]) -> Any:
    return {key: value for key, value in by_key.items() if key not in keys} if isinstance(by_key, dict) else by_key


def _copy_entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """Copy an entry; of the properties only the dtype: readers use no other, and torch has deprecated them."""
    if not hasattr(entry, "chunks"):
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.properties.dtype), torch.Size(entry.size), chunks)


def _copy_location(
    index: Any, info: Any, offsets: Mapping[tuple[str, int, int], int]
) -> tuple[MetadataIndex, StorageInfo]:
    place = MetadataIndex(index.fqn, getattr(index, "offset", None), getattr(index, "index", None))
    name, offset, length = info.relative_path, int(info.offset), int(info.length)
    return place, StorageInfo(name, offsets.get((name, offset, length), offset), length)


def _copy_storage_meta(raw: Any) -> StorageMeta | None:
    if raw is None:
        return None
    checkpoint_id = getattr(raw, "checkpoint_id", None)
    return StorageMeta(
        checkpoint_id=None if checkpoint_id is None else str(checkpoint_id),
        save_id=getattr(raw, "save_id", None),
        load_id=getattr(raw, "load_id", None),
        modules=list(getattr(raw, "modules", ())),
    )


__all__ = ["plan_removal", "without"]
