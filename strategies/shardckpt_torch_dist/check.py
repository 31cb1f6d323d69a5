"""Check a checkpoint that has no digests: that the files of its index exist, and hold the archives that it lists.

The members of these archives are compared with the archives' own CRC-32.
"""

from __future__ import annotations

import math
import pickle
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.archive import ARCHIVE_ALIGN, Archive
from shardckpt.chunks import Item
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.manifest import MARKER_NAME, RECORD_NAME
from shardckpt.planning import make_column
from shardckpt.strategy import StoredFile, find_error
from shardckpt_torch_dist.dialects import (
    COMMON_FILE,
    INDEX_FILE,
    METADATA_FILE,
    has_own_index,
    needs_common_file,
    read_index,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import StoredIndex

#: The last bytes of an archive: the end record of a zip, without a comment.
_END_MAGIC, _END_BYTES = b"PK\x05\x06", 22
_BEGIN_MAGIC = b"PK\x03\x04"


def list_files(reader: CheckpointReader) -> list[StoredFile]:
    """Return the files that a checkpoint of any dialect must have; see :class:`shardckpt.strategy.ChecksFiles`."""
    index = read_index(reader)
    named = [INDEX_FILE] if has_own_index(reader) else []
    if index.common is None and (needs_common_file(reader.manifest, index) or reader.has(COMMON_FILE)):
        named.append(COMMON_FILE)
    named += _find_lost_files(reader, index)
    return [*(StoredFile(name) for name in (METADATA_FILE, *named)), *_list_data_files(index)]


def check_files(reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
    """Return the error of each of these files, or None; see :class:`shardckpt.strategy.ChecksFiles`."""
    index = read_index(reader)
    errors = {file.name: find_error(_check_file, file, reader, index) for file in list_files(reader)}
    return errors | _find_lost_files(reader, index)


def _list_data_files(index: StoredIndex) -> Iterator[StoredFile]:
    """Yield the data files in the order of their names, each with its keys, and where they end."""
    chunks = index.chunks
    places = zip(chunks.file.tolist(), chunks.box.spec.tolist(), (chunks.start + chunks.length).tolist(), strict=True)
    items = [(index.files[file], index.keys[tensor], end) for file, tensor, end in places]
    items += [(item.file, key, item.offset + item.length) for key, item in index.grids.items()]
    ends: dict[str, dict[str, int]] = {}
    for file, key, end in items:
        found = ends.setdefault(file, {})
        found[key] = max(found.get(key, 0), end)
    # other objects are parts of the common state, or for other libraries
    least = {file: max(found.values()) for file, found in ends.items()}
    for item in index.named.values():
        least[item.file] = max(least.get(item.file, 0), item.offset + item.length)
    for name in sorted(least):
        found = ends.get(name, {})
        yield StoredFile(name, least[name], tuple(found), found)


def _check_file(file: StoredFile, reader: CheckpointReader, index: StoredIndex) -> None:
    size = reader.size(file.name)
    path = reader.directory / file.name
    if file.name == METADATA_FILE:
        # A reader of pickles stops at the STOP opcode, and never sees bytes behind it.
        if reader.read_range(METADATA_FILE, max(size - 1, 0), min(size, 1), METADATA_FILE) != pickle.STOP:
            raise CorruptCheckpointError(f"{path} does not end as a pickle does: something was written behind it")
        _check_coverage(index, str(path))
    elif file.name == COMMON_FILE:
        _check_archive(reader, Item(COMMON_FILE, 0, size), str(path))
    elif file.name != INDEX_FILE:
        if size < file.nbytes:
            raise CorruptCheckpointError(f"{path} ends at {size:,} bytes, and {METADATA_FILE} lists {file.nbytes:,}")
        archives = _list_archives(index, file.name)
        reader.map(partial(_check_item, reader), archives, lambda archive: archive.item.length)
        aligned = not any(archive.item.offset % ARCHIVE_ALIGN for archive in archives)
        _check_tail(reader, file, size, aligned=aligned)


class _Stored(NamedTuple):
    """An archive that the index lists; ``dtype`` and ``volume`` are its tensor's, None and 0 for an object."""

    key: str
    item: Item
    dtype: torch.dtype | None = None
    volume: int = 0


def _list_archives(index: StoredIndex, name: str) -> list[_Stored]:
    """Return the archives of a file in order; an archive with several boxes (of a flattened shard) is listed once."""
    found: dict[Item, _Stored] = {}
    chunks = index.chunks
    rows = (chunks.file == index.files.index(name)).nonzero().view(-1) if name in index.files else make_column([])
    columns = (chunks.start, chunks.length, chunks.box.spec, chunks.volume)
    for start, length, tensor, volume in zip(*(column[rows].tolist() for column in columns), strict=True):
        item = Item(name, start, length)
        found[item] = _Stored(index.keys[tensor], item, index.dtypes[tensor], volume)
    found.update({item: _Stored(key, item) for key, item in index.named.items() if item.file == name})
    return sorted(found.values(), key=lambda archive: archive.item)


def _check_item(reader: CheckpointReader, stored: _Stored) -> None:
    """Check that an archive is complete, and has the dtype and the size that the index says."""
    item = stored.item
    source = f"{stored.key}: {reader.directory / item.file} at {item.offset}"
    archive = _check_archive(reader, item, source)
    if stored.dtype is None:
        return
    payload = archive.payload()
    if (payload.dtype, math.prod(payload.shape)) != (stored.dtype, stored.volume):
        raise CorruptCheckpointError(
            f"{source} holds {payload.dtype} {payload.shape}, {METADATA_FILE} says {stored.dtype} and {stored.volume} "
            "elements"
        )


def _check_archive(reader: CheckpointReader, item: Item, source: str) -> Archive:
    """Check that exactly one complete archive is at a place, with the CRC-32 that it has; return the archive."""

    def read(offset: int, nbytes: int) -> bytes:
        return reader.read_range(item.file, item.offset + offset, min(nbytes, item.length - offset), source)

    archive = Archive(read, item.length, source)
    if not read(max(item.length - _END_BYTES, 0), _END_BYTES).startswith(_END_MAGIC):
        raise CorruptCheckpointError(f"{source}: the archive does not end where its {item.length:,} bytes end")
    archive.check_members(reader, item.file, item.offset)
    return archive


def _check_tail(reader: CheckpointReader, file: StoredFile, size: int, *, aligned: bool) -> None:
    """Check the bytes behind a file's last item: they are alignment, or items that were removed from the index."""
    from shardckpt_torch_dist.plan import padded_length  # it imports torch's planners, which listings do without

    nbytes = min(size - file.nbytes, 2 * ARCHIVE_ALIGN)
    if not nbytes:
        return
    what = f"the end of {file.name}"
    first = reader.read_range(file.name, file.nbytes, nbytes, what)
    if aligned and size == padded_length(file.nbytes) and not any(first):
        return
    end = reader.read_range(file.name, size - nbytes, nbytes, what)
    if not (first.lstrip(b"\0").startswith(_BEGIN_MAGIC) and _END_MAGIC in end):
        raise CorruptCheckpointError(
            f"{reader.directory / file.name} has {size:,} bytes, and {METADATA_FILE} lists {file.nbytes:,} of them: "
            "the bytes behind them do not belong to this checkpoint"
        )


def _check_coverage(index: StoredIndex, source: str) -> None:
    """Check that the chunks of each tensor have as many elements as its shape."""
    # In floats: the sum of a hostile index's claims may overflow an int64.
    volumes = torch.zeros(len(index.keys), dtype=torch.float64, device="cpu")
    volumes.index_add_(0, index.chunks.box.spec, index.chunks.box.volume().double())
    for key, shape, volume in zip(index.keys, index.shapes, volumes.tolist(), strict=True):
        if volume < math.prod(shape):
            raise CorruptCheckpointError(
                f"{source}: of tensor {key!r} of shape {tuple(shape)} it lists {volume:,.0f} elements: some are lost"
            )


def _find_lost_files(reader: CheckpointReader, index: StoredIndex) -> dict[str, CheckpointingException]:
    """Return errors for the record and ``metadata.json`` if they are missing and other files show that they existed."""
    if reader.manifest.record is not None:
        return {}
    found: dict[str, CheckpointingException] = {}
    if reader.has(INDEX_FILE):
        found[RECORD_NAME] = CorruptCheckpointError(
            f"{reader.directory / RECORD_NAME}, which has the digests, is missing, and {INDEX_FILE}, which is written "
            f"with it, exists (if another library has saved there since, remove {INDEX_FILE}: it is obsolete)"
        )
    if reader.manifest.recognised_as is not None and (index.by_megatron or reader.has(COMMON_FILE)):
        found[MARKER_NAME] = CorruptCheckpointError(
            f"{reader.directory / MARKER_NAME} is missing, which Megatron writes last, and this is not a plain DCP "
            "directory: the save did not finish, or the file was lost"
        )
    return found
