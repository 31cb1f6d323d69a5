"""JSON and headers of safetensors files, as strict as FORMAT.md asks: no key twice, no deep nesting, no holes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

_DEEPEST = 500
_BLOCK = 1 << 20
_NO_BRACKETS = bytes({*range(256)} - {*b"[]{}"})


def need(ok: object, why: str) -> None:
    """Raise a ValueError unless something is true."""
    if not ok:
        raise ValueError(why)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    need(len(found) == len(pairs), "JSON has a key twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _check_depth(raw: bytes | memoryview) -> None:
    """Refuse deep nesting before memory is taken for it, a block at a time."""
    depth = inside = start = 0
    while start < len(raw):
        block = bytes(raw[start : start + _BLOCK])
        if (len(block) - len(block.rstrip(b"\\"))) % 2:  # a backslash and what it escapes stay together
            block = bytes(raw[start : start + _BLOCK + 1])
        texts = block.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # every second one is a string
        brackets = np.frombuffer(b"".join(texts[inside::2]).translate(None, _NO_BRACKETS), "i1")
        depths = depth + np.cumsum(brackets % 4 - 2, dtype="i4")  # 1 for [ and {, -1 for ] and }
        need(depths.max(initial=0) <= _DEEPEST, "JSON is nested too deep")
        depth = int(depths[-1]) if depths.size else depth
        inside = (inside + len(texts) - 1) % 2
        start += len(block)


def parse_json(raw: bytes | memoryview) -> Any:
    """Return the value of a JSON text."""
    _check_depth(raw)
    return json.loads(str(raw, "utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)


def read_header(raw: bytes, limit: int) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """Return the header of a safetensors file.

    Args:
        raw: The file's bytes.
        limit: Largest header, in bytes.

    Returns:
        The entries by name; the metadata; the bytes behind the header.
    """
    end = 8 + int.from_bytes(raw[:8], "little")
    need(8 <= len(raw) >= end <= 8 + limit, "a header is longer than its file, or than allowed")
    entries = parse_json(memoryview(raw)[8:end])
    metadata = entries.pop("__metadata__", {})
    places = [0, *itertools.chain(*sorted(entry["data_offsets"] for entry in entries.values())), len(raw) - end]
    need({*map(type, places)} == {int} and places == sorted(places), "a header has offsets that are none")
    need(places[::2] == places[1::2], "a header has holes or overlaps")
    return entries, metadata, memoryview(raw)[end:]
