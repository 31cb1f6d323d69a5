"""Load (zarr, 1): only the chunks that are needed, and of a chunk that is not compressed only the rows."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive import decode_object
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt.manifest import MARKER_NAME
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Box, intersect, part_view, shard_parts, with_memory
from shardckpt.storage import StoredArray, read_box
from shardckpt.strategy import LoadStrategy, StoredBox, StoredFile, find_error
from shardckpt.tensors import synchronize_devices
from shardckpt_zarr.arrays import ARRAY_FILE, ChunkedArray
from shardckpt_zarr.compressed import decompress
from shardckpt_zarr.index import COMMON_FILE, count_files, find_folders, read_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext
    from shardckpt_zarr.index import Index


class _Read(NamedTuple):
    """A box of a chunk, and the tensor that it fills."""

    array: ChunkedArray
    file: str
    start: tuple[int, ...]
    target: torch.Tensor


class ZarrLoadShardedStrategy(LoadStrategy):
    """Reads what Megatron-Core 0.4 to 0.15 wrote with its ``zarr`` backend."""

    backend = "zarr"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: check the files on every rank, then read into the destinations.

        Args:
            wanted: This rank's shards; those with data are filled in place.
            context: The checkpoint's files, and the ranks that load together.

        Returns:
            A tensor for each ShardedTensor and an object for each ShardedObject, in order.

        Raises:
            CheckpointReplacedError: The ranks have read different saves.
            CheckpointingException: A chunk or object is missing, damaged or refused.
        """
        reader = context.reader
        with context.comm.local_phase("planning the load"):
            index = read_index(reader)
            tensors = [shard for shard in wanted if isinstance(shard, ShardedTensor)]
            _check_chunks(tensors, index, reader)
            objects = {
                n: _load_object(index.objects[shard.unique_key], shard.unique_key, context)
                for n, shard in enumerate(wanted)
                if isinstance(shard, ShardedObject)
            }
        context.require_same_save(repr(index).encode(), "descriptions of tensors")
        with context.comm.local_phase("reading shards"):
            filled = iter([_with_zeros(shard) for shard in tensors])
            values = [objects[n] if n in objects else next(filled) for n in range(len(wanted))]
            reads = [read for shard in values if isinstance(shard, ShardedTensor) for read in _plan(shard, index)]
            synchronize_devices(read.target for read in reads)
            reader.map(lambda read: _fill(reader, read), reads, lambda read: read.target.nbytes)
        return [value.data if isinstance(value, ShardedTensor) else value for value in values]

    def load_common(self, context: LoadContext) -> StateDict:
        """Read ``common.pt``.

        Args:
            context: The checkpoint's files.

        Returns:
            The common state, with its tensors on the CPU.

        Raises:
            CorruptCheckpointError: It is damaged or missing.
            UnsafePickleError: Its pickle names a global outside the allow-list.
        """
        path = context.reader.directory / COMMON_FILE
        if not context.reader.has(COMMON_FILE):
            raise CorruptCheckpointError(
                f"{path} is missing: it has the common state. Copy it from where the checkpoint came from; without it, "
                "open_checkpoint reads the tensors alone"
            )
        return decode_object(context.reader.read(COMMON_FILE), str(path), context.allow_globals)  # type: ignore[no-any-return]

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored tensors without data, with their global shapes, and the stored objects."""
        return read_index(context.reader).shards()

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
            # as many as the folder has, and one: if the array claims to have more chunks, one of those is missing
            most = count_files(reader.place, key)
            found += [StoredFile(file, nbytes, (key,)) for file, _ in islice(array.touching(array.box), most)]
        return found + [StoredFile(file, 0, (key,)) for key, file in index.objects.items()]

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Return which file holds which chunk of each tensor, without what a chunk has beyond the tensor's end."""
        for key, array in read_index(reader).arrays.items():
            for file, box in islice(array.touching(array.box), count_files(reader.place, key)):
                stored = intersect(box, array.box)
                if stored is not None:
                    yield StoredBox(key, stored.offset, stored.shape, file)

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each of those files by name, or None; values of tensors are not read."""
        index = read_index(reader)
        return {file.name: find_error(_check_file, file, reader, index) for file in self.list_files(reader)}


def _find_chunks(shard: ShardedTensor, index: Index) -> Iterator[tuple[ChunkedArray, str, Box, Any]]:
    """Yield the chunks that a shard needs: the array, the file, the chunk's box, and the shard's part that it fills."""
    array = index.arrays[shard.key]
    for part in shard_parts(shard):
        stored = intersect(part.box, array.box)  # with allow_shape_mismatch the shard may reach beyond the tensor
        for file, box in array.touching(stored) if stored is not None else ():
            yield array, file, box, part


def _check_chunks(tensors: Sequence[ShardedTensor], index: Index, reader: CheckpointReader) -> None:
    """Raise the error of the first chunk that is missing or has another size, before memory is taken for any."""
    checked = set()
    for shard in tensors:
        for array, file, _, _ in _find_chunks(shard, index):
            if file not in checked:
                array.check_chunk(file, reader)
                checked.add(file)


def _with_zeros(shard: ShardedTensor) -> ShardedTensor:
    shard = with_memory(shard)
    if shard.allow_shape_mismatch and shard.data is not None:
        shard.data.zero_()  # it may be larger than the stored tensor
    return shard


def _plan(shard: ShardedTensor, index: Index) -> Iterator[_Read]:
    for array, file, chunk, part in _find_chunks(shard, index):
        stored = intersect(part.box, array.box)
        common = stored and intersect(stored, chunk)
        if common:
            start = tuple(slice_.start for slice_ in common.within(chunk))
            yield _Read(array, file, start, part_view(shard, part)[common.within(part.box)])


def _fill(reader: CheckpointReader, read: _Read) -> None:
    array, what = read.array, f"tensor {read.array.key!r}"
    if not array.compressor:
        read_box(reader, StoredArray(read.file, 0, array.dtype, array.chunks), read.start, read.target, what)
    else:
        source = f"{what}: {reader.directory / read.file}"
        data = decompress(reader.read(read.file), array.compressor, array.chunk_nbytes, source)
        values = torch.frombuffer(data, dtype=torch.uint8).view(array.dtype).view(array.chunks)
        box = Box(read.start, tuple(read.target.shape))
        read.target.copy_(values[box.within(Box((0,) * len(array.chunks), array.chunks))])
    if read.target.device.type != "cpu":
        synchronize_devices([read.target])  # this thread copies on its own stream, which the caller's does not wait for


def _load_object(file: str, key: str, context: LoadContext) -> Any:
    source = f"object {key!r} ({context.reader.directory / file})"
    return decode_object(context.reader.read(file), source, context.allow_globals)


def _check_file(file: StoredFile, reader: CheckpointReader, index: Index) -> None:
    folder, _, name = file.name.rpartition("/")
    if folder in index.arrays:
        if name != ARRAY_FILE:  # that one has been read
            index.arrays[folder].check_chunk(file.name, reader)
        return
    with suppress(UnsafePickleError):  # its pickle is as it was written, and names what a load must be told to allow
        decode_object(reader.read(file.name), str(reader.directory / file.name), ())
