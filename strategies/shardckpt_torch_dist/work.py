"""What one rank writes: its objects, pickled, and its tensors, dealt out to files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage.memory import plain_cpu, synchronize_devices, tensor_bytes
from shardckpt_torch_dist.envelope import envelope

if TYPE_CHECKING:
    import torch

    from shardckpt.storage.writer import CheckpointWriter, FileWriter


class Place(NamedTuple):
    """Where an item is."""

    file: str
    offset: int
    length: int


@dataclass
class PlannedFile:
    """A file to be written.

    Attributes:
        name: Its name.
        objects: Numbers of the items that are objects, which come first as Megatron has it, and their archives.
        tensors: Numbers of the items that are tensors, and their places among the work's tensors.
    """

    name: str
    objects: list[tuple[int, bytes]] = field(default_factory=list)
    tensors: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class SaveWork:
    """A rank's files; see :class:`shardckpt.strategy.BackgroundWork`."""

    files: list[PlannedFile]
    tensors: list[torch.Tensor]
    keys: list[str]

    def write(self, writer: CheckpointWriter) -> list[Place]:
        """Write all files, side by side, and say where every item is, in the order of their numbers."""
        synchronize_devices(self.tensors)
        places: dict[int, Place] = {}
        open_files = [(file, writer.create(file.name)) for file in self.files]
        for file, into in open_files:
            for number, data in file.objects:
                places[number] = Place(file.name, _append_object(into, data), len(data))
            for number, tensor in file.tensors:
                start = self._append_tensor(into, tensor)
                places[number] = Place(file.name, start, into.position - start)
        for _, into in open_files:
            writer.finish(into)
        return [places[number] for number in sorted(places)]

    def _append_tensor(self, file: FileWriter, number: int) -> int:
        tensor, key = self.tensors[number], self.keys[number]
        head, tail = envelope(tensor.dtype, tuple(tensor.shape), file.position)
        nbytes = len(head) + tensor.numel() * tensor.element_size() + len(tail)

        def produce() -> list[memoryview]:
            try:
                values = plain_cpu(tensor)
            except CheckpointingException as exc:
                raise ShardingError(f"tensor {key!r}: {exc}") from exc
            return [memoryview(head), tensor_bytes(values), memoryview(tail)]

        return file.append(nbytes, produce)


def _append_object(file: FileWriter, data: bytes) -> int:
    return file.append(len(data), lambda: [memoryview(data)])


__all__ = ["Place", "PlannedFile", "SaveWork"]
