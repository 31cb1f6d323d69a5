from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.cli import main
from shardckpt.errors import PluginError
from shardckpt.huggingface import Rule, RuleMapping, export_to_huggingface
from shardckpt.huggingface.models import find_mapping
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import get_plugin_manager
from tests.huggingface.samples import read, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLUGIN = """
from shardckpt import hookimpl
from shardckpt.huggingface import Rule, RuleMapping

@hookimpl
def shardckpt_key_mapping(model_type):
    if model_type == "toy":
        return RuleMapping([Rule("blocks.{layer}.experts", ("h.{layer}.{expert}.weight",))])
"""


def _install(site: Path) -> None:
    """A distribution with an entry point, as pip leaves it."""
    info = site / "shardckpt_toy-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "shardckpt_toy.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardckpt]\ntoy = shardckpt_toy\n")


def test_an_installed_plugin_maps_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A distribution's shardckpt_key_mapping serves the command; without it the model is unknown."""
    whole = torch.arange(12.0).reshape(3, 2, 2)
    save(tmp_path / "c", {"blocks.4.experts": whole})
    _install(tmp_path / "site")
    arguments = ["export", str(tmp_path / "c"), str(tmp_path / "hf"), "--mapping", "toy"]
    assert main(arguments) == 1  # this process does not see it
    assert "no mapping for models of type 'toy'" in capsys.readouterr().err
    command = [sys.executable, "-m", "shardckpt", *arguments]
    found = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=found)
    assert done.returncode == 0, done.stderr
    assert {name: t.tolist() for name, t in read(tmp_path / "hf").items()} == {
        f"h.4.{expert}.weight": whole[expert].tolist() for expert in range(3)
    }


class _Plugin:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def shardckpt_key_mapping(self, model_type: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if model_type in ("toy", "mixtral") else None


@pytest.fixture
def plugin() -> Iterator[_Plugin]:
    """A plugin of this process."""
    made = _Plugin(None)
    get_plugin_manager().register(made)
    yield made
    get_plugin_manager().unregister(made)


def test_a_plugin_comes_before_the_built_in(plugin: _Plugin, tmp_path: Path) -> None:
    """The first plugin that answers decides, also for a model that is built in; None leaves it to the next."""
    built_in = find_mapping("mixtral")
    plugin.answer = RuleMapping([Rule("a", ("b",))])
    assert find_mapping("mixtral") is plugin.answer
    assert find_mapping("qwen3_moe") is not plugin.answer
    save(tmp_path / "c", {"a": torch.ones(2)})
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping="toy")
    assert read(tmp_path / "hf").keys() == {"b"}
    plugin.answer = None
    assert find_mapping("mixtral") is built_in


def test_a_plugin_that_fails_is_named(plugin: _Plugin, tmp_path: Path) -> None:
    """An exception in the hook, or an answer that is no mapping, is a PluginError, and nothing is written."""
    save(tmp_path / "c", {"a": torch.ones(2)})
    for answer, text in ((ValueError("no table"), "ValueError: no table"), ({"a": "b"}, "'toy' is a dict")):
        plugin.answer = answer
        with pytest.raises(PluginError, match=text):
            export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping="toy")
    assert not (tmp_path / "hf").exists()
