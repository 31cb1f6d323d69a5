"""Mappings that are not there, or fail: errors that name what is near."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.errors import CheckpointingException, PluginError
from shardckpt.huggingface.models import find_mapping
from shardckpt.planning.boxes import Box
from shardckpt.plugins.key_mapping import Identity, KeyMapEntry, get_key_map_entries
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_nearest_mapping_is_named() -> None:
    """The error about a mapping's name names the nearest one."""
    with pytest.raises(CheckpointingException, match=r"'megtron' \(did you mean megatron\?"):
        find_mapping("megtron")


def test_the_nearest_file_is_named(tmp_path: Path) -> None:
    """The error about a mapping's file that is not there names the nearest one beside it."""
    (tmp_path / "rules.json").write_text("{}")
    with pytest.raises(CheckpointingException, match=r"did you mean rules\.json\?"):
        find_mapping(f"{tmp_path}/rule.json")


def test_a_file_that_exits_is_an_error(tmp_path: Path) -> None:
    """A mapping's file that ends the process is an error, not an end without a word."""
    (tmp_path / "rules.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(CheckpointingException, match="failed: SystemExit"):
        find_mapping(f"{tmp_path}/rules.py")


class _Renames:
    """Maps each key to entries that ``make`` makes of one; a generator where it is one."""

    def __init__(self, make: Callable[[KeyMapEntry], Any]) -> None:
        self.make = make

    def links(self, key: str, shape: tuple[int, ...]) -> Any:
        return self.make(Identity().links(f"{key}.weight", shape)[0])


def test_entries_of_a_generator_are_not_lost() -> None:
    """A mapping whose ``links`` is a generator gives its entries, and not none in silence."""
    entries = get_key_map_entries(_Renames(lambda entry: (each for each in [entry])), "a", (2, 3))
    assert [entry.name for entry in entries] == ["a.weight"]


@table(
    ("make", "text"),
    [
        (lambda _: None, "to None, which is no KeyMapEntry"),
        (lambda entry: entry, r"to 'a\.weight', which is no KeyMapEntry"),
        (lambda entry: [tuple(entry)], r"to \('a\.weight', .*, which is no KeyMapEntry"),
        (lambda entry: [entry._replace(box=Box((0,), (2, 3)))], "which does not fit"),
        (lambda entry: [entry._replace(offset=(0, 1))], "which does not fit"),
        (lambda entry: [entry._replace(shape=(2, 3, 1), offset=(0, 0, 0))], "which does not fit"),
        (lambda entry: [entry._replace(box=Box((0,) * 3, (1, 2, 3)))], "which does not fit"),
        (lambda entry: [entry._replace(shape=(), offset=(), box=Box((0,) * 3, (1,) * 3))], "which does not fit"),
        (lambda entry: [entry._replace(name=None)], "whose fields are not of the types"),
        (lambda entry: [entry._replace(box=((0, 0), (2, 3)))], "whose fields are not of the types"),
        (lambda entry: [entry._replace(shape=None)], "whose fields are not of the types"),
        (lambda entry: [entry._replace(offset=(0, "0"))], "whose fields are not of the types"),
    ],
)
def test_what_is_no_entry_names_the_mapping(make: Callable[[KeyMapEntry], Any], text: str) -> None:
    """A mapping that returns something else than entries, or one that does not fit, is an error that names it."""
    with pytest.raises(PluginError, match=rf"_Renames maps 'a' of shape \(2, 3\) .*{text}"):
        get_key_map_entries(_Renames(make), "a", (2, 3))
