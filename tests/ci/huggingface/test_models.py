from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.huggingface import (
    export_to_huggingface,
    huggingface_index,
    load_from_huggingface,
    save_state_dict,
)
from tests.huggingface.changed_models import quantize
from tests.huggingface.samples import read, same
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


#: Class, configuration beside the sizes, mapping, tensors that are left out, and bytes of a file.
MODELS: dict[str, tuple[str, dict[str, Any], str | None, list[str], str]] = {
    "llama": ("Llama", {}, None, [], "20KB"),
    "tied": ("Llama", {"tie_word_embeddings": True}, None, ["lm_head.weight"], "5GB"),
    "qwen3_moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
        "qwen3_moe",
        [],
        "20KB",
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, "mixtral", [], "5GB"),
}


def _model(kind: str, **config: Any) -> Any:
    """A small model of transformers' own, its weights by chance."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**{**SIZES, **config})
    return getattr(transformers, f"{kind}ForCausalLM")(made).eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(1, 12)).logits  # type: ignore[no-any-return]


@table("name", MODELS)
def test_transformers_loads_an_export_and_we_load_what_it_saves(name: str, tmp_path: Path) -> None:
    """from_pretrained of the export misses nothing and gives equal logits; the files are those of save_pretrained.

    And the other way: a fresh model filled from the folder that transformers saves is the same model.
    """
    kind, config, mapping, leave_out, limit = MODELS[name]
    model = _model(kind, **config)
    dc.save(to_sharded_state_dict(model), tmp_path / "c")
    model.save_pretrained(tmp_path / "theirs")
    export_to_huggingface(
        tmp_path / "c",
        tmp_path / "ours",
        mapping=mapping,
        max_shard_size=limit,
        leave_out=leave_out,
        assets=tmp_path / "theirs",
    )
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(_logits(loaded), _logits(model))
    assert huggingface_index(tmp_path / "ours") == huggingface_index(tmp_path / "theirs")
    theirs = read(tmp_path / "theirs")
    assert all(same(tensor, theirs[key]) for key, tensor in read(tmp_path / "ours").items())
    fresh = _model(kind, **config)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    load_from_huggingface(to_sharded_state_dict(fresh), tmp_path / "theirs", mapping=mapping)
    assert torch.equal(_logits(fresh), _logits(model))


def test_a_training_checkpoint_becomes_a_model_in_half_precision(tmp_path: Path) -> None:
    """Of a model saved with its optimizer the model is exported, cast, as transformers casts it."""
    model = _model("Llama")
    optimizer = torch.optim.AdamW(model.parameters())
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "c")
    model.save_pretrained(tmp_path / "theirs")
    export_to_huggingface(tmp_path / "c", tmp_path / "ours", dtype="bfloat16", assets=tmp_path / "theirs")
    loaded = type(model).from_pretrained(tmp_path / "ours")  # its config says the dtype, that of the assets another
    assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}
    expected = type(model).from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    assert torch.equal(_logits(loaded), _logits(expected))


def test_a_bin_export_loads_too(tmp_path: Path) -> None:
    """pytorch_model.bin, in several files with their index, is read by transformers."""
    model = _model("Llama")
    dc.save(to_sharded_state_dict(model), tmp_path / "c")
    model.config.save_pretrained(tmp_path / "config")
    export_to_huggingface(
        tmp_path / "c", tmp_path / "ours", format="bin", max_shard_size="20KB", assets=tmp_path / "config"
    )
    loaded = type(model).from_pretrained(tmp_path / "ours", use_safetensors=False)
    assert torch.equal(_logits(loaded), _logits(model))


def test_scaled_weights_are_those_that_transformers_makes(tmp_path: Path) -> None:
    """A folder of fp8 weights with block scales: our values are those of transformers' own dequantization."""
    model = _model("Llama")
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "dequantize": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    state = {}
    for name, weight in model.state_dict().items():
        state[name] = weight
        if "proj" in name:
            state[name], state[f"{name}_scale_inv"] = quantize(weight)
    save_state_dict(state, tmp_path / "model.safetensors")
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    mine = _model("Llama")
    load_from_huggingface(to_sharded_state_dict(mine), tmp_path)
    assert not torch.equal(_logits(mine), _logits(model))
    assert all(torch.equal(t, mine.state_dict()[name]) for name, t in theirs.state_dict().items())
