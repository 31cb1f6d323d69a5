"""A cast of an export is per tensor: what holds more than the model's weights keeps its dtype, and is named."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import convert_checkpoint
from tests.huggingface.samples import read, save

if TYPE_CHECKING:
    from pathlib import Path

BIAS, DECAY = "model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.mixer.A_log"


def _model(weights: torch.dtype) -> dict[str, torch.Tensor]:
    close = 1 + torch.arange(32) / 1024  # all equal in bfloat16
    return {
        "model.layers.0.w": torch.linspace(-1, 1, 4096).to(weights),
        "model.norm.w": torch.linspace(0, 1, 32),
        "model.rope.inv_freq": torch.linspace(0, 1, 32, dtype=torch.float64),
        BIAS: close.clone(),
        DECAY: close.clone(),
    }


def _dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name.removeprefix("model."): tensor.dtype for name, tensor in read(folder).items()}


def test_what_holds_more_than_the_weights_is_not_cast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside bfloat16 weights float32 and float64 stay; beside float32, float64 and what models compute in 32 bits."""
    for weights, norm in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        source = save(tmp_path / f"c {weights}", _model(weights))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardckpt"):
            exported = export_to_huggingface(source, tmp_path / "hf", dtype="bfloat16", overwrite=True)
        found = read(tmp_path / "hf")
        assert len(set(found[BIAS].tolist())) == 32  # the experts that a router chooses by it are the same
        assert _dtypes(tmp_path / "hf") == {
            "layers.0.w": torch.bfloat16,
            "norm.w": norm,
            "rope.inv_freq": torch.float64,
            BIAS.removeprefix("model."): torch.float32,
            DECAY.removeprefix("model."): torch.float32,
        }
        assert {BIAS, DECAY, "model.rope.inv_freq"} <= set(exported.kept)
        assert set(exported.cast) == {name for name in found if found[name].dtype == torch.bfloat16} - (
            {"model.layers.0.w"} if weights == torch.bfloat16 else set()
        )
        assert BIAS in caplog.text


def test_a_pattern_casts_or_keeps_what_it_names(tmp_path: Path) -> None:
    """dtype= by patterns casts what would be kept, keep= keeps what would be cast; what matches nothing is refused."""
    source = save(tmp_path / "c", _model(torch.float32))
    dtypes = {"*": "bfloat16", "*.A_log": "float16"}
    export_to_huggingface(source, tmp_path / "hf", dtype=dtypes, keep=["*norm*"])
    found = _dtypes(tmp_path / "hf")
    assert (found["layers.0.mixer.A_log"], found["norm.w"]) == (torch.float16, torch.float32)
    for wrong in ({"dtype": {"*.B_log": "float16"}}, {"dtype": "bfloat16", "keep": ["norms.*"]}):
        with pytest.raises(CheckpointingException, match=r"(keep|dtype): the pattern '.*' matches no tensor"):
            export_to_huggingface(source, tmp_path / "hf", overwrite=True, **wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match=r"give a dtype \(--dtype\), too"):
        export_to_huggingface(source, tmp_path / "hf", overwrite=True, keep=["*norm*"])
    with pytest.raises(CheckpointingException, match=r"dtype='bflot16': did you mean bfloat16\?"):
        export_to_huggingface(source, tmp_path / "hf", overwrite=True, dtype="bflot16")
    with pytest.raises(CheckpointingException, match=r"expected a list of texts"):
        export_to_huggingface(source, tmp_path / "hf", overwrite=True, dtype="bf16", keep="*norm*")
    for odd in ({"*norm*": None}, {1: "bfloat16"}):  # the first cast nothing, without a word
        with pytest.raises(CheckpointingException, match=r"dtype=\{.*\}: give dtypes by patterns of names"):
            export_to_huggingface(source, tmp_path / "hf", overwrite=True, dtype=odd)  # type: ignore[arg-type]
    assert _dtypes(tmp_path / "hf") == found


def test_every_door_casts_alike(tmp_path: Path) -> None:
    """An export, a conversion, and weights one by one give the same tensors."""
    source = save(tmp_path / "c", _model(torch.bfloat16))
    export_to_huggingface(source, tmp_path / "hf", dtype="bfloat16")
    convert_checkpoint(source, tmp_path / "converted", "hf", dtype="bfloat16")
    expected = _dtypes(tmp_path / "hf")
    assert _dtypes(tmp_path / "converted") == expected
    with dc.open_checkpoint(source) as checkpoint:
        found = {name.removeprefix("model."): t.dtype for name, t in checkpoint.weights(dtype="bfloat16")}
    assert found == expected


def test_the_moments_of_an_optimizer_are_not_cast_with_the_weights(tmp_path: Path) -> None:
    """Of a checkpoint with bfloat16 weights and float32 moments a conversion casts neither down unasked."""
    state = {"model.w": torch.ones(4, dtype=torch.bfloat16), "optimizer.state.w.exp_avg": torch.rand(4)}
    source = save(tmp_path / "c", state)
    report = convert_checkpoint(source, tmp_path / "half", "safetensors", dtype="float16")
    written = {proof.key: proof.written_dtype for proof in report.proof}
    assert written == {"model.w": "float16", "optimizer.state.w.exp_avg": "float32"}


def test_the_config_has_the_dtype_of_each_part(tmp_path: Path) -> None:
    """A vision tower in float32 beside bfloat16 weights: config.json says both, whatever it said before."""
    assets = tmp_path / "assets"
    assets.mkdir()
    parts = {"text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float32"}}
    (assets / "config.json").write_text(json.dumps({"dtype": "float32", **parts}))
    tensors = {
        "model.language_model.w": torch.ones(64, dtype=torch.bfloat16),
        "model.vision_tower.w": torch.ones(32),
    }
    export_to_huggingface(save(tmp_path / "c", tensors), tmp_path / "hf", assets=assets)
    found = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert found == {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float32"}}
