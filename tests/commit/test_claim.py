"""What the objects of saves under way say of who saves."""

from __future__ import annotations

from shardckpt.commit.claim import parse_introduction
from shardckpt.commit.owner import Owner


def test_a_time_that_no_calendar_has_names_nobody() -> None:
    """An object that a person or another program wrote names no process, and is no error of who reads it."""
    owner = Owner.current().text
    text = "save x, begun {} UTC\nowner {}\n"
    assert parse_introduction(text.format("1970-01-02 00:00:00", owner).encode()) == (Owner.current(), 86400.0)
    for at in ("2026-13-01 00:00:00", "2026-02-30 00:00:00", "99999-01-01 00:00:00", "- :", "2026-01-01 24:00:00"):
        assert parse_introduction(text.format(at, owner).encode()) is None, at
    assert parse_introduction(text.format("1970-01-02 00:00:00", "zz").encode()) is None
