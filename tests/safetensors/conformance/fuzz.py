"""Hostile headers, drawn anew from a seed: ``python -m tests.safetensors.conformance.fuzz FOLDER [SEED]``.

Each directory has honest digests, so that nothing but the header is wrong.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.safetensors.conformance.draft import COMMON, INDEX, Draft, Link, Saved, Tensor, cut, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILE = "rank_0.safetensors"
#: Largest header of the index, and of other files, in bytes.
INDEX_LIMIT, HEADER_LIMIT = 1 << 22, 100_000_000
SEGMENT = 1 << 20


def _split(data: bytes | Link) -> tuple[bytes, bytes]:
    assert isinstance(data, bytes)
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return data[8:end], data[end:]


def _with_header(name: str, make_header: Callable[[], bytes]) -> Callable[[Draft], None]:
    """Replace the header of a file by one that is made when the file is written: it may be large."""

    def change(draft: Draft) -> None:
        _, payloads = _split(draft.files[name])
        header = make_header()
        data = struct.pack("<Q", len(header)) + header + payloads
        draft.files[name] = data
        draft.lengths[name] = [min(SEGMENT, len(data) - at) for at in range(0, len(data), SEGMENT)]

    return change


def _with_length(name: str, length: int) -> Callable[[Draft], None]:
    """Let a header of a file say another length."""

    def change(draft: Draft) -> None:
        draft.files[name] = struct.pack("<Q", length) + draft.files[name][8:]

    return change


def _with_entry(name: str, column: str, **fields: Any) -> Callable[[Draft], None]:
    """Change an entry of a file's header."""

    def change(draft: Draft) -> None:
        header = json.loads(_split(draft.files[name])[0])
        header[column] |= fields
        _with_header(name, json.dumps(header).encode)(draft)

    return change


def _fill(piece: bytes, size: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """Return a text of exactly a size, of one piece again and again."""
    count = (size - len(before) - len(after)) // len(piece)
    return (before + piece * count + after).ljust(size)


def _keys(size: int) -> bytes:
    count = size // 13
    return ("{" + ",".join(f'"{n:07d}":0' for n in range(count)) + "}").encode().ljust(size)[:size]


def draw_hostile(seed: int) -> Iterator[tuple[str, Callable[[Draft], None]]]:
    """Draw 30 hostile headers: names, and what they change before the digests are computed."""
    draw = random.Random(seed)
    some = draw.randrange(1, 1 << 20)
    yield "length_2_64", _with_length(INDEX, (1 << 64) - 1)
    yield "length_2_63", _with_length(INDEX, 1 << 63)
    yield "length_larger_than_file", _with_length(INDEX, 1 << draw.randrange(14, 62))
    yield "length_of_data_file_2_63", _with_length(FILE, 1 << 63)
    yield "length_of_data_file_wraps", _with_length(FILE, (1 << 64) - 8)
    yield "length_of_common_2_64", _with_length(COMMON, (1 << 64) - draw.randrange(1, 9))
    yield "index_of_100_mb_of_spaces", _with_header(INDEX, partial(_fill, b" ", HEADER_LIMIT, b"{}"))
    yield "index_of_100_mb_of_brackets", _with_header(INDEX, partial(_fill, b"[", HEADER_LIMIT))
    yield "index_of_100_mb_of_entries", _with_header(INDEX, partial(_fill, b'"a":{},', HEADER_LIMIT, b"{", b'"b":{}}'))
    yield "common_of_100_mb_of_brackets", _with_header(COMMON, partial(_fill, b"[", HEADER_LIMIT))
    yield "data_file_header_over_100_mb", _with_header(FILE, partial(_fill, b" ", HEADER_LIMIT + 1, b"{}"))
    yield "nested_lists", _with_header(INDEX, partial(_fill, b"[", INDEX_LIMIT))
    yield "nested_objects", _with_header(INDEX, partial(_fill, b'{"a":', INDEX_LIMIT))
    yield "nested_behind_strings", _with_header(INDEX, partial(_fill, b'["\\"]\\\\",', INDEX_LIMIT))
    yield "flat_lists", _with_header(INDEX, partial(_fill, b"[],", INDEX_LIMIT, b'{"a":[', b"[]]}"))
    yield "many_keys", _with_header(INDEX, partial(_keys, INDEX_LIMIT))
    yield "one_key_again_and_again", _with_header(INDEX, partial(_fill, b'"a":0,', INDEX_LIMIT, b"{", b'"a":0}'))
    yield "one_long_key", _with_header(INDEX, partial(_fill, b"k", INDEX_LIMIT, b'{"', b'":0}'))
    yield "one_long_number", _with_header(INDEX, partial(_fill, b"9", INDEX_LIMIT, b'{"a":', b"}"))
    yield "backslashes", _with_header(INDEX, partial(_fill, b"\\", INDEX_LIMIT, b'{"'))
    yield "not_utf8", _with_header(INDEX, partial(_fill, bytes([draw.randrange(0xF8, 0x100)]), some, b'{"', b'":0}'))
    yield "byte_order_mark", _with_header(INDEX, partial(_fill, b" ", some + 9, b"\xef\xbb\xbf{}"))
    yield "not_a_number", _with_entry(INDEX, "box_start", shape=[float("nan")])
    yield "offsets_negative", _with_entry(INDEX, "box_start", data_offsets=[-some, some])
    yield "offsets_overlap", _with_entry(INDEX, "box_start", data_offsets=[0, some])
    yield "offsets_reversed", _with_entry(INDEX, "box_start", data_offsets=[some, 0])
    yield "offsets_beyond_2_64", _with_entry(INDEX, "box_start", data_offsets=[1 << 64, (1 << 64) + some])
    yield "offsets_of_truth", _with_entry(INDEX, "alias_tensor", data_offsets=[False, True])
    yield "shape_of_2_40_squared", _with_entry(INDEX, "box_offset", shape=[1 << 40, 1 << 40])
    yield "shape_of_100000_axes", _with_entry(INDEX, "box_offset", shape=[1] * 100_000)


def write_hostile(folder: Path, seed: int, names: set[str] | None = None) -> None:
    """Write a directory for each hostile header, or for those with these names."""
    tensors = [Tensor("w", (4, 3), boxes=cut((4, 3), [2], [], files=2))]
    for name, change in draw_hostile(seed):
        if names is not None and name not in names:
            continue
        (folder / name).mkdir(parents=True)
        for file, data in make(tensors, [Saved("o", "raw", b"object")], {"tied": "w"}, files=change).items():
            assert isinstance(data, bytes)
            (folder / name / file).write_bytes(data)


if __name__ == "__main__":
    write_hostile(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else random.randrange(1 << 32))
