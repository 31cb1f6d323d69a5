"""A rank's part of the files with contiguous tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.storage import cut_segments
from shardckpt.tensors import is_ordinary, is_plain, plain_cpu, tensor_bytes
from shardckpt_safetensors.contiguous.exchange import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardckpt.storage import CheckpointWriter, PackedShards, SharedFile
    from shardckpt_safetensors.contiguous.exchange import Write

#: Bytes of a device's tensor that are copied to the host at a time.
_COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class ContiguousWork:
    """A rank's part of the files with contiguous tensors.

    Attributes:
        files: Names and sizes of all files.
        heads: The headers that this rank writes, by the number of the file.
        writes: The ranges that it writes.
        keys: The key of each tensor of :meth:`begin`, for errors.
        stored: The boxes that it has, for the commit.
        views: The same elements, in the boxes of its first tensors.
        others: Small files by name: of the main rank alone.
        aliases: Keys that are not stored, and the key by which each is.
    """

    files: list[tuple[str, int]]
    heads: dict[int, bytes]
    writes: list[Write]
    keys: list[str]
    stored: PackedShards
    views: PackedShards
    others: dict[str, bytes]
    aliases: dict[str, str] = field(default_factory=dict)

    def begin(self, writer: CheckpointWriter, tensors: Sequence[torch.Tensor]) -> list[SharedFile]:
        """Begin all writes, and return the files to finish; ``tensors`` are the views, and then the buffers."""
        numbers = sorted({*self.heads, *(write.file for write in self.writes)})
        files = {number: writer.share(*self.files[number]) for number in numbers}
        for number, head in self.heads.items():
            files[number].write(0, partial(_view, head), cut_segments(len(head)), what="the header")
        # from file to file in turns: where writes go through the page cache, a thread has a file of its own
        for write in sorted(self.writes, key=lambda write: write.offset):
            _write(files[write.file], write, tensors[write.source], self.keys[write.source])
        return [*files.values()]

    def finish(self, writer: CheckpointWriter, files: Sequence[SharedFile]) -> None:
        """Make the files durable, and write the small ones."""
        others = [writer.begin(name, data, keys=0) for name, data in self.others.items()]
        for file in files:
            writer.finish_part(file)
        for other in others:
            writer.finish(other)
        writer.record_shards(self.stored)
        for alias, key in self.aliases.items():
            writer.record_shards(self.stored.rename({key: alias}))


def _write(file: SharedFile, write: Write, tensor: torch.Tensor, key: str) -> None:
    """Begin a write; the thread that writes makes the bytes."""
    values = tensor.detach()
    if not is_ordinary(values) and is_plain(values) and values.is_contiguous():
        _write_copies(file, write, as_bytes(values), key)
        return

    def view() -> memoryview:
        return tensor_bytes(plain_cpu(tensor))[write.start : write.stop]

    file.write(write.offset, view, write.segments, write.keys, key)


def _write_copies(file: SharedFile, write: Write, values: torch.Tensor, key: str) -> None:
    """Begin the writes of bytes on a device, which are copied to the host in parts: all of them may be large."""
    offset, start, keys = write.offset, write.start, write.keys
    for segments in _group(write.segments, _COPIED_BYTES):
        nbytes = sum(segments)
        file.write(offset, partial(_copy, values[start : start + nbytes]), segments, keys, key)
        offset, start, keys = offset + nbytes, start + nbytes, 0  # all keys count with the first


def _group(segments: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield segments that follow each other, as many as have at most so many bytes, and at least one."""
    group: list[int] = []
    nbytes = 0
    for segment in segments:
        if group and nbytes + segment > limit:
            yield group
            group, nbytes = [], 0
        group.append(segment)
        nbytes += segment
    if group:
        yield group


def _view(head: bytes) -> memoryview:
    return memoryview(head)


def _copy(part: torch.Tensor) -> memoryview:
    return tensor_bytes(part.cpu())
