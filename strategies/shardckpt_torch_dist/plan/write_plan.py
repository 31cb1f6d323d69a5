"""The write plan of a rank: its files, with the pickled objects and the tensors in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.archive import ARCHIVE_ALIGN, make_frame_of_length
from shardckpt.chunks import ChunkWork, append_run, append_tensor, cut_runs
from shardckpt.errors import ShardingError
from shardckpt_torch_dist.dialects import (
    COMMON_FILE,
    INDEX_FILE,
    METADATA_FILE,
    StoredIndex,
    encode_index,
    encode_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardckpt.storage import CheckpointWriter, FileWriter


@dataclass
class FilePlan:
    """A file to write.

    Attributes:
        objects: Unique keys of its objects, which come before the tensors, as in Megatron's files.
        tensors: Its tensors, by their positions in the plan.
        nbytes: Its size, in bytes.
    """

    name: str
    objects: list[str] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass(kw_only=True)
class WritePlan(ChunkWork[StoredIndex, bytes]):
    """Everything that a rank writes; its objects are archives.

    ``files`` have the positions of their tensors, ``lengths`` the sizes of the tensors' archives, in bytes.
    """

    files: list[FilePlan]
    lengths: list[int]

    def write_files(self, writer: CheckpointWriter) -> None:
        """Write all files, each item at its planned position."""
        unfinished = self.write_data(writer, self.files, self._write_data_files)
        if self.global_files is not None:
            index, save_id = self.global_files.index, self.global_files.save_id
            # The index files come first: they are finished while the last tensors are still being written.
            unfinished[:0] = [
                writer.begin(METADATA_FILE, encode_metadata(index, save_id), keys=0),
                writer.begin(INDEX_FILE, encode_index(index), keys=0),
                writer.begin(COMMON_FILE, self.global_files.common),
            ]
        for into in unfinished:
            writer.finish(into)
        self.record_written(
            writer,
            sorted(number for file in self.files for number in file.tensors),
            [key for file in self.files for key in file.objects],
        )

    def _write_data_files(self, writer: CheckpointWriter, files: Sequence[FilePlan]) -> list[FileWriter]:
        """Write data files concurrently; return them, for the caller to finish."""
        open_files = [(file, writer.create(file.name, file.nbytes)) for file in files]
        for file, into in open_files:
            for name in file.objects:
                data = self.objects[name]
                into.append_small((data, bytes(-len(data) % ARCHIVE_ALIGN)), what=name)
        runs = [
            (file.tensors[run.start : run.stop], into)
            for file, into in open_files
            for run in cut_runs([self.lengths[number] for number in file.tensors])
        ]
        # In the order of the tensors, which alternates between the files, so that all are written concurrently.
        for numbers, into in sorted(runs, key=lambda run: run[0][0]):
            tensors, keys = [self.tensors[n] for n in numbers], [self.keys[n] for n in numbers]
            frames = list(map(_frame, tensors, keys, [self.lengths[n] for n in numbers]))
            append_run(into, tensors, keys, frames)
        return [into for _, into in open_files]


def append_archive(file: FileWriter, tensor: torch.Tensor, key: str, nbytes: int) -> None:
    """Append the archive of a tensor to a file, and the padding that aligns the next one.

    The tensor is any that :func:`shardckpt.tensors.plain_cpu` accepts. ``nbytes`` is the planned size of the archive,
    from :func:`shardckpt.archive.make_frame`. A tensor that no longer has the planned dtype and shape is a
    ShardingError.
    """
    append_tensor(file, tensor, key, *_frame(tensor, key, nbytes))


def _frame(tensor: torch.Tensor, key: str, nbytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values of a tensor: its archive, and the padding behind that."""
    frame = make_frame_of_length(tensor.dtype, tuple(tensor.shape), nbytes)
    if frame is None:
        raise ShardingError(f"tensor {key!r} is no longer the {nbytes} bytes that were planned for it")
    return frame.head, frame.tail + bytes(-nbytes % ARCHIVE_ALIGN)
