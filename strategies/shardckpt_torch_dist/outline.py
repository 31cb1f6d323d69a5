"""The outline of a checkpoint that this library saved: the names in its index and its common state, without torch.

Any deviation from files of this library is left to the strategy, which checks everything and names the fault.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardckpt.archive import list_dict_names
from shardckpt.errors import CheckpointingException
from shardckpt.plugins import Outline, cut_shapes, is_object_key
from shardckpt.storage import ColumnFile, ParseCache, read_recorded_file
from shardckpt.tensors import KNOWN_DTYPES
from shardckpt_torch_dist.file_names import COMMON_FILE, INDEX_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import PlainRecord

#: Bytes of an element of each dtype, by torch's names.
_ITEMSIZES = {known.torch_name: known.itemsize for known in KNOWN_DTYPES}
_LARGEST = 2**63
#: Two indexes that are compared are of one job as a rule, and so equal.
_outlines = ParseCache[Outline](most_bytes=64 << 20, kept=1)  # 64 MiB: of a million tensors


def read_outline(directory: Path, record: PlainRecord) -> Outline | None:
    """Return the outline of a checkpoint, or None to leave it to the strategy.

    The directory is on this machine, and held open; the record is the content of its ``shardckpt.json``. It is None if
    there is no index of ours, or anything unexpected, or a file is damaged.
    """
    names = {file.name for file in record.files}
    if sys.byteorder != "little" or not names >= {INDEX_FILE, COMMON_FILE}:
        return None
    try:
        index, data = (read_recorded_file(directory, record, name) for name in (INDEX_FILE, COMMON_FILE))
        common = list_dict_names(data, COMMON_FILE)
        outline = _outlines.get(index, (), lambda: _outline(ColumnFile.parse(index, INDEX_FILE)))
        return None if common is None else outline._replace(common=common, plain_common=data)
    except (CheckpointingException, LookupError, TypeError, ValueError, OverflowError):
        return None


def _outline(index: ColumnFile) -> Outline:
    keys, dtypes, axes = index.texts("keys"), index.texts("dtypes"), index.integers("axes")
    objects, files, places = index.texts("objects"), index.texts("files"), index.integers("object_places")
    plain = index.texts("plain_objects") if "plain_objects" in index.entries else []
    places += index.integers("plain_object_places") if plain else []
    shapes = cut_shapes(index.integers("shapes"), axes, _LARGEST)
    _require(len(keys) == len(dtypes) == len(shapes))
    _require(len({*keys, *objects, *plain}) == len(keys) + len(objects) + len(plain))
    _require(all(map(is_object_key, objects)))
    _require(len(places) == 3 * (len(objects) + len(plain)))
    return Outline(
        keys,
        dtypes,
        shapes,
        {name: _ITEMSIZES[name] for name in set(dtypes)},
        objects,
        [],
        object_places=[
            ("", files[file], start, nbytes)
            for file, start, nbytes in zip(places[::3], places[1::3], places[2::3], strict=True)
        ],
        plain_objects=plain,
    )


def _require(fine: bool) -> None:
    if not fine:
        raise ValueError("not as this library writes it")


__all__ = ["read_outline"]
