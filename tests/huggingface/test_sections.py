"""The model among its optimizers: found by what they hold, so that a folder has its weights under its names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import convert_checkpoint
from tests.huggingface.samples import read, save
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NAMES = ("model.embed_tokens.weight", "model.layers.0.weight", "lm_head.weight")


def _optimizer(prefix: str, names: tuple[str, ...]) -> list[str]:
    return [f"{prefix}.state.{name}.{value}" for name in names for value in ("exp_avg", "step")]


#: What the keys of a checkpoint are, and the prefix of its model.
CASES: dict[str, tuple[list[str], str]] = {
    "torch's DCP tutorial": (_optimizer("optim", NAMES), "model."),
    "an AppState": (_optimizer("app.optim", NAMES), "app.model."),
    "Lightning's numbers": (_optimizer("optimizer_0", ("0", "1")), "model."),
    "other names": (_optimizer("opt", NAMES), "net."),
    "no section": (_optimizer("optimizer", NAMES), ""),
    "no section, and numbers": (_optimizer("optimizer", ("0", "1")), ""),
    "Megatron's order": ([f"optimizer.state.exp_avg.{name}" for name in NAMES], ""),
    "averages of the weights": ([*(f"ema.{name}" for name in NAMES), *_optimizer("optim", NAMES)], "model."),
    "a model alone": ([], "model."),
    "an AppState of a model alone": ([], "app.model."),
    "a file of torch.save": ([], "state_dict."),
    "nothing but the model": ([], ""),
}


@table("name", CASES)
def test_the_model_is_found_and_nothing_else_is_written(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An export has the model's names alone, whatever stands around them; what is left out is said, and reported."""
    others, prefix = CASES[name]
    keys = [*(prefix + key for key in NAMES), *others]
    source = save(tmp_path / "c", {key: torch.full((2,), float(n)) for n, key in enumerate(keys)})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shardckpt"):
        exported = export_to_huggingface(source, tmp_path / "hf")
    assert read(tmp_path / "hf").keys() == set(NAMES)
    assert {*exported.left_out.optimizer, *exported.left_out.outside} == set(others)
    assert ("of the optimizer's state" in caplog.text) == bool(others)
    assert read(_convert(source, tmp_path / "converted")).keys() == set(NAMES)
    with dc.open_checkpoint(source) as checkpoint:
        assert dict(checkpoint.weights()).keys() == set(NAMES)


def _convert(source: Path, target: Path) -> Path:
    convert_checkpoint(source, target, "hf")
    return target


def test_a_folder_of_stock_dcp_is_exported_under_the_models_names(tmp_path: Path) -> None:
    """What dcp.save writes of {"model", "optim"}, as torch's tutorial has it, becomes the model's folder."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    export_to_huggingface(tmp_path / "c", tmp_path / "hf")
    assert read(tmp_path / "hf").keys() == {"0.weight", "0.bias"}


def test_a_section_that_is_named_is_exported(tmp_path: Path) -> None:
    """With a prefix the averages are exported, or the optimizer's moments; a module called state is no optimizer."""
    keys = ["model.w", "ema.w", "optim.state.w.exp_avg"]
    source = save(tmp_path / "c", {key: torch.ones(2) for key in keys})
    for prefix, names in (("ema.", {"w"}), ("optim.state.", {"w.exp_avg"})):
        export_to_huggingface(source, tmp_path / "hf", prefix=prefix, overwrite=True)
        assert read(tmp_path / "hf").keys() == names


#: Keys of models alone.
MODELS = {
    "a module called state": ["ssm.state.weight", "lm.weight"],
    "a layer in a module called state": ["model.state.proj.weight", "model.layers.0.weight", "lm_head.weight"],
    "a section whose name ends with state": ["model_state.w", "model_state.layers.0.w", "model_state.norm.w"],
    "a module called optim": ["optimize.weight", "layers.0.optim.weight"],
}


@table("name", MODELS)
def test_a_model_with_the_words_of_an_optimizer_is_written_whole(name: str, tmp_path: Path) -> None:
    """Modules with names such as state are the model's."""
    source = save(tmp_path / "c", {key: torch.ones(2) for key in MODELS[name]})
    export_to_huggingface(source, tmp_path / "hf", overwrite=True)
    assert read(tmp_path / "hf").keys() == set(MODELS[name])
