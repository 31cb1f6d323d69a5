"""Digests: one for each segment of a file, so that any range can be checked without reading the rest.

Segments of 1 byte to 1 MiB (4 MiB in older checkpoints) tile a file: a small record is one segment, a large one is cut
into several. The table of (length, digest) pairs is stored as two little-endian columns in base64: lengths as uint32,
compressed with zlib, and digests in their own width, uncompressed because they are random (older checkpoints compressed
them, too). SHA-256 of the table is the digest of the file. A table file has the two columns as they are.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from shardckpt import settings
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Returns the digest of a piece of memory.
Digest = Callable[["memoryview | bytes"], int]

#: Returns the digest of the bytes of several pieces of memory, one after the other.
JoinedDigest = Callable[["Sequence[memoryview]"], int]

CRC32 = "crc32"
XXH3 = "xxh3_64"


class Algorithm(NamedTuple):
    """A digest algorithm.

    Attributes:
        typecode: How a digest is stored: ``I`` for 32 bits, ``Q`` for 64.
        load: Returns the function, or raises ImportError where its package is not installed.
        extra: The extra of shardckpt that installs the package; ``""`` if none is needed.
        load_joined: As ``load``, the function for bytes in several pieces of memory; None: they are copied to one.
    """

    typecode: str
    load: Callable[[], Digest]
    extra: str = ""
    load_joined: Callable[[], JoinedDigest] | None = None


def _load_xxh3() -> Digest:
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest


def _load_joined_xxh3() -> JoinedDigest:
    from xxhash import xxh3_64, xxh3_64_intdigest

    def digest(pieces: Sequence[memoryview]) -> int:
        if len(pieces) == 1:
            return xxh3_64_intdigest(pieces[0])
        found = xxh3_64()
        for piece in pieces:
            found.update(piece)
        return found.intdigest()

    return digest


def _join_crc32(pieces: Sequence[memoryview]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece, found)
    return found


#: The algorithms by the name that ``shardckpt.json`` stores, the best first: a save takes the first that all ranks can
#: load. A rank that can load one must be able to load all that follow, since its vote is one number: the first's place.
#: One that is added in front becomes that of new saves; one that is added at the end is only read.
ALGORITHMS = {
    XXH3: Algorithm("Q", _load_xxh3, extra="xxhash", load_joined=_load_joined_xxh3),
    CRC32: Algorithm("I", lambda: zlib.crc32, load_joined=lambda: _join_crc32),
}
#: Bytes. Parts of a MiB and more are cut into segments of so many: a slice reads few bytes that it does not want.
SEGMENT_BYTES = 256 << 10
#: Longest segment of any checkpoint, older ones included, in bytes.
MAX_SEGMENT = 4 << 20
#: Bytes. A record up to this size is one segment, whatever its parts: 64 KiB of values with what a format puts around.
SMALL_RECORD = 72 << 10
#: Largest table that is read, in bytes: 20 million segments. It bounds what a damaged or hostile file can allocate.
_MAX_TABLE = 1 << 28
_LENGTH = "I"


def preferred() -> str:
    """Return the name of the best algorithm that this process can load: xxh3_64 with xxhash installed, else crc32."""
    return negotiate_digest(digest_vote())


def digest_vote() -> int:
    """Return this rank's vote on the algorithm of a new checkpoint, for :func:`negotiate_digest`."""
    return next(vote for vote, algorithm in enumerate(ALGORITHMS.values()) if _can_load(algorithm))


def negotiate_digest(*votes: int) -> str:
    """Choose the best algorithm that every voter can compute.

    Args:
        votes: What :func:`digest_vote` returned on each rank; their maximum alone gives the same result.

    Returns:
        The algorithm's name.
    """
    return list(ALGORITHMS)[max(votes)]


def digest_function(algorithm: str) -> Digest:
    """Return the function that computes digests of an algorithm.

    A name that is no algorithm is a CorruptCheckpointError, since a record gave it; a package that is not installed is
    a plain CheckpointingException.
    """
    return digest_functions(algorithm)[0]


def digest_functions(algorithm: str) -> tuple[Digest, JoinedDigest]:
    """Return :func:`digest_function`'s result, and the function for bytes in several pieces of memory."""
    found = _find(algorithm)
    try:
        digest = found.load()
        joined = found.load_joined() if found.load_joined is not None else lambda pieces: digest(b"".join(pieces))
    except ImportError as exc:
        raise CheckpointingException(
            f"digests are {algorithm!r}, which needs {found.extra} on every rank: "
            f"`pip install 'shardckpt[{found.extra}]'`; {settings.VERIFY_READS}=0 loads without checking ({exc})"
        ) from exc
    return digest, joined


class Segments:
    """Lengths in bytes, and digests as unsigned integers, of the segments that tile a file, in file order."""

    def __init__(self, lengths: Iterable[int] = (), digests: Iterable[int] = (), algorithm: str = CRC32) -> None:
        self.lengths = array(_LENGTH, lengths)
        self.digests = array(_find(algorithm).typecode, digests)
        self._ends = array("Q", accumulate(self.lengths))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self.lengths)

    def touching(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return an iterator of (start, stop, digest) of the segments that overlap the range, in file order."""
        # by iterators that run without Python's code: it comes before each read of a MiB, which has emptied the caches
        some = slice(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1)
        ends, lengths, digests = (memoryview(column)[some] for column in (self._ends, self.lengths, self.digests))
        return zip(map(sub, ends, lengths), ends, digests, strict=True)

    def find_only(self, start: int, stop: int) -> tuple[int, int, int] | None:
        """Return (start, stop, digest) of the segment that has all of a range; None if it is empty or in several.

        :meth:`touching` finds the same, and takes three times as long.
        """
        number = bisect_right(self._ends, start)
        if not start < stop <= self.size or stop > self._ends[number]:
            return None
        return self._ends[number] - self.lengths[number], self._ends[number], self.digests[number]

    def cut(self, start: int, stop: int) -> int:
        """Return where the last segment ends that ends behind ``start`` and not behind ``stop``, or the first if none.

        All are offsets in the file, in bytes; ``start`` is before its end.
        """
        return self._ends[max(bisect_right(self._ends, stop) - 1, bisect_right(self._ends, start))]

    def pack(self) -> str:
        """Return the table as text, for :meth:`unpack`; StorageError if it has more segments than that accepts."""
        if len(self) * (self.lengths.itemsize + self.digests.itemsize) > _MAX_TABLE:
            raise StorageError(f"a file of {len(self)} records and pieces is more than is read: write several files")
        return base64.b64encode(zlib.compress(_little(self.lengths), 1) + _little(self.digests)).decode()

    def to_bytes(self) -> bytes:
        """Return the two columns, for :meth:`from_bytes`: the content of a table file."""
        return _little(self.lengths) + _little(self.digests)

    def root(self) -> str:
        """Return the digest of the file: SHA-256 of the table, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def unpack(cls, text: str, root: str, size: int, algorithm: str) -> Segments:
        """Return the table that :meth:`pack` wrote, if it has this digest and its segments tile the file.

        Any other text is a CorruptCheckpointError. The size of the file in bytes bounds the memory that the table may
        take.
        """
        try:
            inflate = zlib.decompressobj()
            raw = inflate.decompress(base64.b64decode(text, validate=True), limit_table(size, algorithm) + 1)
            raw += inflate.unused_data  # the digests, which are not compressed
        except (binascii.Error, zlib.error, ValueError) as exc:
            raise CorruptCheckpointError(f"the table of digests is damaged: {exc}") from exc
        return cls.from_bytes(raw, root, size, algorithm)

    @classmethod
    def from_bytes(cls, raw: bytes, root: str, size: int, algorithm: str) -> Segments:
        """Return the table that :meth:`to_bytes` returned, if it has this digest and tiles a file of ``size`` bytes.

        Anything else is a CorruptCheckpointError.
        """
        typecode = _find(algorithm).typecode
        wide = array(_LENGTH).itemsize + array(typecode).itemsize
        if len(raw) % wide or hashlib.sha256(raw).hexdigest() != root:
            raise CorruptCheckpointError("the table of digests is damaged: it does not have the digest that is stored")
        split = len(raw) // wide * array(_LENGTH).itemsize
        found = cls(_column(_LENGTH, raw[:split]), _column(typecode, raw[split:]), algorithm)
        lengths = set(found.lengths)  # few distinct values: most segments have the full length
        if found.size != size or max(lengths, default=1) > MAX_SEGMENT or min(lengths, default=1) < 1:
            raise CorruptCheckpointError(f"the table of digests is for {found.size} bytes, or not cut as it should be")
        return found


def limit_table(size: int, algorithm: str) -> int:
    """Return the most bytes that the table of a file of ``size`` bytes may have: no segment is empty."""
    return min(_MAX_TABLE, (array(_LENGTH).itemsize + array(_find(algorithm).typecode).itemsize) * size)


def _find(algorithm: str) -> Algorithm:
    if algorithm not in ALGORITHMS:
        raise CorruptCheckpointError(
            f"digests are {algorithm!r}, this release knows {' and '.join(ALGORITHMS)}; a newer shardckpt reads them, "
            f"or {settings.VERIFY_READS}=0 loads without checking"
        )
    return ALGORITHMS[algorithm]


def _can_load(algorithm: Algorithm) -> bool:
    try:
        algorithm.load()
    except ImportError:
        return False
    return True


def _column(code: str, raw: bytes) -> array[int]:
    column = array(code, raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _little(column: array[int]) -> bytes:
    return _column(column.typecode, column.tobytes()).tobytes()
