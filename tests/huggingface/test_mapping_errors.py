"""Mappings that are not there, or fail: errors that name what is near."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.models import find_mapping

if TYPE_CHECKING:
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
