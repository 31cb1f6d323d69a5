"""The file with the fingerprints of a checkpoint's tensors, read without torch."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.column_file import ColumnFile

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of the two sums of a tensor, and of a fingerprint.
SUM_BYTES = 16
#: The column of the fingerprints; its number is the version of their algorithm. Two versions are never equal.
FINGERPRINTS_COLUMN = "fingerprints_2"


def parse_fingerprints(data: bytes, source: str) -> dict[str, str]:
    """Return the fingerprints by key; none if they are of another algorithm than this release computes."""
    columns = ColumnFile.parse(data, source)
    keys = columns.texts("keys")
    if FINGERPRINTS_COLUMN not in columns.entries and any(name.startswith("fingerprints") for name in columns.entries):
        return {}
    found = columns.bytes_of(FINGERPRINTS_COLUMN)
    if len(found) != len(keys) * SUM_BYTES:
        raise CorruptCheckpointError(f"{source} has {len(found)} bytes of fingerprints for {len(keys)} tensors")
    return dict(zip(keys, found.hex(" ", SUM_BYTES).split(), strict=True))


def combine_fingerprints(fingerprints: Mapping[str, str]) -> str:
    """Return one fingerprint, 32 hex digits, of tensors by their keys and fingerprints; ``""`` of none.

    It is equal for equal keys and values, whatever the sharding and the format, as the tensors' fingerprints are.
    """
    if not fingerprints:
        return ""
    rows = "".join(f"{key}\0{value}\0" for key, value in sorted(fingerprints.items()))
    return hashlib.blake2b(rows.encode("utf-8", "surrogatepass"), digest_size=SUM_BYTES).hexdigest()
