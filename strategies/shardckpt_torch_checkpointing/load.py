"""Load the checkpoints of torch_checkpointing at any number of ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from shardckpt.chunks import ChunkLoadStrategy, StoredChunk
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Box, shard_parts
from shardckpt.state_dict import nest_values
from shardckpt_torch_checkpointing.check import check_files, list_files
from shardckpt_torch_checkpointing.files import join_path
from shardckpt_torch_checkpointing.index import Index
from shardckpt_torch_checkpointing.metadata import METADATA_FILE
from shardckpt_torch_checkpointing.objects import make_chunk, read_object, read_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shardckpt.chunks import ChunkRead
    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.planning import FlatPart
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext, StoredColumns, StoredFile

#: A save writes here, and renames the directory at its end.
_TEMPORARY = "tmp_"


class TorchCheckpointingLoadStrategy(ChunkLoadStrategy):
    """Reads the directories of torch_checkpointing 0.1."""

    backend = "torch_checkpointing"
    version = 1

    def list_chunks(self, context: LoadContext) -> Iterator[StoredChunk]:
        """Yield the chunks of all tensors; a tensor whose files are all missing has one chunk without elements."""
        index = _read_index(context)
        for tensor in index.tensors.values():
            layouts = index.files[str(tensor.path[0])]
            boxes = [(chunk.box, layouts[chunk.rank].file) for chunk in tensor.chunks]
            for box, file in boxes or [(Box.from_shape((0,) * len(tensor.shape)), "")]:
                yield StoredChunk(tensor.key, tensor.dtype, tensor.shape, box, file)

    def match(self, shard: ShardedTensor, context: LoadContext) -> Mapping[FlatPart, Sequence[tuple[StoredChunk, Box]]]:
        """Return the parts of files that a shard needs, after a check that its elements are stored; see the base."""
        index = _read_index(context)
        tensor = index.tensors[shard.key]
        found: dict[FlatPart, list[tuple[StoredChunk, Box]]] = {}
        for part in shard_parts(shard):
            if not shard.allow_shape_mismatch:
                index.check_stored(shard.key, part.box)
            found[part] = [
                (make_chunk(shard.key, tensor, each), each.box) for each in index.find_regions(shard.key, part.box)
            ]
        return found

    def read_part(self, read: ChunkRead, context: LoadContext) -> None:
        """Read a part of a file, which :meth:`match` has found."""
        read_part(read, context.reader)

    def list_objects(self, context: LoadContext) -> Sequence[str]:
        """Return the unique keys of an object for each rank of the items that differ."""
        return [
            ShardedObject(item, None, (len(contents),), (rank,)).unique_key
            for item, contents in _read_index(context).per_rank.items()
            for rank in contents
        ]

    def read_object(self, shard: ShardedObject, context: LoadContext) -> Any:
        """Return an object, which may have tensors."""
        return read_object(shard, _read_index(context), context.reader)

    def identify(self, context: LoadContext) -> bytes:
        """Return bytes that identify the files."""
        return _read_index(context).identity

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: compare the plain tensors that several ranks have saved, then load as the base does."""
        with context.comm.local_phase("comparing plain tensors"):
            keys = [shard.key for shard in wanted]
            _read_index(context).check_copies(keys, context.comm.rank, context.comm.world_size)
        return super().load(wanted, context)

    def can_build(self, wanted: Sequence[ShardedObject], context: LoadContext) -> list[bool]:
        """Return for each object whether the checkpoint has its values, below its key or as a state of each rank."""
        index = _read_index(context)
        return [shard.key in index.per_rank or index.nested.has(shard.key) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the values, by item, that are not tensors and are the same on all ranks, nested as saved."""
        values = _read_index(context).values
        found: StateDict = nest_values((path, deepcopy(value)) for path, value in values.items())
        return found

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the index in columns, and the keys of the values that are the same on all ranks."""
        return super().list_columns(context)._replace(values=[*map(join_path, _read_index(context).values)])

    def recognises(self, directory: Path) -> int | None:
        """Return 1 if the directory has ``metadata.pkl`` or ``<item>_0.pt``, and is no unfinished save's."""
        if directory.name.startswith(_TEMPORARY):
            return None
        if (directory / METADATA_FILE).is_file():
            return 1
        has_items = any(path.name.endswith("_0.pt") and not path.is_dir() for path in directory.iterdir())
        return 1 if has_items and not (directory / ".metadata").is_file() else None

    def owned_files(self, directory: Path) -> set[str]:
        """Return the names of the files that torch_checkpointing writes if the user names no others."""
        files = [path for path in directory.iterdir() if path.name == METADATA_FILE or path.suffix == ".pt"]
        return {path.name for path in files if not path.is_dir()}

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have, each with its keys."""
        return list_files(reader)

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each of these files by name, or None; values are compared with the CRCs of archives."""
        return check_files(reader)


def _read_index(context: LoadContext) -> Index:
    """Return the index of the checkpoint; it is read once per reader."""
    return context.reader.parsed("index", lambda: Index(context.reader, context.allow_globals))
