"""Trees as JSON text: read strictly, so that two readers cannot understand one text in two ways."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from shardckpt.storage import MOST_LEVELS
from shardckpt.storage import parse_json as parse_strictly

#: Digits of the longest integer that JSON holds here, -2^63 or 2^64 - 1, with the sign.
_MOST_DIGITS = 20
#: Characters of the longest number, -2.2250738585072014e-308.
_WIDEST = 24
#: Characters of the longest text that is padded: a long list of small numbers would take several times its space.
_MOST_PADDED = 1 << 16
_STRING_OR_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|(-?[0-9][0-9.eE+-]*)')


def dump_json(tree: Any) -> str:
    """Return a tree as JSON, without spaces."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def dump_padded(tree: Any) -> str:
    """Return a tree as JSON, with spaces behind it: the length depends on the count of its numbers, not on the values.

    A plan of a save has the sizes of the payloads. Without the spaces, a learning rate of 0.1 and one of 0.05 would
    need two plans. Texts of more than 64 KiB are not padded.
    """
    text = dump_json(tree)
    if len(text) > _MOST_PADDED:
        return text
    lengths = [len(number) for number in _STRING_OR_NUMBER.findall(text) if number]
    return text + " " * (_WIDEST * len(lengths) - sum(lengths))


def parse_json(data: bytes | bytearray | memoryview | str) -> Any:
    """Return the tree in a JSON text; ValueError if it is none, or nested too deeply."""
    text = data.encode() if isinstance(data, str) else data
    return parse_strictly(text, parse_int=_integer, parse_float=_float)


def check_levels(tree: Any) -> None:
    """Raise ValueError if a tree has more levels than readers accept."""
    # level by level: a walk that recurses would need a frame a level
    level = [tree] if type(tree) in (dict, list) else []
    for _ in range(MOST_LEVELS):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in (dict, list)
        ]
        if not level:
            return
    raise ValueError(f"JSON with more than {MOST_LEVELS} levels")


def show(value: Any) -> str:
    """Return a value from JSON for an error: containers by their kind alone, since their text may be long and deep."""
    if type(value) is dict:
        return f"an object of {len(value)}"
    return f"a list of {len(value)}" if type(value) is list else f"{value!r:.100}"


def _integer(text: str) -> int:
    # checked by length first: the time of int() grows with the square of the length
    value = int(text) if len(text) <= _MOST_DIGITS else None
    if value is None or not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"the integer {text:.40} has more than 64 bits")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is no finite float")
    return value
