from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.plugins import get_plugin_manager
from tests.plugged import registered
from tests.typing import api

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_typed_user_writes_runs(tmp_path: Path) -> None:
    """The file that shows mypy how the API is called does what it says."""
    assert torch.equal(api.save_and_load(tmp_path), torch.arange(32.0).reshape(4, 8))
    assert api.save_in_background(tmp_path)
    assert api.train(tmp_path) == [1, 2]
    api.adapt(tmp_path)
    assert "absent" in api.check_errors(tmp_path)


def test_a_typed_plugin_registers() -> None:
    """A plugin written against the typed hooks brings its strategies."""
    with registered(api.Plugin()):
        assert {entry.name for entry in get_plugin_manager().registry.entries(backend="typed")} == {
            "tests.typing.api.MemoryLoad",
            "tests.typing.api.MemorySave",
        }
