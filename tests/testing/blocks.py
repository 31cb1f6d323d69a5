"""A strategy that makes every claim of the contract: (blocks, 2), raw bytes and a JSON index; and its version 1.

Each rank writes ``rank_<rank>.bin``: the bytes of its shards and its pickled objects. The main rank writes an index
with the place of each, and ``common.pt``. Version 1 had ``size`` for ``extent`` in the index.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from shardckpt import decode_object, encode_object
from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import Box, BoxFinder, part_view, shard_parts
from shardckpt.strategy import AsyncSaveStrategy, LoadStrategy, Migration, PreparedSave
from shardckpt.tensors import plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader, CheckpointWriter
    from shardckpt.strategy import LoadContext, PlanContext, SaveContext

INDEX, COMMON = "index.json", "common.pt"
Ints = tuple[Annotated[int, Field(ge=0)], ...]


class Entry(BaseModel):
    """Where an item lies: a box of a tensor, or an object, whose ``dtype`` is empty."""

    key: str
    dtype: str
    shape: Ints = ()
    offset: Ints = ()
    extent: Ints = ()
    file: str = ""
    start: Annotated[int, Field(ge=0)] = 0
    nbytes: Annotated[int, Field(ge=0)] = 0


_Entries = TypeAdapter(list[Entry])


@dataclass
class Work:
    """What one rank writes: tensors, then objects."""

    tensors: list[torch.Tensor]
    keys: list[str]
    entries: list[Entry]
    objects: list[bytes]
    shards: list[ShardedBase]
    file: str
    common: bytes | None = field(default=None)

    def write(self, writer: CheckpointWriter) -> list[Entry]:
        """Write the rank's file, and say where everything lies in it."""
        file = writer.create(self.file)
        for entry, data in zip(self.entries, self.data(), strict=True):
            entry.nbytes = len(data)
            entry.start = file.append(len(data), lambda data=data: [data], what=entry.key)
        writer.finish(file)
        if self.common is not None:
            self.write_common(writer, self.common)
        writer.record_shards(self.shards)
        return self.entries

    def data(self) -> list[memoryview]:
        """The bytes of each entry."""
        return [*(self.encode(tensor) for tensor in self.tensors), *map(memoryview, self.objects)]

    def encode(self, tensor: torch.Tensor) -> memoryview:
        """A tensor's values, row by row."""
        return tensor_bytes(plain_cpu(tensor)).cast("B")

    def write_common(self, writer: CheckpointWriter, data: bytes) -> None:
        """Write the common state."""
        writer.write(COMMON, data)


class SaveBlocks(AsyncSaveStrategy):
    """Writes (blocks, 2)."""

    backend, version, reader = "blocks", 2, "shardckpt-blocks 2.0"
    caches_plan = True
    work = Work

    @property
    def plan_cache_key(self) -> Any:
        """Plans depend on the shards only."""
        return type(self)

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """List what this rank writes."""
        with context.comm.collective_phase("planning"):
            mine = [shard for shard in shards if self.is_mine(shard, context)]
            work = self.make_work(mine, common, context)
        return PreparedSave(work, self.finish, plan=True)

    def replan(
        self, plan: Any, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Plan again: nothing here is worth keeping but the right to."""
        return self.prepare(shards, common, context)

    def is_mine(self, shard: ShardedBase, context: PlanContext) -> bool:
        """Whether this rank writes the shard."""
        return is_main_replica(shard.replica_id)

    def make_work(self, mine: list[ShardedBase], common: CommonStateDict, context: PlanContext) -> Work:
        """The rank's part."""
        tensors, keys, entries, objects = [], [], [], []
        for shard in mine:
            if isinstance(shard, ShardedTensor):
                for part in shard_parts(shard):
                    tensors.append(part_view(shard, part))
                    keys.append(shard.key)
                    entries.append(self.describe(shard, part.box))
        for shard in mine:
            if isinstance(shard, ShardedObject):
                what = f"object {shard.key!r}"
                objects.append(encode_object(shard.data, what, context.allow_globals))
                entries.append(Entry(key=shard.unique_key, dtype=""))
        rank, shards = context.comm.rank, [shard.without_data() for shard in mine]
        work = self.work(tensors, keys, entries, objects, shards, f"rank_{rank}.bin")
        for entry in entries:
            entry.file = work.file
        if context.comm.is_main:
            work.common = self.encode_common(common, context)
        return work

    def describe(self, shard: ShardedTensor, box: Box) -> Entry:
        """The entry of a box."""
        dtype = str(shard.dtype).removeprefix("torch.")
        return Entry(key=shard.key, dtype=dtype, shape=shard.global_shape, offset=box.offset, extent=box.shape)

    def encode_common(self, common: CommonStateDict, context: PlanContext) -> bytes:
        """The common state, pickled so that a load accepts it."""
        return encode_object(common, "the common state", context.allow_globals)

    def finish(self, results: Sequence[list[Entry]], context: SaveContext) -> None:
        """Write the index of all ranks' files."""
        with context.comm.local_phase("writing the index"):
            if context.comm.is_main:
                self.write_index([entry for entries in results for entry in entries], context.writer)

    def write_index(self, entries: list[Entry], writer: CheckpointWriter) -> None:
        """Write the index."""
        writer.write(INDEX, json.dumps([entry.model_dump() for entry in entries]).encode())


class LoadBlocks(LoadStrategy):
    """Reads (blocks, 2)."""

    backend, version = "blocks", 2

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Put each shard together from the stored boxes that it touches."""
        index = self.read_index(context.reader)
        context.require_same_save(self.identify(context.reader), "record")
        return [self.value(shard, index, context) for shard in wanted]

    def identify(self, reader: CheckpointReader) -> bytes:
        """What only this save has."""
        return reader.manifest.save_id.encode()

    def load_common(self, context: LoadContext) -> StateDict:
        """What ``common.pt`` has."""
        found = self.decode(context.reader.read(COMMON), COMMON, context)
        if not isinstance(found, dict):
            raise CorruptCheckpointError(f"{context.reader.directory / COMMON} has no dict")
        return found

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """One entry for each key."""
        tensors, objects = {}, []
        for entry in self.read_index(context.reader):
            if entry.dtype:
                tensors[entry.key] = ShardedTensor.from_global_shape(entry.key, dtype_of(entry), entry.shape)
            else:
                objects.append(ShardedObject.empty_from_unique_key(entry.key))
        return [*tensors.values(), *objects]

    def read_index(self, reader: CheckpointReader) -> list[Entry]:
        """The index, checked."""
        return reader.parsed(INDEX, lambda: self.parse_index(reader))

    def parse_index(self, reader: CheckpointReader) -> list[Entry]:
        """Parse the index."""
        try:
            entries = _Entries.validate_json(self.read(reader, INDEX))
        except ValidationError as exc:
            raise CorruptCheckpointError(f"{reader.directory / INDEX} is damaged: {exc}") from exc
        shapes: dict[str, tuple[Any, ...]] = {}
        for entry in entries:
            if shapes.setdefault(entry.key, (entry.dtype, entry.shape)) != (entry.dtype, entry.shape):
                raise CorruptCheckpointError(f"{reader.directory / INDEX}: {entry.key!r} has two shapes or dtypes")
            if entry.dtype and not self.fits(entry):
                raise CorruptCheckpointError(f"{reader.directory / INDEX}: a box of {entry.key!r} is wrong: {entry!r}")
        return entries

    def fits(self, entry: Entry) -> bool:
        """Whether a box lies in its tensor and has as many bytes as it needs."""
        if not len(entry.shape) == len(entry.offset) == len(entry.extent):
            return False
        places = zip(entry.offset, entry.extent, entry.shape, strict=True)
        inside = all(start + size <= whole for start, size, whole in places)
        return inside and entry.nbytes == math.prod(entry.extent) * dtype_of(entry).itemsize

    def value(self, shard: ShardedBase, index: list[Entry], context: LoadContext) -> Any:
        """A shard's value."""
        if isinstance(shard, ShardedTensor):
            entries = [entry for entry in index if entry.dtype and entry.key == shard.key]
            shard.init_data("cpu")
            for part in shard_parts(shard):
                self.fill(shard, part_view(shard, part), part.box, entries, context)
            return shard.data
        found = [entry for entry in index if not entry.dtype and entry.key == shard.unique_key]  # type: ignore[attr-defined]
        if len(found) != 1:
            raise CorruptCheckpointError(f"{INDEX} names {shard.key!r} {len(found)} times")
        return self.decode(self.read_range(context.reader, found[0]), found[0].file, context)

    def fill(
        self, shard: ShardedTensor, target: torch.Tensor, wanted: Box, entries: list[Entry], context: LoadContext
    ) -> None:
        """Copy what the stored boxes have of the wanted one."""
        finder = BoxFinder([self.box(entry) for entry in entries])
        found = list(finder.touching(wanted))
        if shard.allow_shape_mismatch:
            target.zero_()
        elif sum(common.volume for _, common in found) != wanted.volume:
            raise CorruptCheckpointError(f"{shard.key!r}: not all elements of {wanted} are stored")
        for number, common in found if wanted.volume else ():
            entry = entries[number]
            data = self.read_range(context.reader, entry)
            stored = torch.frombuffer(data, dtype=dtype_of(entry)).view(entry.extent)
            target[common.within(wanted)] = stored[common.within(self.box(entry))]

    def box(self, entry: Entry) -> Box:
        """The box of an entry."""
        return Box(entry.offset, entry.extent)

    def read(self, reader: CheckpointReader, name: str) -> bytes:
        """A file's bytes."""
        return reader.read(name)

    def read_range(self, reader: CheckpointReader, entry: Entry) -> bytearray:
        """An entry's bytes."""
        return bytearray(reader.read_range(entry.file, entry.start, entry.nbytes, entry.key))

    def decode(self, data: bytes | bytearray, name: str, context: LoadContext) -> Any:
        """An object, by the allow-list."""
        return decode_object(bytes(data), name, context.allow_globals)


def dtype_of(entry: Entry) -> torch.dtype:
    """The dtype that an entry names."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"{INDEX} names a dtype {entry.dtype!r} that this torch does not have")
    return dtype


class SaveBlocks1(SaveBlocks):
    """Writes (blocks, 1)."""

    version, reader = 1, "shardckpt-blocks 1.0"

    def write_index(self, entries: list[Entry], writer: CheckpointWriter) -> None:
        """Write the index as version 1 had it."""
        old = [{"size" if name == "extent" else name: v for name, v in e.model_dump().items()} for e in entries]
        writer.write(INDEX, json.dumps(old).encode())


class AddExtents(Migration):
    """Rewrites (blocks, 1) as (blocks, 2)."""

    backend, from_version, to_version = "blocks", 1, 2

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Rename a field of the index, and copy the rest."""
        record = reader.manifest.record
        for file in record.files if record else ():
            data = reader.read(file.name)
            if file.name == INDEX:
                old = json.loads(data)
                data = json.dumps([{"extent" if n == "size" else n: v for n, v in e.items()} for e in old]).encode()
            writer.write(file.name, data)
