"""Names of temporary directories: they fit, say what they are of, and are told apart."""

from __future__ import annotations

import os
from pathlib import Path

from shardckpt.commit.owner import Owner
from shardckpt.commit.staging_names import (
    NAME_MAX,
    REMOVED,
    REPLACED,
    STAGING,
    discarded_name,
    is_temporary,
    new_save_id,
    parse_temporary,
    stem,
    temporary_name,
)
from tests.tables import table

#: Names of 1 to 255 bytes, the last ones of characters with several bytes and of bytes that are no text.
NAMES = ("c", "a.b", "x" * 159, "x" * 160, "x" * 201, "x" * 255, "é" * 127, "字" * 85, os.fsdecode(b"\xff" * 255))


@table("name", NAMES, ids=[f"{len(os.fsencode(name))} {name[:1]!a}" for name in NAMES])
def test_every_temporary_name_fits(name: str) -> None:
    """Of names of up to 255 bytes all temporary ones can be made, and say what they are of."""
    for kind in (STAGING, REPLACED, REMOVED):
        made = temporary_name(name, kind, new_save_id())
        assert is_temporary(made)
        path, later = Path(made), Path(discarded_name(made))
        assert len(os.fsencode(later)) <= NAME_MAX
        assert parse_temporary(path) == (path, stem(name), kind, Owner.current(), kind == REMOVED)
        discarded = REMOVED if kind == REMOVED else STAGING
        assert parse_temporary(later) == (later, stem(name), discarded, Owner.current(), True)
    assert stem(stem(name)) == stem(name)


def test_long_names_are_cut_to_different_ones() -> None:
    """Names that begin alike are told apart, and what they begin with is still to be seen."""
    one, other = "run-" + "x" * 200 + "1", "run-" + "x" * 200 + "2"
    assert stem(one) != stem(other)
    assert stem(one).startswith("run-" + "x" * 100)


def test_save_ids_differ() -> None:
    """No two saves have the same name."""
    assert len({new_save_id() for _ in range(100)}) == 100
