"""Divide the files of a stored part into messages, and allocate memory for the messages sent and received."""

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

#: The largest message. Of each part that it sends or receives, a rank has two messages in memory.
MESSAGE_BYTES = 16 << 20


class Message(NamedTuple):
    """A range of a file that is sent at once.

    Attributes:
        name: Name of the file.
        span: The range, of complete segments: the receiver can check each message.
    """

    name: str
    span: Span

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.span.stop - self.span.start


def list_messages(record: Record) -> list[Message]:
    """Return the messages with all bytes of the files in a record, in its order; it does not have the JSON files.

    It is a CorruptCheckpointError if a table of digests is damaged, or is in a file of its own, as of several ranks.
    """
    found = []
    for file in record.files:
        if not isinstance(file.segments, str):
            raise CorruptCheckpointError(
                f"the digests of {file.name} are in a file of their own: that is a checkpoint of several ranks, and no "
                "local one"
            )
        segments = Segments.unpack(file.segments, file.digest, file.size, record.digest_algorithm)
        spans = cut_spans(segments, [(0, file.size)], MESSAGE_BYTES, ElementRange(0, file.size))
        found += [Message(file.name, span) for span in spans]
    return found


class Buffers:
    """Memory for two messages: one is sent or received while the other is read or written; n uses memory n % 2."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        nbytes = max((message.nbytes for message in messages), default=0) + PAGE
        self._memory = []
        for _ in range(min(len(messages), 2)):
            # torch owns the memory: see shardckpt.tensors.raw_memory.pack_bytes
            memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
            start = -memory.data_ptr() % PAGE
            self._memory.append(memory[start : start + nbytes])

    def view(self, number: int) -> memoryview:
        """Return the memory of a message."""
        return view_tensor(self.tensor(number))

    def tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a message as uint8 of shape (nbytes,)."""
        message = self._messages[number]
        start = message.span.start % PAGE  # aligned as in its file: full pages can be written past the page cache
        return self._memory[number % 2][start : start + message.nbytes]
