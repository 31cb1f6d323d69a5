"""Check the files of a checkpoint: that they exist, have the declared content, and have the CRCs that archives list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.archive import Archive
from shardckpt.planning import Box
from shardckpt.strategy import StoredFile, find_error
from shardckpt_torch_checkpointing.files import join_path, read_content
from shardckpt_torch_checkpointing.index import Index, Listing
from shardckpt_torch_checkpointing.metadata import METADATA_FILE

if TYPE_CHECKING:
    from shardckpt.errors import CheckpointingException
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_checkpointing.metadata import Layout


def list_files(reader: CheckpointReader) -> list[StoredFile]:
    """Return the files that a checkpoint must have; see :class:`shardckpt.strategy.ChecksFiles`."""
    listing = Listing(reader)
    keys: dict[str, set[str]] = {METADATA_FILE: set()} if listing.metadata else {}
    for item, layouts in listing.files.items():
        keys.update((layout.file, set()) for layout in layouts.values())
        declared = listing.declared.get(item)
        for path, tensor in declared.tensors.items() if declared is not None else ():
            for chunk in tensor.chunks:
                keys[layouts[chunk.rank].file].add(join_path((item, *path)))
        for layout in layouts.values() if declared is None else ():
            keys[layout.file].add(item)
    return [StoredFile(name, keys=tuple(sorted(found))) for name, found in keys.items()]


def check_files(reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
    """Return the fault of each of these files, or None; see :class:`shardckpt.strategy.ChecksFiles`.

    The storages of archives are read, and compared with the CRC-32 that the archive has of them.
    """
    listing = Listing(reader)
    found: dict[str, CheckpointingException | None] = {METADATA_FILE: None} if listing.metadata else {}
    for item, layouts in listing.files.items():
        for layout in layouts.values():
            found[layout.file] = find_error(_check_file, reader, item, layout)
    if not any(found.values()):
        index = Index(reader, ())
        for key, tensor in index.tensors.items():
            files = listing.files[str(tensor.path[0])]
            first = METADATA_FILE if listing.metadata else files[min(files)].file
            full = Box.from_shape(tensor.shape)
            found[first] = found[first] or find_error(index.check_stored, key, full)
            for chunk in tensor.chunks:
                name = files[chunk.rank].file
                found[name] = found[name] or find_error(index.locate, tensor, chunk, chunk.box)
    return found


def _check_file(reader: CheckpointReader, item: str, layout: Layout) -> None:
    """Check that a file can be read, and that an archive has the CRC-32 of its members."""
    reader.parsed(layout.file, lambda: read_content(reader, item, layout, ()))
    if layout.form == "torch":
        Archive.of_file(reader, layout.file).check_members(reader, layout.file)
