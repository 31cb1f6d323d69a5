"""What a config.json says of quantization and dtypes, against tensors as real folders name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.config import ModelConfig, adapt_config, describe_contradiction, describe_dtype
from shardckpt.huggingface.hub_tensor import HubTensor
from tests.tables import table

SOURCE = Path("config.json")
QUANTIZED = {"quantization_config": {"quant_method": "any"}}
FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def _tensors(shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[HubTensor]:
    return [HubTensor(name, dtype, shape) for name, (dtype, shape) in shapes.items()]


def _adapt(content: dict[str, Any], tensors: list[HubTensor]) -> dict[str, Any]:
    """Return the config of a folder with these tensors."""
    text = adapt_config(ModelConfig(SOURCE, content), tensors, add_dtype=False)
    return content if text is None else json.loads(text)


ORDINARY = {
    "CLIP, SigLIP": {"logit_scale": (F32, ()), "logit_bias": (F32, (1,))},
    "BEiT": {"vision.layers.0.layer_scale": (F32, (8,))},
    "Gemma3n": {"layers.0.altup.correct_output_scale": (BF16, (8,)), "layers.0.per_dim_scale": (BF16, (8,))},
    "others": {"emb.scales": (F32, (8,)), "conv.num_blocks": (torch.int64, ()), "rnn.mask_packed": (F32, (8,))},
}


@table("ordinary", ORDINARY)
def test_a_parameter_that_is_a_scale_is_not_quantized(ordinary: str) -> None:
    """Models have scales of their own: beside weights that are no codes, quantization_config is wrong, and goes."""
    tensors = _tensors({"w": (F32, (8, 8)), **ORDINARY[ordinary]})
    assert _adapt({"a": 1, **QUANTIZED}, tensors) == {"a": 1}
    assert "quantized (quantization_config)" in describe_contradiction(ModelConfig(SOURCE, QUANTIZED), tensors)


SCHEMES = {
    "fp8 with block scales": {"q.weight": (FP8, (8, 8)), "q.weight_scale_inv": (F32, (1, 1))},
    "compressed fp8": {
        "q.weight": (FP8, (8, 8)),
        "q.weight_scale": (BF16, (1,)),
        "q.input_scale": (BF16, ()),
    },
    "compressed int8": {"q.weight": (torch.int8, (8, 8)), "q.weight_scale": (BF16, (8, 1))},
    "compressed int4": {"q.weight_packed": (torch.int32, (8, 1)), "q.weight_scale": (BF16, (8, 1))},
    "nvfp4": {"q.weight_packed": (torch.uint8, (8, 4)), "q.weight_global_scale": (F32, (1,))},
    "8-bit KV cache": {"self_attn.k_scale": (BF16, (1,)), "self_attn.v_scale": (BF16, (1,))},
    "8-bit KV cache, one scale": {"self_attn.kv_scale": (BF16, (1,))},
    "8-bit KV cache of Quark": {"self_attn.k_proj.output_scale": (BF16, (1,))},
    "VPTQ": {"q_proj.indices": (torch.uint16, (1, 8, 8)), "q_proj.weight_scale": (BF16, (8,))},
    "GPTQ": {"q.qweight": (torch.int32, (1, 8)), "q.scales": (BF16, (1, 8)), "q.g_idx": (torch.int32, (8,))},
    "GPTQ packed in int64": {"q.qweight": (torch.int64, (1, 8)), "q.scales": (BF16, (1, 8))},
    "AWQ": {"q.qweight": (torch.int32, (8, 1)), "q.qzeros": (torch.int32, (1, 1)), "q.scales": (BF16, (1, 8))},
    "MXFP4": {"up_proj_blocks": (torch.uint8, (2, 8, 1, 16)), "up_proj_scales": (torch.uint8, (2, 8, 1))},
    "bitsandbytes int8": {"q.weight": (torch.int8, (8, 8)), "q.SCB": (F32, (8,))},
    "bitsandbytes nf4": {"q.weight": (torch.uint8, (32, 1)), "q.weight.absmax": (torch.uint8, (1,))},
    "bitsandbytes nf4 in bfloat16": {"q.weight": (BF16, (16, 1)), "q.weight.absmax": (torch.uint8, (1,))},
}


@table("scheme", SCHEMES)
def test_quantized_weights_keep_their_config(scheme: str) -> None:
    """Each format is known by its codes, or by names that it alone has: quantization_config stays, and is right."""
    tensors = _tensors({"norm.weight": (BF16, (8,)), **SCHEMES[scheme]})
    assert _adapt(QUANTIZED, tensors) == QUANTIZED
    assert not describe_contradiction(ModelConfig(SOURCE, QUANTIZED), tensors)


def test_a_null_hides_no_value_of_the_text_config() -> None:
    """A null is no value: the dtype, the vocabulary and the tie are those of text_config."""
    content = {"torch_dtype": None, "vocab_size": None, "tie_word_embeddings": None}
    text = {"torch_dtype": "bfloat16", "vocab_size": 9, "tie_word_embeddings": True}
    config = ModelConfig(SOURCE, {**content, "text_config": text})
    tensors = _tensors({"lm_head.weight": (F32, (8, 8))})
    assert "says bfloat16, and the weights are float32" in describe_dtype(config, tensors)
    assert "vocab_size 9, and 'lm_head.weight' has 8 rows" in describe_contradiction(config, tensors)
    assert config.is_tied


PARTS: dict[str, tuple[dict[str, torch.dtype], dict[str, str]]] = {
    "Qwen2-VL": ({"visual.w": F32, "model.w": BF16}, {"text": "bfloat16", "vision": "float32", "audio": "float16"}),
    "LLaVA": (
        {"vision_tower.w": F32, "language_model.w": BF16, "audio_tower.w": torch.float64},
        {"text": "bfloat16", "vision": "float32", "audio": "float64"},
    ),
    "unknown names": ({"vpm.w": F32, "llm.w": BF16}, {"text": "bfloat16", "vision": "float16", "audio": "float16"}),
    "one dtype": ({"vpm.w": BF16, "llm.w": BF16}, {"text": "bfloat16", "vision": "bfloat16", "audio": "bfloat16"}),
}


@table("model", PARTS)
def test_the_dtype_of_a_part_is_that_of_its_tensors(model: str) -> None:
    """A part whose tensors cannot be told from others keeps its dtype; the language model has the rest of them."""
    dtypes, expected = PARTS[model]
    sizes = {name: (4 if "vision" in name or "visual" in name or "vpm" in name else 8) for name in dtypes}
    tensors = [HubTensor(name, dtype, (sizes[name],)) for name, dtype in dtypes.items()]
    content = {f"{part}_config": {"dtype": "float16"} for part in ("text", "vision", "audio")}
    assert _adapt(content, tensors) == {f"{part}_config": {"dtype": dtype} for part, dtype in expected.items()}


def test_more_rows_than_the_vocabulary_are_said_to_be_more() -> None:
    """No tool loads too few rows; a class that pads the vocabulary loads more, and verify leaves them to the class."""
    config = ModelConfig(SOURCE, {"vocab_size": 8})
    for rows, reason, is_contradiction in ((7, "no tool loads", True), (9, "only a class that pads its vocab", False)):
        tensors = _tensors({"lm_head.weight": (F32, (rows, 4))})
        with pytest.raises(CheckpointingException, match=rf"has {rows} rows: {reason}"):
            adapt_config(config, tensors, add_dtype=False)
        assert bool(describe_contradiction(config, tensors)) == is_contradiction
