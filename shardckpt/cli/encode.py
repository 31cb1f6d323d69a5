"""Answers of verbs as JSON that every parser reads."""

from __future__ import annotations

import json
import math
from typing import Any


class Rows(list[dict[str, Any]]):
    """Rows of JSON's own types: 100,000 of them are not checked one by one."""


def encode_json(value: Any, *, indent: int | None = None) -> str:
    """Return an answer as JSON in ASCII; see :func:`make_plain`."""
    return json.dumps(make_plain(value), indent=indent, allow_nan=False)


def make_plain(value: Any) -> Any:
    """Return a value in the types of JSON.

    Dataclasses and named tuples become objects by their fields, other tuples lists, sets lists in one order, keys of
    dicts texts; a dict with two keys of one text (1 and "1") becomes a list of pairs. NaN and infinities, which
    JSON lacks, become the texts ``nan``, ``inf`` and ``-inf``; other values their ``str``.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, Rows)):
        return value
    fields = getattr(type(value), "__dataclass_fields__", None) or getattr(type(value), "_fields", None)
    if fields is not None:
        return {name: make_plain(getattr(value, name)) for name in fields}
    if isinstance(value, dict):
        found = {str(key): make_plain(each) for key, each in value.items()}
        return found if len(found) == len(value) else [*map(make_plain, value.items())]
    if isinstance(value, (set, frozenset)):  # Python's order of texts is another in each process
        value = sorted(value, key=_order)
    return [*map(make_plain, value)] if isinstance(value, (list, tuple)) else str(value)


def _order(value: Any) -> tuple[bool, float, str]:
    """Return the sort key of an item of a set: numbers by their size, then the others by their texts."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return not is_number, value if is_number else 0, str(value)
