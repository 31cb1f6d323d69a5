"""The outline of a checkpoint: the stored items, by the bytes of the index alone, without torch.

Importing torch takes longer than to list 100,000 tensors. Any deviation from files of this library is left to the index
(:mod:`shardckpt_safetensors.index`), which checks everything and names the fault.
"""

from __future__ import annotations

import sys
from operator import add
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException
from shardckpt.plugins import Outline, cut_shapes, is_object_key
from shardckpt.storage import ColumnFile, ParseCache, parse_json
from shardckpt_safetensors.dtype_names import DTYPES
from shardckpt_safetensors.index_names import (
    BLOCK_SCALES,
    COMMON_FILE,
    FEATURE,
    FORMAT,
    HEADER,
    INDEX_FILE,
    KNOWN_FEATURES,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import PlainRecord

#: Most commas in the header of the common state that is parsed here.
_MOST_COMMAS = 1 << 18
_MOST_ELEMENTS = 2**53
#: Two indexes that are compared are of one job as a rule: their columns are equal.
_outlines = ParseCache[Outline](most_bytes=64 << 20, kept=1)  # 64 MiB: of a million tensors


def read_outline(directory: Path, record: PlainRecord) -> Outline | None:
    """Return the outline of a checkpoint, or None to leave it to the strategy.

    The directory is on this machine, and held open; the record is the content of its ``shardckpt.json``. It is None if
    the index is in several parts, has block scales or anything unexpected, or a file is damaged.
    """
    if sys.byteorder != "little":
        return None
    try:
        index = ColumnFile.read(directory, record, INDEX_FILE, _MOST_COMMAS)
        tree = ColumnFile.read(directory, record, COMMON_FILE, _MOST_COMMAS).metadata["tree"].encode()
        # an object with the key $ stands for a value that JSON lacks, which may be in the file, or of a class
        plain = b"" if b'"$"' in tree else tree
        header = parse_json(index.metadata[HEADER].encode())
        _require(header["id"] == record.save_id and header["format"] == FORMAT)
        _require(KNOWN_FEATURES - {FEATURE} >= {*header["required_features"]})
        _require(BLOCK_SCALES not in header["optional_features"])
        # all but the header, which has the id
        columns, dtypes = index.data[min(each.start for each in index.entries.values()) :], header["dtypes"]
        codecs = header["codecs"]
        described = (*dtypes, "", *codecs, *index.entries.items())
        found = _outlines.get(columns, described, lambda: _outline(index, dtypes, codecs))
        common = parse_json(tree)
        _require(isinstance(common, dict) and not any(name.startswith("$") for name in common))
        return found._replace(common=sorted(common), plain_common=plain)
    except (CheckpointingException, LookupError, TypeError, ValueError, OverflowError):
        return None


def _outline(index: ColumnFile, kinds: list[str], codecs: list[str]) -> Outline:
    text, ends = index.bytes_of("text"), index.integers("text_end", len(index.data))
    _require(ends == sorted(ends) and b"\0" not in text)
    pieces = zip([0, *ends], ends, strict=False)
    if text.isascii():  # then a character is a byte, and all are decoded at once
        letters = text.decode()
        strings = [letters[start:end] for start, end in pieces]
    else:
        strings = [text[start:end].decode() for start, end in pieces]
    keys = _join(strings, index.integers("tensor", len(strings)))
    codes = index.integers("tensor_dtype", len(kinds))
    shapes = cut_shapes(index.integers("tensor_shape"), index.integers("tensor_axes"), _MOST_ELEMENTS)
    _require(len(codes) == len(shapes) == len(keys))
    aliases = index.integers("alias_tensor", len(keys))
    names = keys + _join(strings, index.integers("alias", len(strings)))
    objects = _join(strings, index.integers("object", len(strings)))
    unique = {*names, *objects}
    _require(len(names) == len(keys) + len(aliases) and len(unique) == len(names) + len(objects) and "" not in unique)
    _require(all(map(is_object_key, objects)))
    known = [DTYPES[name] for name in kinds]
    dtypes = list(map([dtype.torch_name for dtype in known].__getitem__, codes))
    files = [strings[number] for number in index.integers("file", len(strings))]
    columns = [index.integers(f"object_{name}") for name in ("codec", "file", "start", "nbytes")]
    return Outline(
        names,
        dtypes + [dtypes[number] for number in aliases],
        shapes + [shapes[number] for number in aliases],
        {dtype.torch_name: dtype.itemsize for dtype in known},
        objects,
        [],
        object_places=[(codecs[codec], files[file], *where) for codec, file, *where in zip(*columns, strict=True)],
    )


def _join(strings: list[str], pairs: list[int]) -> list[str]:
    """Return names, each made of two strings."""
    first, second = (map(strings.__getitem__, numbers) for numbers in (pairs[::2], pairs[1::2]))
    _require(len(pairs) % 2 == 0)
    return list(map(add, first, second))


def _require(fine: bool) -> None:
    if not fine:
        raise ValueError("not as this library writes it")


__all__ = ["read_outline"]
