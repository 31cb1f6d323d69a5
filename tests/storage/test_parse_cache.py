"""The cache of parsed files: equal bytes are parsed once, and all else is parsed."""

from __future__ import annotations

import pytest

from shardckpt.storage import ParseCache
from shardckpt.storage.parse_cache import _KEPT, _MOST_BYTES


def test_equal_bytes_are_parsed_once_and_others_are_parsed() -> None:
    """What depends on other bytes, or on anything else, is made anew; bytes and bytearrays that are equal are equal."""
    cache = ParseCache[list[str]]()
    calls: list[str] = []

    def get(data: bytes | bytearray, others: str) -> list[str]:
        return cache.get(data, others, lambda: calls.append(others) or [others])  # type: ignore[func-returns-value]

    first = get(b"one", "a")
    assert get(bytearray(b"one"), "a") is first
    assert get(b"one", "b") == ["b"]
    assert get(b"two", "a") == ["a"]
    assert get(b"two", "a") is not first
    assert calls == ["a", "b", "a"]


def test_few_are_kept_and_the_one_that_was_not_used_goes_first() -> None:
    """A process that opens many checkpoints keeps the last few only."""
    cache = ParseCache[object]()
    first, second = (cache.get(name, None, object) for name in (b"first", b"second"))
    for number in range(_KEPT - 1):
        cache.get(b"%d" % number, None, object)
        assert cache.get(b"first", None, object) is first
    assert cache.get(b"second", None, object) is not second


def test_what_is_not_kept() -> None:
    """A large file, but where more bytes are allowed, a value that may not be kept, and one that could not be made."""
    cache = ParseCache[object]()
    large = bytes(_MOST_BYTES + 1)
    assert cache.get(large, None, object) is not cache.get(large, None, object)
    roomy = ParseCache[object](most_bytes=len(large))
    assert roomy.get(large, None, object) is roomy.get(memoryview(large), None, object)
    assert cache.get(b"", None, object, lambda _: False) is not cache.get(b"", None, object, lambda _: False)

    def fail() -> object:
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            cache.get(b"bad", None, fail)
    assert cache.get(b"bad", None, str) == ""
