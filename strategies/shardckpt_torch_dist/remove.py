"""Leaving keys out of a stored checkpoint of any dialect: a new ``.metadata``, and the data files that it needs."""

from __future__ import annotations

import pickle
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
from shardckpt.strategy import Removal
from shardckpt_torch_dist.dialects import METADATA_FILE, read_index
from shardckpt_torch_dist.stored import COMMON_KEY, object_key
from shardckpt_torch_dist.torch_private import StorageInfo
from shardckpt_torch_dist.unpickle import load_metadata

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.storage.reader import CheckpointReader

DATA_SUFFIX = ".distcp"


def leave_out(prefix: str, reader: CheckpointReader) -> Removal:
    """What changes in a checkpoint without the tensors and Megatron's objects whose keys begin with the prefix.

    Raises:
        CorruptCheckpointError: ``.metadata`` is damaged, or is of no dialect that is known.
    """
    read_index(reader)  # has every check of what is read below
    source = f"{reader.directory}/{METADATA_FILE}"
    raw = load_metadata(reader.read(METADATA_FILE), source)
    try:
        keys = frozenset(key for key, entry in raw.state_dict_metadata.items() if _matches(key, entry, prefix))
        renewed = {METADATA_FILE: pickle.dumps(_without(raw, keys), protocol=4)} if keys else {}
    except (AttributeError, TypeError, ValueError, LookupError, RecursionError, pickle.PicklingError) as exc:
        raise CorruptCheckpointError(f"{source} is not DCP metadata: {type(exc).__name__}: {exc}") from exc
    return Removal(keys, renewed, _files_of(keys, raw))


def _matches(key: str, entry: Any, prefix: str) -> bool:
    """Whether the entry is a tensor or one of Megatron's objects, not common state, and has such a key."""
    if not key.startswith(prefix):
        return False
    return hasattr(entry, "chunks") or (key != COMMON_KEY and object_key(key) is not None)


def _files_of(keys: Collection[str], raw: Any) -> frozenset[str]:
    """The data files that hold nothing but these keys."""
    holders = {info.relative_path for index, info in raw.storage_data.items() if index.fqn in keys}
    needed = {info.relative_path for index, info in raw.storage_data.items() if index.fqn not in keys}
    return frozenset(name for name in holders - needed if name.endswith(DATA_SUFFIX))


def _without(raw: Any, keys: Collection[str]) -> Metadata:
    """The same in torch's own classes, without some keys.

    Plans of ranks (``all_local_plans``) are left out: they are of a save that had all keys, and only let Megatron skip
    its planning of the next save.
    """
    metadata = Metadata(
        state_dict_metadata={key: _entry(entry) for key, entry in raw.state_dict_metadata.items() if key not in keys},
        planner_data=_kept(getattr(raw, "planner_data", None), keys),
        storage_data=dict(_place(index, info) for index, info in raw.storage_data.items() if index.fqn not in keys),
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


def _place(index: Any, info: Any) -> tuple[MetadataIndex, StorageInfo]:
    place = MetadataIndex(index.fqn, getattr(index, "offset", None), getattr(index, "index", None))
    return place, StorageInfo(info.relative_path, int(info.offset), int(info.length))


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


__all__ = ["leave_out"]
