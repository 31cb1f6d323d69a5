"""What one rank writes: its objects, pickled, and its tensors, balanced over files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage import SEGMENT_BYTES, SMALL_RECORD
from shardckpt.tensors import Copier, is_ordinary, is_plain, plain_cpu, synchronize_devices, tensor_bytes
from shardckpt_torch_dist.archive import ARCHIVE_ALIGN, of_length
from shardckpt_torch_dist.dialects import COMMON_FILE, INDEX_FILE, METADATA_FILE, dump, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shardckpt.storage import CheckpointWriter, FileWriter, PackedShards
    from shardckpt_torch_dist.dialects import StoredIndex


#: Bytes that are copied at a time of a tensor whose memory's bytes are not its values, one after the other, on the CPU;
#: few enough that the writer joins them with others before the next are copied.
PIECE_BYTES = SEGMENT_BYTES // 2


@dataclass
class PlannedFile:
    """A file to be written.

    Attributes:
        name: Its name.
        objects: Unique keys of objects, which come first as Megatron has it.
        tensors: Numbers of tensors among the work's.
        nbytes: Its size.
    """

    name: str
    objects: list[str] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True)
class Names:
    """What names the tensors and objects of all ranks, and the common state: the main rank's to write."""

    index: StoredIndex
    save_id: str
    common: bytes

    def begin(self, writer: CheckpointWriter) -> list[FileWriter]:
        """Begin the files of the index, in torch's form and in ours, and of the common state."""
        return [
            writer.begin(METADATA_FILE, encode(self.index, self.save_id), keys=0),
            writer.begin(INDEX_FILE, dump(self.index), keys=0),
            writer.begin(COMMON_FILE, self.common),
        ]


@dataclass
class SaveWork:
    """A rank's files; see :class:`shardckpt.strategy.BackgroundWork`."""

    files: list[PlannedFile]
    tensors: list[torch.Tensor]
    keys: list[str]
    #: Bytes of every tensor's archive.
    lengths: list[int]
    #: Of the objects, by unique key.
    archives: Mapping[str, bytes]
    names: Names | None = None
    #: The tensors' boxes, in the order of the tensors, and the objects.
    stored: PackedShards | None = None

    def write(self, writer: CheckpointWriter) -> None:
        """Write all files, side by side; everything lies where it was planned to."""
        synchronize_devices(self.tensors)
        open_files = [(file, writer.create(file.name, file.nbytes)) for file in self.files]
        for file, into in open_files:
            for name in file.objects:
                data = self.archives[name]
                into.append_small((data, bytes(-len(data) % ARCHIVE_ALIGN)), what=name)
        in_files = {number: into for file, into in open_files for number in file.tensors}
        for number in sorted(in_files):  # now to one file, now to another: all have something to write
            append_tensor(in_files[number], self.tensors[number], self.keys[number], self.lengths[number])
        named = [] if self.names is None else self.names.begin(writer)
        for into in (*named, *(into for _, into in open_files)):  # the first while the last tensors are being written
            writer.finish(into)
        if self.stored is not None:
            objects = [key for file in self.files for key in file.objects]
            is_all = len(in_files) + len(objects) == self.stored.size
            writer.record_shards(self.stored if is_all else self.stored.only(sorted(in_files), objects))


def append_tensor(file: FileWriter, tensor: torch.Tensor, key: str, nbytes: int) -> None:
    """Append the archive of a tensor, and what aligns the next one.

    Args:
        file: Where it goes.
        tensor: Any that :func:`shardckpt.tensors.memory.plain_cpu` takes.
        key: Its name, for errors.
        nbytes: Of the archive, as :func:`shardckpt_torch_dist.archive.writer.fitted` makes it for that place.
    """
    envelope = of_length(tensor.dtype, tuple(tensor.shape), nbytes)
    if envelope is None:
        raise ShardingError(f"tensor {key!r} is no longer the {nbytes} bytes that were planned for it")
    head, tail = envelope
    filler = bytes(-nbytes % ARCHIVE_ALIGN)
    if nbytes <= SMALL_RECORD and is_ordinary(tensor):
        file.append_small((head, tensor_bytes(tensor), tail, filler), what=key)
        return

    if nbytes <= PIECE_BYTES or is_ordinary(tensor) or not is_plain(tensor):
        parts = partial(_around_values, memoryview(head), tensor, memoryview(tail + filler), key)
        file.append(nbytes + len(filler), parts, what=key)
        return
    file.append_small((head,), what=key)
    copies = Copier(tensor, PIECE_BYTES)
    for piece in copies.pieces():
        file.append(piece.nbytes, partial(copies.copied, piece), keys=0, what=key)
    file.append_small((tail, filler), keys=0, what=key)


def _around_values(before: memoryview, tensor: torch.Tensor, after: memoryview, key: str) -> list[memoryview]:
    """The bytes of a tensor's values with something around them."""
    try:
        return [before, tensor_bytes(plain_cpu(tensor)), after]
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc


__all__ = ["PlannedFile", "SaveWork", "append_tensor"]
