"""The files of a stored part as chunks, and the buffers from which chunks are sent and in which they are received."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.digest import Segments
from shardckpt.storage.spans import ElementRange, Span, cut_spans
from shardckpt.tensors.memory import PAGE
from shardckpt.tensors.raw_memory import view_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.manifest.models import Record

#: Bytes of a chunk at most. Of each part that it sends or receives, a rank has two chunks in memory.
CHUNK_BYTES = 16 << 20


class Chunk(NamedTuple):
    """A range of bytes of a file that is sent in one message."""

    #: Name of the file.
    name: str
    #: The bytes, which are complete segments of the file's digests: the receiver can check each chunk.
    span: Span

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.span.stop - self.span.start


def list_chunks(record: Record) -> list[Chunk]:
    """Return all bytes of a checkpoint's files except its JSON files, in the order of the record.

    It is a CorruptCheckpointError if a table of digests is damaged, or not in the record, where those of one rank are.
    """
    found = []
    for file in record.files:
        if not isinstance(file.segments, str):
            raise CorruptCheckpointError(
                f"the digests of {file.name} are in a file of their own: that is a checkpoint of several ranks, and no "
                "local one"
            )
        segments = Segments.unpack(file.segments, file.digest, file.size, record.digest_algorithm)
        spans = cut_spans(segments, [(0, file.size)], CHUNK_BYTES, ElementRange(0, file.size))
        found += [Chunk(file.name, span) for span in spans]
    return found


class Buffers:
    """Memory for two chunks: one is sent or received while the other is read or written; chunk n uses memory n % 2."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        nbytes = max((chunk.nbytes for chunk in chunks), default=0) + PAGE
        self._memory = []
        for _ in range(min(len(chunks), 2)):
            # torch owns the memory: see shardckpt.tensors.raw_memory.pack_bytes
            memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
            start = -memory.data_ptr() % PAGE
            self._memory.append(memory[start : start + nbytes])

    def view(self, number: int) -> memoryview:
        """Return the memory of a chunk."""
        return view_tensor(self.tensor(number))

    def tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a chunk as uint8 of shape (nbytes,)."""
        chunk = self._chunks[number]
        start = chunk.span.start % PAGE  # aligned as in its file: full pages can be written past the page cache
        return self._memory[number % 2][start : start + chunk.nbytes]
