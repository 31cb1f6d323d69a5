from __future__ import annotations

import json
import tracemalloc

import pytest

from shardckpt.manifest import MOST_LEVELS, parse_json
from tests.tables import table

_BLOCK = 1 << 20


@table("shift", range(4))
def test_brackets_in_strings_do_not_count(shift: int) -> None:
    """Strings with brackets, quotes and backslashes are read as json reads them, wherever a block ends in them."""
    value = ["x" * (_BLOCK - 8 + shift), '\\"[[{\\\\"' * 200_000, {"a": [[1, 2.5, None]]}]
    assert parse_json(json.dumps(value).encode()) == value


def test_the_deepest() -> None:
    """500 levels are read, and 501 refused, whether brackets stand in one block or in many."""
    for filler in ("", " " * (_BLOCK // 100)):
        for levels in (MOST_LEVELS, MOST_LEVELS + 1):
            text = (f"[{filler}" * levels + "]" * levels).encode()
            if levels <= MOST_LEVELS:
                assert parse_json(text)
            else:
                with pytest.raises(ValueError, match="more than 500 levels"):
                    parse_json(text)


@table("text", ['{"a": 1, "\\u0061": 2}', "[NaN]", "[-Infinity]", "\ufeff[]", '["', "]", "[" * 499])
def test_what_is_no_json(text: str) -> None:
    """A key twice, constants that JSON does not have, a byte order mark, and cut text are refused."""
    with pytest.raises(ValueError, match=r"."):
        parse_json(text.encode())


@table("piece", [b"[", b'{"a":', b"[],", b'"a",'])
def test_hostile_text_takes_no_memory(piece: bytes) -> None:
    """16 MB of levels or parts are refused before they become objects, in little memory."""
    text = b"[" + piece * ((16 << 20) // len(piece))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"levels|parts"):
            parse_json(text, most_parts=1 << 18)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
