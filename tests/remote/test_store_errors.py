"""What users read when a store refuses, through both clients."""

from __future__ import annotations

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import RemotePath, find_problem
from shardckpt.storage.store_errors import mask_secrets
from tests.tables import table


def test_more_bytes_than_asked_for_are_refused() -> None:
    """A store that gives the whole object for a range is an error, whichever way it is read."""

    class Whole:
        url = "odd://x"

        def read(self, name: str, offset: int, nbytes: int) -> bytes:
            return b"0123456789"

    path = RemotePath(Whole()) / "object"  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="asked for 4 bytes at offset 2, its store gave 10"):
        path.read_range(2, 4)
    with pytest.raises(StorageError, match="asked for 4 bytes at offset 2, its store gave 10"):
        path.read_into(memoryview(bytearray(4)), 2)


@table(
    ("text", "shown"),
    [
        (
            "https://b.s3.amazonaws.com/o?X-Amz-Credential=AK%2F1&X-Amz-Signature=ab12&x=1",
            "?X-Amz-Credential=***&X-Amz-Signature=***&x=1",
        ),
        ("https://a.blob.core.windows.net/c/o?sv=1&sig=abc%3D", "?sv=1&sig=***"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("ftp://me:word@host/x", "ftp://me:***@host/x"),
        (
            "<Error><Code>ExpiredToken</Code><Message>ended</Message><Token-0>abc</Token-0></Error>",
            "ExpiredToken: ended",
        ),
        ("<Error><Code>ExpiredToken</Code><Token-0>abc", "ExpiredToken"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    """Signatures, tokens and passwords in URLs and in answers of stores are not shown."""
    assert mask_secrets(text).endswith(shown)


def test_other_errors_have_no_advice() -> None:
    """An error of no known cause is tried again, and nothing is guessed about it."""
    assert find_problem(OSError("disk on fire")) is None
    assert find_problem(FileNotFoundError("no object")) is None
