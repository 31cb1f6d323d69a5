"""PEFT itself, with LoRA in its variants: its folders load here, and ours there, bit for bit, with equal logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.maintenance import verify_checkpoint
from shardckpt.maintenance.verify import INTACT, get_exit_code
from tests.ci.huggingface.test_models import _model
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

# PEFT asks transformers by an older name, and says what the options below mean
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape:UserWarning"),  # of a bias, which is no matrix
]

TOKENS = torch.arange(8)[None]


def _base() -> Any:
    torch.manual_seed(0)
    return _model("Llama").eval()


def _adapted(options: dict[str, Any]) -> Any:
    return peft.get_peft_model(_base(), peft.LoraConfig(r=2, lora_alpha=4, **options)).eval()


def _train(model: Any) -> None:
    """Give all that the adapter trains other values than it began with."""
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(torch.rand_like(tensor) / 10)


@table(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 4}},
        {"target_modules": r".*\.q_proj", "lora_bias": True},
        {"target_modules": [], "target_parameters": ["mlp.gate_proj.weight"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]},
    ],
)
def test_an_adapter_goes_to_peft_and_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """An export of a trained model is what PEFT loads, and what PEFT writes is loaded; verify finds both intact."""
    caplog.clear()
    model = _adapted(options)
    _train(model)
    logits = model(TOKENS).logits
    model.save_pretrained(tmp_path / "theirs")
    dc.save(to_sharded_state_dict(model), tmp_path / "c")
    export_to_huggingface(tmp_path / "c", tmp_path / "ours", mapping="peft", assets=tmp_path / "theirs")
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    # PEFT adds the base's embedding, which the base has, too
    assert {name for name in theirs if "base_layer" not in name} == ours.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    loaded = peft.PeftModel.from_pretrained(_base(), tmp_path / "ours").eval()
    assert loaded(TOKENS).logits.equal(logits)
    fresh = _adapted(options)
    load_from_huggingface(to_sharded_state_dict(fresh), tmp_path / "theirs")
    assert fresh(TOKENS).logits.equal(logits)
    assert not [record for record in caplog.records if "nexpected" in record.message or "unused" in record.message]
    assert [get_exit_code(verify_checkpoint(tmp_path / name)) for name in ("theirs", "ours")] == [INTACT, INTACT]


def test_what_the_model_has_no_place_for_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Factors of modules that the model does not adapt are unused tensors, by name."""
    _adapted({"target_modules": ["q_proj", "v_proj"]}).save_pretrained(tmp_path / "a")
    load_from_huggingface(to_sharded_state_dict(_adapted({"target_modules": ["q_proj"]})), tmp_path / "a")
    (text,) = [record.getMessage() for record in caplog.records if "unused" in record.getMessage()]
    assert "unused tensors of the adapter, for which the model has no place: base_model" in text
    assert "v_proj.lora_A.weight" in text
