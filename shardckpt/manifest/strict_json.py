"""JSON of strangers: no key twice, no NaN, and no deep nesting, which is refused before memory is taken for it."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Most arrays and objects of JSON, one in another.
MOST_LEVELS = 500
_BLOCK = 1 << 20
#: Brackets that are checked one by one.
_FEW = 64
#: A text without brackets and commas, which are not counted.
_DROPPED = bytes(byte for byte in range(256) if byte not in b"[]{},")


def parse_json(
    text: bytes | bytearray | memoryview,
    *,
    most_parts: int | None = None,
    parse_int: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Parse an untrusted JSON text.

    Args:
        text: UTF-8.
        most_parts: Most commas outside of strings, which bounds the objects that a text becomes; None: any number.
        parse_int: Makes the value of an integer; by default ``int``.
        parse_float: Makes the value of a number with a ``.``, ``e`` or ``E``; by default ``float``.

    Returns:
        The value.

    Raises:
        ValueError: It is no JSON, has a key twice in one object, more parts, or more than :data:`MOST_LEVELS` levels.
    """
    _check_brackets(memoryview(text), most_parts)
    try:
        return json.loads(
            str(text, "utf-8"),
            object_pairs_hook=_unique_dict,
            parse_constant=_refuse_constant,
            parse_int=parse_int,
            parse_float=parse_float,
        )
    except RecursionError as exc:  # the caller is deep in its stack already
        raise ValueError(f"JSON with more than {MOST_LEVELS} levels") from exc


def _check_brackets(text: memoryview, most_parts: int | None) -> None:
    """Refuse deep nesting and many commas, a block at a time: a parser would take the memory first."""
    depth = start = parts = 0
    quoted = False
    while start < len(text):
        block = bytes(text[start : start + _BLOCK])
        # a backslash and the character that it escapes stay together
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            block = bytes(text[start : start + _BLOCK + 1])
        start += len(block)
        if b"\\" in block:
            block = block.replace(rb"\\", b"").replace(rb"\"", b"")
        pieces = block.split(b'"')  # by turns outside of strings and inside
        found = b"".join(pieces[quoted::2]).translate(None, _DROPPED)
        quoted ^= len(pieces) % 2 == 0
        brackets = found.replace(b",", b"")
        parts += len(found) - len(brackets)
        if most_parts is not None and parts > most_parts:
            raise ValueError("it has too many parts")
        if _nests_deeper(brackets, depth):
            raise ValueError(f"JSON with more than {MOST_LEVELS} levels")
        depth += 2 * _count_opening(brackets) - len(brackets)


def _nests_deeper(brackets: bytes, depth: int) -> bool:
    """Return whether brackets, which follow at a depth, reach more than the most levels."""
    if depth + _count_opening(brackets) <= MOST_LEVELS:  # even if none of them closed one
        return False
    if len(brackets) <= _FEW:
        return max(accumulate((1 if bracket in b"[{" else -1 for bracket in brackets), initial=depth)) > MOST_LEVELS
    first, second = brackets[: len(brackets) // 2], brackets[len(brackets) // 2 :]
    return _nests_deeper(first, depth) or _nests_deeper(second, depth + 2 * _count_opening(first) - len(first))


def _count_opening(brackets: bytes) -> int:
    return brackets.count(b"[") + brackets.count(b"{")


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {twice!r:.100} twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
