"""Remove keys from a stored checkpoint of any dialect: plan a new index, and which bytes of the data files to keep."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from shardckpt.archive import ARCHIVE_ALIGN
from shardckpt.chunks import Item
from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import make_column
from shardckpt.storage import SMALL_RECORD
from shardckpt.strategy import KeptItem, Removal
from shardckpt_torch_dist.dialects import (
    COMMON_KEY,
    INDEX_FILE,
    METADATA_FILE,
    StoredIndex,
    encode_index,
    encode_metadata,
    has_own_index,
    parse_object_key,
    read_index,
    read_metadata,
    to_dcp_tensor,
)
from shardckpt_torch_dist.plan import build_own_archive
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardckpt.storage import CheckpointReader

_DATA_SUFFIX = ".distcp"


def plan_removal(prefix: str, reader: CheckpointReader) -> Removal:
    """Plan the removal of tensors and of Megatron's objects whose keys begin with a prefix; nothing is changed yet."""
    record = reader.manifest.record
    is_ours = has_own_index(reader)
    raw: Any = None
    if is_ours:
        index = read_index(reader)
    else:
        raw, index = read_metadata(reader)
    try:
        if is_ours:
            keys = frozenset(key for key in (*index.keys, *index.objects) if key.startswith(prefix))
            dropped, kept = _split_files(_list_archives(index), keys)
        else:
            keys = frozenset(key for key, entry in raw.state_dict_metadata.items() if _is_removed(key, entry, prefix))
            archives = ((index.fqn, _locate(info)) for index, info in raw.storage_data.items())
            dropped, kept = _split_files(archives, keys)
        if not keys:
            return Removal(keys, {}, frozenset())
        rewritten = {
            name: _repack(name, items, _digest_boundaries(index, name), reader) for name, items in kept.items()
        }
        if is_ours and record is not None:
            updated = _with_new_offsets(remove_keys(index, keys), rewritten)
            renewed = {METADATA_FILE: encode_metadata(updated, record.save_id), INDEX_FILE: encode_index(updated)}
        else:
            renewed = {METADATA_FILE: pickle.dumps(_copy_metadata(raw, keys, rewritten), protocol=4)}
    except (AttributeError, TypeError, ValueError, LookupError, RecursionError, pickle.PicklingError) as exc:
        source = f"{reader.directory}/{METADATA_FILE}"
        raise CorruptCheckpointError(f"{source} is not DCP metadata: {type(exc).__name__}: {exc}") from exc
    return Removal(keys, renewed, dropped, rewritten)


def _list_archives(index: StoredIndex) -> Iterator[tuple[str, Item]]:
    """Yield the archives of our own index with their keys; an object may have several."""
    chunks = index.chunks
    columns = (chunks.file, chunks.start, chunks.length, chunks.box.spec)
    for file, start, length, tensor in zip(*(column.tolist() for column in columns), strict=True):
        yield index.keys[tensor], Item(index.files[file], start, length)
    yield from index.objects.items()


def _locate(info: Any) -> Item:
    """Return the archive of an entry of DCP's ``storage_data``."""
    return Item(info.relative_path, int(info.offset), int(info.length))


def _split_files(
    archives: Iterable[tuple[str, Item]], keys: Collection[str]
) -> tuple[frozenset[str], dict[str, dict[Item, str]]]:
    """Return the data files that hold only these keys, and the other archives of the data files that hold more."""
    holders: set[str] = set()
    others: dict[str, dict[Item, str]] = {}
    for key, item in archives:
        if key not in keys:
            others.setdefault(item.file, {})[item] = key
        elif item.file.endswith(_DATA_SUFFIX):
            holders.add(item.file)
    return frozenset(holders - others.keys()), {name: others[name] for name in sorted(holders & others.keys())}


def _repack(
    name: str, items: Mapping[Item, str], boundaries: Mapping[Item, tuple[int, ...]], reader: CheckpointReader
) -> list[KeptItem]:
    """Place the archives of a file behind one another, each at a multiple of 64 bytes if all of them are now.

    It is a CorruptCheckpointError if they claim more bytes together than the file has: the rewrite could be of any
    size.
    """
    size, claimed = reader.size(name), sum(item.length for item in items)
    if claimed > size:
        raise CorruptCheckpointError(f"{reader.directory / name} has {size} bytes, its items claim {claimed}")
    # Megatron's and DCP's own files are not aligned; a file of ours stays as our own saves write it.
    align = 1 if any(item.offset % ARCHIVE_ALIGN for item in items) else ARCHIVE_ALIGN
    found, position = [], 0
    for item in sorted(items):
        position += -position % align
        found.append(KeptItem(items[item], item.offset, item.length, position, boundaries.get(item, ())))
        position += item.length
    return found


def _digest_boundaries(index: StoredIndex, name: str) -> dict[Item, tuple[int, ...]]:
    """Return where the head and the payload of the large archives of a file end, for archives as we write them."""
    # A load reads head and payload separately, in entire ranges of digests, so a range must end at each boundary.
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


def remove_keys(index: StoredIndex, keys: Collection[str]) -> StoredIndex:
    """Return the index without some tensors and objects, and without the files that hold nothing else."""
    kept = [key not in keys for key in index.keys]
    chunks, bounds = index.select_chunks(make_column([*compress(range(len(kept)), kept)]))
    objects = {key: item for key, item in index.objects.items() if key not in keys}
    used = set(chunks.file.tolist())
    needed = {item.file for item in objects.values()}.union(index.files[number] for number in used)
    anew = make_column(list(accumulate(name in needed for name in index.files))) - 1  # files are numbered anew
    return StoredIndex(
        list(compress(index.keys, kept)),
        list(compress(index.dtypes, kept)),
        list(compress(index.shapes, kept)),
        bounds,
        replace(chunks, file=anew[chunks.file]),
        [name for name in index.files if name in needed],
        objects,
    )


def _new_offsets(rewritten: Mapping[str, list[KeptItem]]) -> dict[tuple[str, int, int], int]:
    """Return the new offset of each item of the rewritten files, by its (file, offset, length) now."""
    return {(name, item.start, item.nbytes): item.to for name, items in rewritten.items() for item in items}


def _is_removed(key: str, entry: Any, prefix: str) -> bool:
    """Return whether the key has the prefix, and the entry is a tensor or a sharded object, not the common state."""
    if not key.startswith(prefix):
        return False
    return hasattr(entry, "chunks") or (key != COMMON_KEY and parse_object_key(key) is not None)


def _copy_metadata(raw: Any, keys: Collection[str], rewritten: Mapping[str, list[KeptItem]]) -> Metadata:
    """Return the metadata in torch's own classes, without some keys, and with the new offsets of the other items."""
    # Not Megatron's ``all_local_plans``: they list all keys, and only let it skip the planning of its next save.
    offsets, storage_data = _new_offsets(rewritten), {}
    for index, info in raw.storage_data.items():
        if index.fqn not in keys:
            entry = MetadataIndex(index.fqn, getattr(index, "offset", None), getattr(index, "index", None))
            item = _locate(info)
            storage_data[entry] = StorageInfo(item.file, offsets.get(item, item.offset), item.length)
    metadata = Metadata(
        state_dict_metadata={
            key: _copy_entry(entry) for key, entry in raw.state_dict_metadata.items() if key not in keys
        },
        planner_data=_drop_keys(getattr(raw, "planner_data", None), keys),
        storage_data=storage_data,
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
    if not hasattr(entry, "chunks"):
        return BytesStorageMetadata()
    boxes = ((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
    return to_dcp_tensor(entry.properties.dtype, entry.size, boxes)


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
