"""Load (zarr, 1): only the chunks that are needed, and of a chunk that is not compressed only the rows."""

from __future__ import annotations

import zlib
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive import decode_object
from shardckpt.chunks import ChunkLoadStrategy, StoredChunk
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt.manifest import MARKER_NAME
from shardckpt.planning import Box, intersect, shard_parts
from shardckpt.storage import StoredArray, read_box
from shardckpt.strategy import StoredColumns, StoredFile, find_error
from shardckpt_zarr.arrays import ARRAY_FILE, ChunkedArray
from shardckpt_zarr.compressed import decompress
from shardckpt_zarr.index import COMMON_FILE, count_files, find_folders, read_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from shardckpt.chunks import ChunkRead
    from shardckpt.mapping import ShardedObject, ShardedTensor, StateDict
    from shardckpt.planning import FlatPart
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext
    from shardckpt_zarr.index import Index


class ZarrLoadShardedStrategy(ChunkLoadStrategy):
    """Reads checkpoints of Megatron-Core 0.4 to 0.15 with its ``zarr`` backend."""

    backend = "zarr"
    version = 1

    def list_chunks(self, context: LoadContext) -> Iterator[StoredChunk]:
        """Yield the chunks of all tensors, as far as their folders can have them."""
        for key, array in read_index(context.reader).arrays.items():
            for chunk in islice(_find_chunks(array, array.box), count_files(context.reader.place, key)):
                yield chunk._replace(box=intersect(chunk.box, array.box) or chunk.box)

    def match(self, shard: ShardedTensor, context: LoadContext) -> Mapping[FlatPart, Sequence[tuple[StoredChunk, Box]]]:
        """Return the chunks that a shard needs, by the grid: a tensor may have a million; see the base.

        A chunk that is missing or has another size is a CorruptCheckpointError.
        """
        array, checked = read_index(context.reader).arrays[shard.key], set()
        found: dict[FlatPart, list[tuple[StoredChunk, Box]]] = {}
        for part in shard_parts(shard):
            stored = intersect(part.box, array.box)  # with allow_shape_mismatch the shard may reach beyond the tensor
            if stored is None:
                continue
            for chunk in _find_chunks(array, stored):
                if chunk.file not in checked:
                    array.check_chunk(chunk.file, context.reader)
                    checked.add(chunk.file)
                common = intersect(stored, chunk.box)
                if common is not None:
                    found.setdefault(part, []).append((chunk, common))
        return found

    def read_part(self, read: ChunkRead, context: LoadContext) -> None:
        """Read the rows that are needed, or all of a compressed chunk."""
        chunk = read.chunk
        if chunk.source.compressor:
            super().read_part(read, context)
        else:
            stored = StoredArray(chunk.file, 0, chunk.dtype, chunk.source.chunks)
            read_box(context.reader, stored, read.start, read.target, f"tensor {chunk.key!r}")

    def read_chunk(self, chunk: StoredChunk, context: LoadContext) -> torch.Tensor:
        """Decompress a chunk."""
        array, reader = chunk.source, context.reader
        source = f"tensor {chunk.key!r}: {reader.directory / chunk.file}"
        data = decompress(reader.read(chunk.file), array.compressor, array.chunk_nbytes, source)
        return torch.frombuffer(data, dtype=torch.uint8).view(array.dtype).view(array.chunks)

    def read_object(self, shard: ShardedObject, context: LoadContext) -> Any:
        """Read an object, which is a file."""
        file = read_index(context.reader).objects[shard.unique_key]
        source = f"object {shard.unique_key!r} ({context.reader.directory / file})"
        return decode_object(context.reader.read(file), source, context.allow_globals)

    def identify(self, context: LoadContext) -> bytes:
        """Return the descriptions of all tensors and the CRC-32 of the common state, which has Megatron's iteration.

        The checkpoint has no id, and to read all chunks would be a second load.
        """
        reader = context.reader
        crc = reader.parsed(
            "CRC of the common state", lambda: zlib.crc32(reader.read(COMMON_FILE)) if reader.has(COMMON_FILE) else None
        )
        return repr((crc, read_index(reader))).encode()

    def load_common(self, context: LoadContext) -> StateDict:
        """Read ``common.pt``, with its tensors on the CPU."""
        path = context.reader.directory / COMMON_FILE
        if not context.reader.has(COMMON_FILE):
            raise CorruptCheckpointError(
                f"{path} is missing: it has the common state. Copy it from where the checkpoint came from; without it, "
                "open_checkpoint reads the tensors alone"
            )
        data = context.reader.read(COMMON_FILE, "the common state")
        return decode_object(data, str(path), context.allow_globals)  # type: ignore[no-any-return]

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the stored tensors by their descriptions, without a look at their chunks, and the stored objects."""
        index = read_index(context.reader)
        dtypes = [array.dtype for array in index.arrays.values()]
        shapes = [array.shape for array in index.arrays.values()]
        return StoredColumns([*index.arrays], dtypes, shapes, [*index.objects], {})

    def owned_files(self, directory: Path) -> set[str]:
        """Return the names of the files and folders in a directory that Megatron wrote."""
        tops = {folder.name.partition("/")[0] for folder in find_folders(directory)}
        locks = {f"{name}.sync" for name in tops}
        return {path.name for path in directory.iterdir()} & {COMMON_FILE, MARKER_NAME, *tops, *locks}

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have."""
        index = read_index(reader)
        found = [StoredFile(COMMON_FILE)]
        for key, array in index.arrays.items():
            nbytes = 0 if array.compressor else array.chunk_nbytes
            found.append(StoredFile(f"{key}/{ARRAY_FILE}", 0, (key,)))
            # as many as the folder has, and one: if the array claims to have more chunks, one of these is missing
            most = count_files(reader.place, key)
            found += [StoredFile(file, nbytes, (key,)) for file, _ in islice(array.touching(array.box), most)]
        return found + [StoredFile(file, 0, (key,)) for key, file in index.objects.items()]

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each of these files by name, or None; values of tensors are not read."""
        index = read_index(reader)
        return {file.name: find_error(_check_file, file, reader, index) for file in self.list_files(reader)}


def _find_chunks(array: ChunkedArray, box: Box) -> Iterator[StoredChunk]:
    for file, chunk in array.touching(box):
        yield StoredChunk(array.key, array.dtype, array.shape, chunk, file, array)


def _check_file(file: StoredFile, reader: CheckpointReader, index: Index) -> None:
    folder, _, name = file.name.rpartition("/")
    if folder in index.arrays:
        if name != ARRAY_FILE:  # that one has been read
            index.arrays[folder].check_chunk(file.name, reader)
        return
    with suppress(UnsafePickleError):  # an intact pickle with globals that a load must be told to allow
        decode_object(reader.read(file.name), str(reader.directory / file.name), ())
