"""A strategy whose files are a tree, as those of zarr are: ``arrays/<key>/c/<offset>/<offset>/0``, and an index.

Version 1 keeps the index in ``index/all.json``; version 2, which :class:`Move` makes of it, in ``all.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import hookimpl
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import part_view, shard_parts
from shardckpt.strategy import AsyncSaveStrategy, LoadStrategy, Migration, PreparedSave, Removal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase, StateDict
    from shardckpt.plugins import StrategyRegistry
    from shardckpt.storage import CheckpointReader, CheckpointWriter
    from shardckpt.strategy import LoadContext, PlanContext, SaveContext

INDEX = "index/all.json"
COMMON = "common.json"


@dataclass
class _Work:
    tensors: list[torch.Tensor]
    keys: list[str]
    names: list[str]

    def write(self, writer: CheckpointWriter) -> None:
        """One file a tensor."""
        for tensor, name in zip(self.tensors, self.names, strict=True):
            writer.write(name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


class SaveTree(AsyncSaveStrategy):
    """Writes (tree, 1).

    Args:
        name: Makes the name of a file of its key and offset.
    """

    backend, version, reader = "tree", 1, "shardckpt-tree 1.0"

    def __init__(self, name: str = "arrays/{key}/c/{offset}/0") -> None:
        self.name = name

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Plan."""
        work = _Work([], [], [])
        entries: list[dict[str, Any]] = []
        stored = [shard for shard in shards if is_main_replica(shard.replica_id)]
        for shard in stored:
            if isinstance(shard, ShardedObject):
                entries.append({"key": shard.unique_key, "value": shard.data})
            elif isinstance(shard, ShardedTensor):
                for part in shard_parts(shard):
                    name = self.name.format(key=shard.key, offset="/".join(map(str, part.box.offset)) or "x")
                    box = {"offset": [*part.box.offset], "extent": [*part.box.shape], "file": name}
                    about = {"key": shard.key, "dtype": str(shard.dtype)[6:], "shape": [*shard.global_shape]}
                    entries.append(about | box)
                    work.tensors.append(part_view(shard, part))
                    work.keys.append(shard.key)
                    work.names.append(name)
        everyone = context.comm.gather(entries)
        content = [entry for part in everyone for entry in part]
        return PreparedSave(work, partial(_finish, content, common, [shard.without_data() for shard in stored]))


def _finish(
    entries: list[dict[str, Any]],
    common: CommonStateDict,
    shards: list[ShardedBase],
    _results: Sequence[Any],
    context: SaveContext,
) -> None:
    with context.comm.local_phase("writing the index"):
        context.writer.record_shards(shards)
        if context.comm.is_main:
            context.writer.write(INDEX, json.dumps(entries).encode())
            context.writer.write(COMMON, json.dumps(common).encode())


class LoadTree(LoadStrategy):
    """Reads (tree, 1), and removes keys from it."""

    backend, version, index = "tree", 1, INDEX

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Put each shard together from all boxes of its tensor."""
        entries = self._entries(context.reader)
        values = {entry["key"]: entry["value"] for entry in entries if "value" in entry}
        found = []
        for shard in wanted:
            if isinstance(shard, ShardedObject):
                found.append(values[shard.unique_key])
            elif isinstance(shard, ShardedTensor):
                whole = self._whole(shard.key, entries, context.reader)
                shard.init_data("cpu")
                for part in shard_parts(shard):
                    part_view(shard, part).copy_(whole[_box(part.box.offset, part.box.shape)])
                found.append(shard.data)
        return found

    def load_common(self, context: LoadContext) -> StateDict:
        """What the main rank had."""
        return json.loads(context.reader.read(COMMON))  # type: ignore[no-any-return]

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """An entry a key."""
        entries = {entry["key"]: entry for entry in self._entries(context.reader)}
        return [
            ShardedObject.empty_from_unique_key(key)
            if "value" in entry
            else ShardedTensor.from_global_shape(key, getattr(torch, entry["dtype"]), tuple(entry["shape"]))
            for key, entry in entries.items()
        ]

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """Drop files, and rewrite the index."""
        entries = self._entries(reader)
        gone = [entry for entry in entries if entry["key"].startswith(prefix)]
        kept = json.dumps([entry for entry in entries if entry not in gone]).encode()
        files = frozenset(entry["file"] for entry in gone if "file" in entry)
        return Removal(frozenset(entry["key"] for entry in gone), {self.index: kept} if gone else {}, files)

    def _entries(self, reader: CheckpointReader) -> Any:
        return json.loads(reader.read(self.index))

    def _whole(self, key: str, entries: list[dict[str, Any]], reader: CheckpointReader) -> torch.Tensor:
        mine = [entry for entry in entries if entry["key"] == key]
        dtype = getattr(torch, mine[0]["dtype"])
        whole = torch.zeros(mine[0]["shape"], dtype=dtype)
        for entry in mine:
            data = bytearray(reader.read(entry["file"]))
            if data:
                stored = torch.frombuffer(data, dtype=dtype).view(entry["extent"])
                whole[_box(entry["offset"], entry["extent"])] = stored
        return whole


class LoadTree2(LoadTree):
    """Reads (tree, 2)."""

    version, index = 2, "all.json"


class Move(Migration):
    """Moves the arrays into a folder, and the index out of its own."""

    backend, from_version, to_version = "tree", 1, 2
    folder = "v2"

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Copy the files one by one."""
        entries = json.loads(reader.read(INDEX))
        for entry in entries:
            if "file" in entry:
                name = f"{self.folder}/{entry['file']}"
                writer.write(name, reader.read(entry["file"]))
                entry["file"] = name
        writer.write(LoadTree2.index, json.dumps(entries).encode())
        writer.write(COMMON, reader.read(COMMON))


class Plugin:
    """The plugin, as an entry point would name it."""

    @hookimpl
    def shardckpt_register(self, registry: StrategyRegistry) -> None:
        """Add both versions."""
        for each in (SaveTree, LoadTree, LoadTree2):
            registry.add(each)
        registry.add_migration(Move)


def _box(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))
