"""Load the checkpoints of torch_checkpointing at any number of ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from shardckpt.chunks import read_targets
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.state_dict import nest_values
from shardckpt.strategy import LoadStrategy, StoredBox, StoredColumns
from shardckpt_torch_checkpointing.check import check_files, list_files
from shardckpt_torch_checkpointing.files import join_path
from shardckpt_torch_checkpointing.index import Index
from shardckpt_torch_checkpointing.metadata import METADATA_FILE
from shardckpt_torch_checkpointing.requested import plan_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext, StoredFile

#: A save writes here, and renames the directory at its end.
_TEMPORARY = "tmp_"


class TorchCheckpointingLoadStrategy(LoadStrategy):
    """Reads the directories of torch_checkpointing 0.1."""

    backend = "torch_checkpointing"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: plan, and after all ranks have planned, read into the destinations; see the base.

        If the checkpoint is being overwritten, and ranks have read different saves, that is a CheckpointReplacedError.
        """
        index = _read_index(context.reader, context.allow_globals)
        with context.comm.local_phase("planning the load"):
            requested = [plan_shard(shard, index) for shard in wanted]
            index.check_copies([shard.key for shard in wanted], context.comm.rank, context.comm.world_size)
        context.require_same_save(index.identity, "files")
        with context.comm.local_phase("reading shards"):
            reads = sorted((read for each in requested for read in each.reads()), key=lambda read: read.place)
            read_targets(reads, lambda read: read.run(context.reader), context.reader)
            values = [each.value() for each in requested]
        return values

    def can_build(self, wanted: Sequence[ShardedObject], context: LoadContext) -> list[bool]:
        """Return for each object whether the checkpoint has its values, below its key or as a state of each rank."""
        index = _read_index(context.reader, context.allow_globals)
        return [shard.key in index.per_rank or index.nested.has(shard.key) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the values, by item, that are not tensors and are the same on all ranks, nested as saved."""
        values = _read_index(context.reader, context.allow_globals).values
        found: StateDict = nest_values((path, deepcopy(value)) for path, value in values.items())
        return found

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored tensors without data, unsharded, and an object for each rank of items that differ."""
        tensors, objects = _describe_stored(_read_index(context.reader, context.allow_globals))
        return [*tensors, *objects]

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the same in columns, and the keys of the values that are the same on all ranks."""
        index = _read_index(context.reader, context.allow_globals)
        return StoredColumns.from_shards(*_describe_stored(index), [join_path(path) for path in index.values])

    def recognises(self, directory: Path) -> int | None:
        """Return 1 if the directory has ``metadata.pkl`` or ``<item>_0.pt``, and is not that of an unfinished save."""
        if directory.name.startswith(_TEMPORARY):
            return None
        if (directory / METADATA_FILE).is_file():
            return 1
        is_there = any(path.name.endswith("_0.pt") for path in directory.iterdir())
        return 1 if is_there and not (directory / ".metadata").is_file() else None

    def owned_files(self, directory: Path) -> set[str]:
        """Return the names of the files that torch_checkpointing writes if the user names no others."""
        return {path.name for path in directory.iterdir() if path.name == METADATA_FILE or path.suffix == ".pt"}

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have, each with its keys."""
        return list_files(reader)

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Return which file holds which piece of each tensor."""
        index = _read_index(reader, ())
        for tensor in index.tensors.values():
            layouts = index.files[str(tensor.path[0])]
            for piece in tensor.pieces:
                yield StoredBox(tensor.key, piece.box.offset, piece.box.shape, layouts[piece.rank].file)

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each of these files by name, or None; values are compared with the CRCs of archives."""
        return check_files(reader)


def _read_index(reader: CheckpointReader, allow_globals: tuple[Any, ...]) -> Index:
    """Return what the checkpoint stores; it is read once per reader."""
    return reader.parsed("index", lambda: Index(reader, allow_globals))


def _describe_stored(index: Index) -> tuple[list[ShardedTensor], list[ShardedObject]]:
    """Describe the stored tensors without data, unsharded, and each rank's object of the items that differ."""
    tensors = [ShardedTensor.from_global_shape(each.key, each.dtype, each.shape) for each in index.tensors.values()]
    objects = [
        ShardedObject(item, None, (len(contents),), (rank,))
        for item, contents in index.per_rank.items()
        for rank in contents
    ]
    return tensors, objects
