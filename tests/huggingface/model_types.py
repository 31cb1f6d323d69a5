"""Small models of transformers, of many types: each trains a step on some ranks, and is written by every door."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.huggingface import export_to_huggingface
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt_safetensors import SafetensorsSaveShardedStrategy


class ModelType(NamedTuple):
    """A type of models.

    Attributes:
        kind: transformers' class.
        config: What its configuration has.
        mapping: The mapping to the Hub's names, where the class has others.
        wide: Ends of names of tensors that the model has in float32, beside bfloat16.
    """

    kind: str
    config: dict[str, Any]
    mapping: str | None = None
    wide: tuple[str, ...] = ()


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
_MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR = {
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "vocab_size": 96,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}
_TEXT = {**_SIZES, "model_type": "llama"}
_T5 = {
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "vocab_size": 96,
    "decoder_start_token_id": 0,
}

TYPES = {
    "llama": ModelType("LlamaForCausalLM", _SIZES),
    "llama, tied": ModelType("LlamaForCausalLM", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ModelType("Qwen2ForCausalLM", _SIZES),
    "qwen3": ModelType("Qwen3ForCausalLM", {**_SIZES, "head_dim": 8}),
    "mistral": ModelType("MistralForCausalLM", _SIZES),
    "gemma3, tied": ModelType("Gemma3ForCausalLM", {**_SIZES, "head_dim": 8}),
    "gpt2, tied": ModelType("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "mixtral": ModelType("MixtralForCausalLM", {**_SIZES, "num_local_experts": 4}, "mixtral"),
    "qwen3_moe": ModelType("Qwen3MoeForCausalLM", {**_SIZES, **_MOE}, "qwen3_moe"),
    "deepseek_v3, router bias": ModelType(
        "DeepseekV3ForCausalLM", {**_SIZES, **_DEEPSEEK}, "deepseek_v3", ("e_score_correction_bias",)
    ),
    "gpt_oss, packed experts": ModelType(
        "GptOssForCausalLM", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    ),
    "qwen3_next, A_log": ModelType("Qwen3NextForCausalLM", {**_SIZES, **_MOE, **_LINEAR}, wide=("A_log",)),
    "mamba, A_log": ModelType("MambaForCausalLM", _MAMBA, wide=("A_log",)),
    "mamba2, A_log": ModelType(
        "Mamba2ForCausalLM", {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1}, wide=("A_log",)
    ),
    "t5, encoder and decoder": ModelType("T5ForConditionalGeneration", _T5),
    "bart, encoder and decoder": ModelType("BartForConditionalGeneration", _BART),
    "bert": ModelType(
        "BertForMaskedLM", {k: v for k, v in _SIZES.items() if k not in ("vocab_size", "num_key_value_heads")}
    ),
    "llava, a vision tower in float32": ModelType(
        "LlavaForConditionalGeneration",
        {"vision_config": _VISION, "text_config": _TEXT, "image_token_index": 95},
        wide=("vision_tower",),
    ),
}

#: What writes a folder in the training, and where below its folder.
DOORS = {
    "export": "export",
    "contiguous": "contiguous",
    "steps_in_hf": "steps_in_hf/step-1",
    "last_save_in_hf": "last_save_in_hf/step-1-hf",
}
#: A folder of the last step with another dtype: ``export_dtype``.
WIDENED = "widened/step-1-hf"
IDS = torch.arange(12).reshape(1, 12)


def make_model(name: str) -> Any:
    """Return a model of a type, in bfloat16 but for what is wide; its weights are the same on every rank."""
    import transformers

    kind = getattr(transformers, TYPES[name].kind)
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**TYPES[name].config), dtype=torch.bfloat16)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in key for part in TYPES[name].wide):
            tensor.data = tensor.data.float()
            if key.endswith("bias") and tensor.dim() == 1 and not tensor.requires_grad:
                tensor.data.normal_()  # a router's: 0 before training
    return model


def answer(model: Any) -> torch.Tensor:
    """Return a model's logits."""
    with torch.no_grad():
        return torch.as_tensor(model.eval()(**_inputs(model)).logits)


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}


def train(name: str, folder: str, assets: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Collective: train a step, under FSDP2 on several ranks, and write a checkpoint and a folder by each door.

    Returns:
        The trainer's tensors, whole, and its logits; the tensors of a model that begins from the folder.
    """
    model = _shard(make_model(name))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(**_inputs(model)).logits.float().square().mean().backward()
    optimizer.step()
    mapping = TYPES[name].mapping
    dc.save(to_sharded_state_dict(model, optimizer), f"{folder}/checkpoint")
    export_to_huggingface(f"{folder}/checkpoint", f"{folder}/export", assets=assets, mapping=mapping)
    strategy = SafetensorsSaveShardedStrategy(
        layout="auto" if mapping else "contiguous", assets=assets, mapping=mapping
    )
    dc.save(to_sharded_state_dict(model, optimizer), f"{folder}/contiguous", strategy)
    options: dict[str, Any] = {"hf_mapping": mapping, "hf_assets_path": assets}
    states = {"model": model, "optimizer": optimizer}
    for door, own in {
        "steps_in_hf": {"steps_in_hf": True, "strategy": "safetensors"},
        "last_save_in_hf": {"last_save_in_hf": True},
        "widened": {"last_save_in_hf": True, "export_dtype": "float32"},
    }.items():
        with CheckpointManager(CheckpointConfig(folder=f"{folder}/{door}", **options, **own), states) as manager:
            manager.save(1, last_step=True)
    begun = _begin(name, initial_load_path=f"{folder}/export", initial_load_in_hf=True, hf_mapping=mapping)
    return _whole(model), answer(model), begun


def _begin(name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Collective: return the tensors of a model with other values that a manager has begun from a folder."""
    model = make_model(name)
    for tensor in model.state_dict().values():
        tensor.zero_()
    with CheckpointManager(CheckpointConfig(load_only=True, **options), {"model": _shard(model)}) as manager:
        assert manager.load()
    return _whole(model)


def _shard(model: Any) -> Any:
    """Shard a model on several ranks. FSDP2 groups parameters of one dtype: those in float32 stay on every rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model, ignored_params={p for p in model.parameters() if p.dtype != torch.bfloat16})
    return model


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {key: _gather(tensor.detach()).clone() for key, tensor in model.state_dict().items()}


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
