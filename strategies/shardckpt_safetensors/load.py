"""Load (safetensors, 1): no pickle is read, and nothing in the files is run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.chunks import ItemReader, LoadPlan, ObjectRead, describe_columns
from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import PlainObject
from shardckpt.strategy import LoadStrategy
from shardckpt_safetensors.check import check_files, list_files
from shardckpt_safetensors.index import read_index
from shardckpt_safetensors.index_names import COMMON_FILE
from shardckpt_safetensors.objects import decode_object, decode_tree_file
from shardckpt_safetensors.remove import plan_removal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, ShardedObject, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext, Removal, StoredBox, StoredColumns, StoredFile
    from shardckpt_safetensors.index import StoredIndex


class SafetensorsLoadShardedStrategy(LoadStrategy):
    """Reads checkpoints as FORMAT.md specifies them, whichever program wrote them."""

    backend = "safetensors"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: plan, and after all ranks have planned, read into the destinations; see the base.

        If the checkpoint is being overwritten, and ranks have read different saves, that is a CheckpointReplacedError.
        """
        index = read_index(context.reader)
        with context.comm.local_phase("planning the load"):
            plan = LoadPlan(wanted, ItemReader(context.reader, index), partial(_find_object, index))
        context.require_same_save(index.header.id.encode(), "index")
        with context.comm.local_phase("reading shards"):
            plan.read()
        return [shard.data for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """Read the common state, with its tensors on the CPU. A codec that is not registered is an error."""
        path = f"{context.reader.directory / COMMON_FILE}"
        found = decode_tree_file(context.reader.read(COMMON_FILE, "the common state"), path)
        if not isinstance(found, dict):
            raise CorruptCheckpointError(f"{path} has a {type(found).__name__}, expected a dict")
        return found

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored tensors without data, unsharded, by each of their names, and the stored objects."""
        return describe_columns(self.list_columns(context))

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the keys, dtypes and shapes of the stored tensors, and the keys of the stored objects."""
        return read_index(context.reader).columns()

    def read_plain_objects(self, context: LoadContext) -> list[PlainObject]:
        """Return the objects whose names are no names of ShardedObjects: other programs may write such."""
        found = []
        for name in read_index(context.reader).plain_objects:
            stored, what = read_index(context.reader).find_object(name), f"object {name!r}"
            value = decode_object(stored.codec, context.reader.read_range(*stored.item, what), what)
            found.append(PlainObject(name, value))
        return found

    def list_plain_objects(self, context: LoadContext) -> list[str]:
        """Return the names of these objects, without reading them."""
        return read_index(context.reader).plain_objects

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """Plan the removal of the tensors and objects whose keys begin with a prefix; nothing is changed yet."""
        return plan_removal(prefix, reader)

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have."""
        return list_files(reader)

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Return which file holds which box of each tensor."""
        return read_index(reader).list_boxes()

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each listed file by name, or None, as far as a check without digests finds one."""
        return check_files(reader)


def _find_object(index: StoredIndex, shard: ShardedObject) -> ObjectRead:
    """Return how an object is read, by its codec."""
    stored, what = index.find_object(shard.unique_key), f"object {shard.unique_key!r}"

    def load(data: bytes) -> None:
        shard.data = decode_object(stored.codec, data, what)

    return ObjectRead(stored.item, what, load)
