"""Routes of an all-to-all: which rank owns a name, and over which rank a message goes to reach it.

The ranks stand in a grid, row by row. A message goes along its sender's row to the column of its target, and along that
column to the target: a rank has connections to about ``2 * sqrt(ranks)`` others, 254 of 16,384, and sends each of them
one message with all that goes that way. No byte travels more than twice. Few ranks stand in one row, and send directly.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Ranks that send directly, at most.
DIRECT_RANKS = 64
#: Before each part of a message: the rank that it comes from, or goes to, and its number of bytes.
_HEAD = struct.Struct("<IQ")
#: Bytes that a part takes in a message in addition to its own.
HEAD_BYTES = _HEAD.size


class Hop(NamedTuple):
    """The ranks that a rank may send to, and the ranks that may send to it, in one of the two hops.

    They are ascending, without the rank itself.
    """

    receivers: list[int]
    senders: list[int]


class Grid:
    """The grid of the ranks; the last row may be shorter than the others. At most ``direct`` ranks stand in one row."""

    def __init__(self, world_size: int, direct: int) -> None:
        self.world_size = world_size
        #: Whether all ranks stand in one row, and there is no second hop.
        self.is_direct = world_size <= direct
        self.width = world_size if self.is_direct else math.isqrt(world_size - 1) + 1

    def turn(self, rank: int, target: int) -> int:
        """Return the rank to which ``rank`` sends messages for ``target``: it is in the target's column."""
        found = rank - rank % self.width + target % self.width
        # the last row may end before that column: the row above has it
        return found if found < self.world_size else found - self.width

    def first_hop(self, rank: int) -> Hop:
        """Return the partners of a rank in its row, and those in the last row that lack its column."""
        start = rank - rank % self.width
        below = start + self.width
        senders = [*range(start, min(below, self.world_size))]
        if rank + self.width >= self.world_size:  # no rank below it: whatever is left there sends to it
            senders += range(below, self.world_size)
        receivers = {self.turn(rank, column) for column in range(min(self.width, self.world_size))}
        return Hop(sorted(receivers - {rank}), [sender for sender in senders if sender != rank])

    def second_hop(self, rank: int) -> Hop:
        """Return the partners of a rank in its column."""
        column = [other for other in range(rank % self.width, self.world_size, self.width) if other != rank]
        return Hop(column, column)


def find_owner(name: str, world_size: int) -> int:
    """Return the rank that owns a name, the same on all ranks and in all processes.

    Names are spread evenly by their SHA-256: with 1,000 names no rank of 16,384 owns more than a few.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % world_size


def place_owner(number: int, world_size: int) -> int:
    """Return the rank that owns a part of something large, the same on all ranks: parts are spread over the grid.

    Owners in one column would share the ranks over which all messages to that column go; so each has its own column and
    row, as far as there are any.
    """
    return number * (Grid(world_size, DIRECT_RANKS).width + 1) % world_size


def join_parts(parts: Iterable[tuple[int, bytes]]) -> bytes:
    """Return one message of parts, each with the rank that it goes to or comes from."""
    return b"".join(piece for rank, data in parts for piece in (_HEAD.pack(rank, len(data)), data))


def split_parts(message: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield the parts that :func:`join_parts` joined."""
    view, position = memoryview(message), 0
    while position < view.nbytes:
        rank, size = _HEAD.unpack_from(view, position)
        position += HEAD_BYTES
        yield rank, bytes(view[position : position + size])
        position += size


def check_targets(targets: Iterable[int], world_size: int) -> None:
    """Raise a CheckpointingException that names the rank if a part goes to a rank that does not exist."""
    wrong = [target for target in targets if not 0 <= target < world_size]
    if wrong:
        raise CheckpointingException(
            f"a message goes to rank {wrong[0]}, and the group has ranks 0 to {world_size - 1}"
        )
