"""Whether other distributions may have plugins, by their files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardckpt.plugins.installed import has_foreign_plugins
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


@table(
    ("file", "text", "found"),
    [
        ("other-1.0.dist-info/entry_points.txt", "[console_scripts]\na = b\n\n[shardckpt]\nnpy = other.plugin\n", True),
        ("other.egg-info/entry_points.txt", "[ shardckpt ]\nnpy = other.plugin\n", True),
        ("other-1.0.egg/EGG-INFO/entry_points.txt", "[shardckpt]\nnpy = other.plugin\n", True),
        ("other-1.0.dist-info/entry_points.txt", "[shardckpt.other]\nnpy = other.plugin\n", False),
        ("other-1.0.dist-info/METADATA", "[shardckpt]", False),
        ("shardckpt-0.1.0.dist-info/entry_points.txt", "[shardckpt]\nep = shardckpt_ep.plugin\n", False),
        ("shardckpt_more-0.1.dist-info/entry_points.txt", "[shardckpt]\nmore = more.plugin\n", True),
    ],
)
def test_plugins_of_others_are_seen(
    file: str, text: str, *, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution of any kind with an entry point of the group counts, and none but this one is left out."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "absent")])
    assert has_foreign_plugins() == found


def test_an_archive_may_have_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where modules are in an archive, it is left to importlib.metadata to look into it."""
    (tmp_path / "all.zip").write_bytes(b"PK")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "all.zip")])
    assert has_foreign_plugins()
