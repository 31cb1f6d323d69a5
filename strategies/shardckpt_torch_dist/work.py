"""What one rank writes: its objects, pickled, and its tensors, dealt out to files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage.digest import SMALL_RECORD
from shardckpt.storage.memory import is_ordinary, plain_cpu, synchronize_devices, tensor_bytes
from shardckpt_torch_dist.envelope import ARCHIVE_ALIGN, of_length

if TYPE_CHECKING:
    import torch

    from shardckpt.storage.writer import CheckpointWriter, FileWriter


@dataclass
class PlannedFile:
    """A file to be written.

    Attributes:
        name: Its name.
        objects: Keys and archives of objects, which come first as Megatron has it.
        tensors: Numbers of tensors among the work's.
    """

    name: str
    objects: list[tuple[str, bytes]] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)


@dataclass
class SaveWork:
    """A rank's files; see :class:`shardckpt.strategy.BackgroundWork`."""

    files: list[PlannedFile]
    tensors: list[torch.Tensor]
    keys: list[str]
    #: Bytes of every tensor's archive.
    lengths: list[int]

    def write(self, writer: CheckpointWriter) -> None:
        """Write all files, side by side; everything lies where it was planned to."""
        synchronize_devices(self.tensors)
        open_files = [(file, writer.create(file.name)) for file in self.files]
        for file, into in open_files:
            for _, data in file.objects:
                into.append_small((data, bytes(-len(data) % ARCHIVE_ALIGN)))
            for number in file.tensors:
                self._append_tensor(into, number)
        for _, into in open_files:
            writer.finish(into)

    def _append_tensor(self, file: FileWriter, number: int) -> None:
        tensor, key = self.tensors[number], self.keys[number]
        nbytes = self.lengths[number]
        envelope = of_length(tensor.dtype, tuple(tensor.shape), nbytes)
        if envelope is None:
            raise ShardingError(f"tensor {key!r} is no longer the {nbytes} bytes that were planned for it")
        head, tail = envelope
        filler = bytes(-nbytes % ARCHIVE_ALIGN)
        if nbytes <= SMALL_RECORD and is_ordinary(tensor):
            file.append_small((head, tensor_bytes(tensor), tail, filler))
            return

        def produce() -> list[memoryview]:
            try:
                values = plain_cpu(tensor)
            except CheckpointingException as exc:
                raise ShardingError(f"tensor {key!r}: {exc}") from exc
            return [memoryview(head), tensor_bytes(values), memoryview(tail + filler)]

        file.append(nbytes + len(filler), produce, what=key)


__all__ = ["PlannedFile", "SaveWork"]
