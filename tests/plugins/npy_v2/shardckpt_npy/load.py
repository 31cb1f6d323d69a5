"""Loading: every wanted box is put together from the stored boxes that it touches."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Box, BoxFinder, part_view, shard_parts
from shardckpt.strategy import LoadStrategy
from shardckpt_npy.files import COMMON, INDEX, named_dtype, read_array, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext


class NpyLoadStrategy(LoadStrategy):
    """Reads (npy, 2)."""

    backend = "npy"
    version = 2
    reads = "a .npy file for every shard of any dtype, objects as JSON"

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """The values of the wanted shards; the core lets all ranks agree that it worked."""
        index = _Index(context.reader)
        # all ranks have planned, and read one save: from here on destinations may change
        context.require_same_save(context.reader.manifest.save_id.encode(), "record")
        return [index.value(shard) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """What ``common.json`` says."""
        return read_json(context.reader, COMMON)  # type: ignore[no-any-return]

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """What ``index.json`` says."""
        return _Index(context.reader).shards()


class _Index:
    """``index.json``, by key."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._objects: dict[str, Any] = {}
        self._pieces: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in read_json(reader, INDEX):
            if "value" in entry:
                self._objects[entry["key"]] = entry["value"]
            else:
                self._pieces[entry["key"]].append(entry)
        self._finders = {key: BoxFinder([*map(_box, pieces)]) for key, pieces in self._pieces.items()}

    def shards(self) -> list[ShardedBase]:
        """A whole tensor a key, and the objects."""
        objects = (ShardedObject.empty_from_unique_key(key) for key in self._objects)
        return [*objects, *(_whole(key, pieces[0]) for key, pieces in self._pieces.items())]

    def value(self, shard: ShardedBase) -> Any:
        """The stored value of a wanted shard."""
        if isinstance(shard, ShardedObject):
            return self._objects[shard.unique_key]
        if isinstance(shard, ShardedTensor):
            shard.init_data("cpu")
            for part in shard_parts(shard):
                self._fill(shard, part_view(shard, part), part.box)
        return shard.data

    def _fill(self, shard: ShardedTensor, target: Any, wanted: Box) -> None:
        found = list(self._finders[shard.key].touching(wanted))
        if shard.allow_shape_mismatch:
            target.zero_()
        elif sum(common.volume for _, common in found) != wanted.volume:
            raise CorruptCheckpointError(f"{shard.key!r}: not all elements of {wanted} are stored")
        for number, common in found:
            piece = self._pieces[shard.key][number]
            source = read_array(self._reader, piece["file"], named_dtype(piece["dtype"]))
            target[common.within(wanted)] = source[common.within(_box(piece))]


def _whole(key: str, piece: dict[str, Any]) -> ShardedTensor:
    shape = tuple(piece["shape"])
    return ShardedTensor(key, None, named_dtype(piece["dtype"]), shape, shape, (0,) * len(shape), (1,) * len(shape))


def _box(piece: dict[str, Any]) -> Box:
    return Box(tuple(piece["offset"]), tuple(piece["extent"]))
