"""Loading: zarr reads the wanted regions, from files that the reader has checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import zarr
from zarr.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Box, intersect, part_view, shard_parts
from shardckpt.strategy import LoadStrategy
from shardckpt_zarr3.group import ROOT, find_dtype, to_tensor, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext


class Zarr3LoadStrategy(LoadStrategy):
    """Reads (zarr3, 1)."""

    backend = "zarr3"
    version = 1
    reads = "a zarr v3 group, an array for every tensor"

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """The values of the wanted shards; no destination changes before all ranks have read the same metadata."""
        stored = _Stored.of(context)
        context.require_same_save(context.reader.manifest.save_id.encode(), "record")
        return [stored.value(shard, context) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """What the root's attributes say."""
        return unpack(_Stored.of(context).common, "the common state", context.allow_globals)  # type: ignore[no-any-return]

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """What the metadata of all arrays say."""
        stored = _Stored.of(context)
        tensors = [ShardedTensor.from_global_shape(key, *stored.spec(key)) for key in stored.arrays]
        return [*tensors, *map(ShardedObject.empty_from_unique_key, stored.objects)]


class _Files(Mapping[str, Any]):
    """A checkpoint's files as zarr's MemoryStore has them; each is read, and its digests checked, when it is asked for.

    A chunk that is not there is damage. Zarr would take it for one of zeros.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> Any:
        if name.endswith(ROOT) and not self._reader.has(name):
            raise KeyError(name)
        return default_buffer_prototype().buffer.from_bytes(self._reader.read(name))

    def __iter__(self) -> Iterator[str]:
        record = self._reader.manifest.record
        return iter([file.name for file in record.files] if record else ())

    def __len__(self) -> int:
        return len([*self])


class _Stored:
    """The group, its arrays by key, objects and common state."""

    def __init__(self, reader: CheckpointReader) -> None:
        group = zarr.open_group(MemoryStore(_Files(reader), read_only=True), mode="r", zarr_format=3)  # type: ignore[arg-type]
        attributes: Any = group.attrs["shardckpt"]
        self.common, self.objects = attributes["common"], attributes["objects"]
        members = [node for _, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
        self.arrays: dict[str, zarr.Array[Any]] = {_note(array)["key"]: array for array in members}

    @classmethod
    def of(cls, context: LoadContext) -> _Stored:
        """The group of a checkpoint, which is opened once."""
        return context.reader.parsed(ROOT, lambda: cls(context.reader))

    def spec(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of a tensor."""
        array = self.arrays[key]
        return find_dtype(_note(array)["dtype"], array), array.shape

    def value(self, shard: ShardedBase, context: LoadContext) -> Any:
        """The stored value of a wanted shard."""
        if isinstance(shard, ShardedObject):
            return unpack(self.objects[shard.unique_key], f"object {shard.key!r}", context.allow_globals)
        if isinstance(shard, ShardedTensor):
            shard.init_data("cpu")
            for part in shard_parts(shard):
                self._fill(shard, part_view(shard, part), part.box)
        return shard.data

    def _fill(self, shard: ShardedTensor, target: Any, wanted: Box) -> None:
        dtype, shape = self.spec(shard.key)
        whole = Box.from_shape(shape)
        common = intersect(whole, wanted)
        if shard.allow_shape_mismatch:
            target.zero_()
        elif common != wanted and wanted.volume:
            raise CorruptCheckpointError(f"{shard.key!r}: {wanted} is not in the array of {shape}")
        if common:
            values: Any = self.arrays[shard.key][common.within(whole)]
            target[common.within(wanted)] = to_tensor(values, dtype)


def _note(array: zarr.Array[Any]) -> Any:
    """What shardckpt noted in an array's attributes."""
    return array.attrs["shardckpt"]
