from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import PluginError
from shardckpt.huggingface import (
    Rule,
    RuleMapping,
    export_to_huggingface,
)
from shardckpt.huggingface.models import find_mapping
from shardckpt.plugins.hookspecs import hookimpl
from tests.huggingface.samples import read, save
from tests.plugged import registered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
    with registered(_Plugin(None)) as made:
        yield made


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
