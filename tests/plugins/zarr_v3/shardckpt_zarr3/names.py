"""Where the array of a key lies in the group."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# A part of a key that may name a node. Zarr reserves names that begin with __, this module those that begin with key-;
# the root has .json files of shardckpt.
_PART = re.compile(r"(?!__|key-)[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(?<!\.json)")
_PARTS = 4


def name_arrays(keys: Collection[str]) -> dict[str, str]:
    """Return the path of each key's array, the same on every rank that has the same keys.

    The path is the key; its slashes are groups. A key that cannot be a path gets one made of its SHA-256: a key with
    other characters or long names, one that lies below another key, since arrays have no members, and keys that differ
    in case only, since some file systems do not tell them apart.
    """
    counts = Counter(key.lower() for key in keys)
    return {key: key if _is_path(key, counts) else f"key-{hashlib.sha256(key.encode()).hexdigest()}" for key in keys}


def _is_path(key: str, counts: Counter[str]) -> bool:
    parts = key.split("/")
    *groups, own = accumulate(key.lower().split("/"), "{}/{}".format)
    alone = counts[own] == 1 and not any(group in counts for group in groups)
    return alone and len(parts) <= _PARTS and all(map(_PART.fullmatch, parts))
