"""JSON and headers of safetensors files, as strict as FORMAT.md asks: no key twice, no NaN, no deep nesting, no holes."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np

_DEEPEST = 500


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


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON text."""
    texts = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # every second one is a string
    brackets = np.frombuffer(re.sub(rb"[^][{}]+", b"", b"".join(texts[::2])), "i1")
    steps = brackets % 4 - 2  # 1 for [ and {, -1 for ] and }
    need(np.cumsum(steps, dtype="i4").max(initial=0) <= _DEEPEST, "JSON is nested too deep")
    return json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse)


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
    entries = parse_json(raw[8:end])
    metadata = entries.pop("__metadata__", {})
    places = [0, *itertools.chain(*sorted(entry["data_offsets"] for entry in entries.values())), len(raw) - end]
    need({*map(type, places)} == {int} and places == sorted(places), "a header has offsets that are none")
    need(places[::2] == places[1::2], "a header has holes or overlaps")
    return entries, metadata, memoryview(raw)[end:]
