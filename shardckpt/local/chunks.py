"""The files of a stored part as chunks, and the buffers from which chunks are sent and in which they are received."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.storage import Elements, Segments, Span, cut
from shardckpt.tensors import PAGE, view_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.manifest import FileRecord, Record

#: Bytes of a chunk at most. Of each part that it sends or receives, a rank has two chunks in memory.
CHUNK_BYTES = 16 << 20


class Chunk(NamedTuple):
    """A range of bytes of a file that is sent in one message.

    Attributes:
        name: Name of the file.
        span: The bytes, which are complete segments of the file's digests: the receiver can check each chunk.
    """

    name: str
    span: Span

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.span.stop - self.span.start

    @property
    def lead(self) -> int:
        """Offset, in bytes, of its start in its first page."""
        return self.span.start % PAGE


def list_chunks(record: Record) -> list[Chunk]:
    """Return all bytes of a checkpoint's files except its JSON files, in the order of the record."""
    return [Chunk(file.name, span) for file in record.files for span in _spans(file, record.digest_algorithm)]


class Buffers:
    """Memory for two chunks: one is sent or received while the other is read or written.

    Each begins on a page, and a chunk lies in it as in the pages of its file, so that full pages can be written past
    the page cache.

    Args:
        chunks: All chunks that are sent or received; chunk ``n`` uses memory ``n % 2``.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        nbytes = max((chunk.nbytes for chunk in chunks), default=0) + PAGE
        self._memory = [_page_aligned(nbytes) for _ in range(min(len(chunks), 2))]

    def view(self, number: int) -> memoryview:
        """Return the memory of a chunk."""
        return view_tensor(self.tensor(number))

    def tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a chunk as uint8 of shape (nbytes,)."""
        chunk = self._chunks[number]
        return self._memory[number % 2][chunk.lead : chunk.lead + chunk.nbytes]


def _page_aligned(nbytes: int) -> torch.Tensor:
    """Return memory that begins at a page, and that torch owns: see :func:`shardckpt.tensors.raw_memory.packed`."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % PAGE
    return memory[start : start + nbytes]


def _spans(file: FileRecord, algorithm: str) -> list[Span]:
    segments = Segments.unpack(file.segments, file.digest, file.size, algorithm)
    return list(cut(segments, [(0, file.size)], CHUNK_BYTES, Elements(0, file.size)))


__all__ = ["CHUNK_BYTES", "Buffers", "Chunk", "list_chunks"]
