"""vLLM is not installed where tests run: ``vllm_stand_in`` has the names that the loader uses, as vLLM has them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CannotLoadError, CheckpointingException, KeyMismatchError
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Engine(nn.Module):
    """A model as vLLM has them: it fuses weights as they come, and says which parameters it has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(4, 12, bias=False)
        self.o_proj = nn.Linear(4, 4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take the weights one by one."""
        loaded = set()
        for name, values in weights:
            letter = name.split("_")[0]
            target = dict(self.named_parameters())["qkv_proj.weight" if letter in "qkv" else name]
            rows = slice(4 * "qkv".index(letter), 4 * "qkv".index(letter) + 4) if letter in "qkv" else slice(None)
            target.data[rows] = values
            loaded.add("qkv_proj.weight" if letter in "qkv" else name)
        return loaded


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return vLLM's door to its loaders, after it has called the plugin by the entry point."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("vllm_stand_in")))
    group = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."vllm.general_plugins"]')[2]
    module, function = group.split("shardckpt = ")[1].split('"')[1].split(":")
    getattr(importlib.import_module(module), function)()
    yield importlib.import_module("vllm.model_executor.model_loader")
    for name in [module, *(name for name in sys.modules if name.split(".")[0] == "vllm")]:
        del sys.modules[name]


def load(loaders: Any, model: str, **extra: Any) -> nn.Module:
    """Load an engine's model as vLLM does."""
    config = SimpleNamespace(load_format="shardckpt", model_loader_extra_config=extra)
    loader = loaders.get_model_loader(config)
    model_config = SimpleNamespace(model=model, quantization=None)
    loader.download_model(model_config)
    return loader.load_model(Engine(), model_config)  # type: ignore[no-any-return]


def make_trainer() -> nn.ModuleDict:
    """A model as its trainer has it, with the Hub's names."""
    torch.manual_seed(0)
    names = {f"{letter}_proj": nn.Linear(4, 4, bias=False) for letter in "qkv"}
    return nn.ModuleDict({**names, "o_proj": nn.Linear(4, 4)})


@pytest.mark.parametrize("backend", ["torch_dist", "safetensors"])
def test_the_engine_has_the_weights_of_the_trainer(loaders: Any, tmp_path: Path, backend: str) -> None:
    """Load format `shardckpt` fills an engine's model from a training checkpoint, without the optimizer's state."""
    trainer = make_trainer()
    optimizer = torch.optim.AdamW(trainer.parameters())
    trainer["o_proj"](torch.ones(4)).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict(trainer, optimizer), tmp_path / "c", backend)
    engine = load(loaders, "config", checkpoint=str(tmp_path / "c"), memory="1MiB")
    fused = torch.cat([trainer[f"{letter}_proj"].weight for letter in "qkv"])
    assert torch.equal(engine.qkv_proj.weight, fused)
    assert torch.equal(engine.o_proj.bias, trainer["o_proj"].bias)
    again = load(loaders, str(tmp_path / "c"), dtype="bfloat16")
    assert torch.equal(again.qkv_proj.weight, fused.bfloat16().float())


def test_errors_say_what_to_do(loaders: Any, tmp_path: Path) -> None:
    """Weights that are missing, a wrong option and a folder that is no checkpoint are errors that name them."""
    dc.save(to_sharded_state_dict({"q_proj.weight": torch.ones(4, 4)}), tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"o_proj.bias.*mapping"):
        load(loaders, str(tmp_path / "c"))
    with pytest.raises(CheckpointingException, match=r"\['maping'\].*mapping"):
        load(loaders, str(tmp_path / "c"), maping="qwen3_moe")
    with pytest.raises(CannotLoadError):
        load(loaders, str(tmp_path))
