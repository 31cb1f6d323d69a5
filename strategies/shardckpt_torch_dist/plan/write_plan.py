"""The write plan of a rank: its files, with the pickled objects and the tensors in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.archive import ARCHIVE_ALIGN, make_frame_of_length
from shardckpt.chunks import append_tensor
from shardckpt.errors import ShardingError
from shardckpt.tensors import synchronize_devices
from shardckpt_torch_dist.dialects import COMMON_FILE, INDEX_FILE, METADATA_FILE, encode_index, encode_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shardckpt.storage import CheckpointWriter, FileWriter, PackedShards
    from shardckpt_torch_dist.dialects import StoredIndex


@dataclass
class FilePlan:
    """A file to write.

    Attributes:
        name: Its name.
        objects: Unique keys of its objects, which come before the tensors, as in Megatron's files.
        tensors: Its tensors, by their positions in the plan.
        nbytes: Its size, in bytes.
    """

    name: str
    objects: list[str] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    nbytes: int = 0


class GlobalFiles(NamedTuple):
    """What only the main rank writes: the index, in ``.metadata`` and our own file, and ``common.pt``.

    Attributes:
        stored_index: What all ranks store.
        save_id: A name that no other save has.
        common: The archive of the common state.
    """

    stored_index: StoredIndex
    save_id: str
    common: bytes


@dataclass
class WritePlan:
    """Everything that a rank writes; see :class:`shardckpt.strategy.BackgroundWork`.

    Attributes:
        files: The files, with the positions of their tensors in the lists below.
        tensors: The tensors.
        keys: Their keys.
        lengths: Sizes of their archives, in bytes.
        archives: The archives of the objects, by unique key.
        global_files: The files that only the main rank writes; None on the others.
        stored: The boxes of the tensors, in the same order, and the objects.
    """

    files: list[FilePlan]
    tensors: list[torch.Tensor]
    keys: list[str]
    lengths: list[int]
    archives: Mapping[str, bytes]
    global_files: GlobalFiles | None = None
    stored: PackedShards | None = None

    def write(self, writer: CheckpointWriter) -> None:
        """Write all files concurrently, each item at its planned position."""
        synchronize_devices(self.tensors)
        open_files = [(file, writer.create(file.name, file.nbytes)) for file in self.files]
        for file, into in open_files:
            for name in file.objects:
                data = self.archives[name]
                into.append_small((data, bytes(-len(data) % ARCHIVE_ALIGN)), what=name)
        in_files = {number: into for file, into in open_files for number in file.tensors}
        for number in sorted(in_files):  # alternates between the files, so that all are written concurrently
            append_archive(in_files[number], self.tensors[number], self.keys[number], self.lengths[number])
        unfinished = [into for _, into in open_files]
        if self.global_files is not None:
            index, save_id, common = self.global_files
            # The index files come first: they are finished while the last tensors are still being written.
            unfinished[:0] = [
                writer.begin(METADATA_FILE, encode_metadata(index, save_id), keys=0),
                writer.begin(INDEX_FILE, encode_index(index), keys=0),
                writer.begin(COMMON_FILE, common),
            ]
        for into in unfinished:
            writer.finish(into)
        if self.stored is not None:
            objects = [key for file in self.files for key in file.objects]
            # A subclass may take items out of the files: only what was written is recorded, so that the commit notices.
            is_all = len(in_files) + len(objects) == self.stored.size
            writer.record_shards(self.stored if is_all else self.stored.only(sorted(in_files), objects))


def append_archive(file: FileWriter, tensor: torch.Tensor, key: str, nbytes: int) -> None:
    """Append the archive of a tensor to a file, and the padding that aligns the next one.

    Args:
        file: The file.
        tensor: Any tensor that :func:`shardckpt.tensors.plain_cpu` accepts.
        key: Its key, for errors.
        nbytes: Planned size of the archive in bytes, from :func:`shardckpt.archive.make_frame`.

    Raises:
        ShardingError: The tensor no longer has the planned dtype and shape, or its values cannot be read.
    """
    frame = make_frame_of_length(tensor.dtype, tuple(tensor.shape), nbytes)
    if frame is None:
        raise ShardingError(f"tensor {key!r} is no longer the {nbytes} bytes that were planned for it")
    append_tensor(file, tensor, key, frame.head, frame.tail + bytes(-nbytes % ARCHIVE_ALIGN))
