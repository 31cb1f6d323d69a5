"""The class that a folder's config.json names is asked whether it has the weights' names and shapes."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import KeyMismatchError
from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import verify_checkpoint
from shardckpt.maintenance.verify import DAMAGED, INTACT, get_exit_code
from tests.ci.huggingface.test_models import _model
from tests.huggingface.samples import sharded_state
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _publish(path: Path, name: str, kind: str) -> Path:
    model = _model(name, **({"num_experts": 4, "moe_intermediate_size": 8} if kind == "moe" else {}))
    model.save_pretrained(path)
    return path


def _found(folder: Path) -> tuple[int, str]:
    results = verify_checkpoint(folder)
    config = next(result for result in results if result.name == "config.json")
    return get_exit_code(results), config.fault or config.note


@table(
    ("changed", "verdict", "said"),
    [
        ({"model.norm.weight": None}, DAMAGED, "1 missing (model.norm.weight)"),
        ({"optim.step": torch.zeros(1)}, INTACT, "1 unknown (optim.step)"),
        ({"model.norm.weight": torch.zeros(3)}, DAMAGED, "1 of another shape (model.norm.weight: (3,) for (32,))"),
        (
            {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(3, 4)},
            DAMAGED,
            "experts.0.up_proj.weight: (3, 4) for (8, 32)",
        ),
        ({}, INTACT, "Qwen3MoeForCausalLM of transformers has these names and shapes"),
    ],
    ids=["missing", "unknown", "shape", "experts", "sound"],
)
def test_weights_that_the_class_has_not_are_damage(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], verdict: int, said: str
) -> None:
    """Missing and misshaped tensors are, unknown ones are said, as from_pretrained tells them, which reads no value."""
    folder = _publish(tmp_path / "hf", "Qwen3Moe", "moe")
    weights = load_file(folder / "model.safetensors") | changed
    save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})
    code, found = _found(folder)
    assert code == verdict
    assert said in found


@table(
    ("cut", "verdict", "said"),
    [
        ({}, INTACT, "Qwen3MoeForCausalLM of transformers has these names and shapes"),
        ({"model.norm.weight"}, DAMAGED, "1 missing (model.norm.weight)"),
        ({"lm_head.weight"}, INTACT, "Qwen3MoeModel of transformers has these names and shapes"),
        ({"lm_head.weight", "model.norm.weight"}, INTACT, "it names no class"),
    ],
)
def test_a_config_that_names_no_class_has_that_of_its_type(
    tmp_path: Path, cut: set[str], verdict: int, said: str
) -> None:
    """With an output layer it is a language model; without one the base, where that fits, and else nobody knows."""
    folder = _publish(tmp_path / "hf", "Qwen3Moe", "moe")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k not in cut}, folder / "model.safetensors", {"format": "pt"})
    code, found = _found(folder)
    assert code == verdict
    assert said in found


def test_an_export_says_what_its_class_does_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor beside the model's that gets into the folder is named in a warning; with strict it is an error."""
    model = _model("Llama")
    model.save_pretrained(tmp_path / "assets")
    state = to_sharded_state_dict(model)
    dc.save(state, tmp_path / "c")
    dc.save({**state, "value_head": sharded_state({"value_head.weight": torch.zeros(2)})}, tmp_path / "c2")
    with caplog.at_level(logging.WARNING, "shardckpt"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf", assets=tmp_path / "assets")
    assert "LlamaForCausalLM" not in caplog.text
    with caplog.at_level(logging.WARNING, "shardckpt"):
        export_to_huggingface(tmp_path / "c2", tmp_path / "hf2", assets=tmp_path / "assets")
    assert "of the tensors of LlamaForCausalLM of transformers, 1 unknown (value_head.weight)" in caplog.text
    few = {key: shard for key, shard in state.items() if key != "model.norm.weight"}
    dc.save(few, tmp_path / "c3")
    with pytest.raises(KeyMismatchError, match=r"hf3 is not written: .*1 missing \(model\.norm\.weight\)"):
        export_to_huggingface(tmp_path / "c3", tmp_path / "hf3", assets=tmp_path / "assets", strict=True)
    assert not (tmp_path / "hf3").exists()


def test_whatever_else_stops_transformers_is_no_damage(tmp_path: Path) -> None:
    """A setting that this release does not know, and a class that is no model's: not compared, and intact."""
    folder = _publish(tmp_path / "hf", "Qwen3Moe", "moe")
    config = json.loads((folder / "config.json").read_text())
    for change in ({"hidden_act": "newkind"}, {"architectures": ["pipeline"]}, {"architectures": ["BertTokenizer"]}):
        (folder / "config.json").write_text(json.dumps(config | change))
        code, found = _found(folder)
        assert code == INTACT
        assert "names and shapes were not compared" in found


def test_no_class_is_built_beside_a_training(tmp_path: Path) -> None:
    """In another thread than the main one: it would change defaults of torch that a training has."""
    folder = _publish(tmp_path / "hf", "Qwen3Moe", "moe")
    with ThreadPoolExecutor(1) as pool:
        code, found = pool.submit(_found, folder).result()
    assert code == INTACT
    assert "main thread" in found
