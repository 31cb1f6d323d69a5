"""The write plan of a rank: its data files, with the objects and the tensors in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.chunks import append_tensor
from shardckpt.errors import ShardingError
from shardckpt.tensors import synchronize_devices
from shardckpt_safetensors.index import COMMON_FILE, INDEX_FILE, encode_index, make_header

if TYPE_CHECKING:
    import torch

    from shardckpt.chunks import MergedPlan
    from shardckpt.storage import CheckpointWriter, FileWriter, PackedShards


class Payload(NamedTuple):
    """An object as bytes, and the codec that made them."""

    codec: str
    data: bytes


class PlannedItem(NamedTuple):
    """An item of a file.

    Attributes:
        position: Of a tensor among the rank's; of an object from the end of its objects, so it is negative.
        nbytes: Bytes of the payload.
        tail: Bytes of padding behind it.
    """

    position: int
    nbytes: int
    tail: int


class FilePlan(NamedTuple):
    """A file to write.

    Attributes:
        name: Its name.
        head: Its first bytes: the header.
        items: What follows, in order.
    """

    name: str
    head: bytes
    items: list[PlannedItem]


class GlobalFiles(NamedTuple):
    """What only the main rank writes: the index and the common state.

    Attributes:
        plan: What all ranks store.
        save_id: A name that no other save has.
        common: The file with the common state.
    """

    plan: MergedPlan
    save_id: str
    common: bytes


@dataclass
class WritePlan:
    """Everything that a rank writes; see :class:`shardckpt.strategy.BackgroundWork`.

    Attributes:
        files: The files, with the positions of their tensors in the lists below.
        tensors: The tensors.
        keys: Their keys.
        objects: The objects, by unique key.
        global_files: The files that only the main rank writes; None on the others.
        stored: The boxes of the tensors, in the same order, and the objects.
    """

    files: list[FilePlan]
    tensors: list[torch.Tensor]
    keys: list[str]
    objects: dict[str, Payload]
    global_files: GlobalFiles | None = None
    stored: PackedShards | None = None

    def write(self, writer: CheckpointWriter) -> None:
        """Write all files concurrently, each item at its planned position."""
        synchronize_devices(self.tensors)
        unfinished: list[FileWriter] = []
        items: list[tuple[PlannedItem, FileWriter]] = []
        for file in self.files:
            into = writer.create(file.name, len(file.head) + sum(item.nbytes + item.tail for item in file.items))
            into.append_small((file.head,), keys=0, what="the header")
            unfinished.append(into)
            items += ((item, into) for item in file.items)
        objects = list(self.objects.items())
        # In the order of the items, which alternates between the files, so that all are written concurrently.
        for item, into in sorted(items, key=lambda pair: pair[0].position):
            if item.position < 0:
                key, payload = objects[item.position]
                into.append_small((payload.data, bytes(item.tail)), what=key)
            else:
                self._append_tensor(item, into)
        if self.global_files is not None:
            plan, save_id, common = self.global_files
            index = encode_index(plan, make_header(save_id))
            # The index comes first: it is finished while the last tensors are still being written.
            unfinished[:0] = [writer.begin(INDEX_FILE, index, keys=0), writer.begin(COMMON_FILE, common)]
        for into in unfinished:
            writer.finish(into)
        if self.stored is not None:
            # A subclass may take items out of the files: only what was written is recorded, so that the commit notices.
            positions = sorted(item.position for item, _ in items)
            written = [objects[position][0] for position in positions if position < 0]
            tensors = [position for position in positions if position >= 0]
            is_all = len(positions) == self.stored.size
            writer.record_shards(self.stored if is_all else self.stored.only(tensors, written))

    def _append_tensor(self, item: PlannedItem, into: FileWriter) -> None:
        tensor, key = self.tensors[item.position], self.keys[item.position]
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if nbytes != item.nbytes:
            raise ShardingError(f"tensor {key!r} has {nbytes} bytes, and {item.nbytes} were planned for it")
        append_tensor(into, tensor, key, tail=bytes(item.tail))
