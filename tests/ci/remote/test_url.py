from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import programs
from tests.remote.url import memory

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["memory"]  # fixtures


@pytest.mark.parametrize(
    ("prelude", "disabled", "texts"),
    [
        ("", "fsspec,obstore", ("plugins that serve URLs: none", "disabled by SHARDCKPT_DISABLED_PLUGINS")),
        ("sys.modules['fsspec'] = None", "", ("pip install 'shardckpt[fsspec]'",)),
    ],
)
def test_without_fsspec_local_directories_work(
    tmp_path: Path, prelude: str, disabled: str, texts: tuple[str, ...]
) -> None:
    """With the plugin switched off or fsspec missing, URLs are refused with the reason and nothing else changes."""
    program = f"""
import sys
{prelude}
import torch
from shardckpt import dist_checkpointing as dc
dc.save({{"iteration": 1}}, {str(tmp_path / "c")!r})
assert dc.load({{}}, {(tmp_path / "c").as_uri()!r}) == {{"iteration": 1}}
assert "fsspec" not in sys.modules or sys.modules["fsspec"] is None, "imported"
try:
    dc.save({{"iteration": 1}}, "memory://bucket/c")
except dc.CheckpointingException as exc:
    print(exc)
"""
    done = programs.run(program, environment={"SHARDCKPT_DISABLED_PLUGINS": disabled})
    assert done.returncode == 0, done.stderr
    for text in texts:
        assert text in done.stdout
