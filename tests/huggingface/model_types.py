"""Small models of transformers, of many types: each trains a step on some ranks, and is written by every door."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.tensors.wrappers import dequantize, is_quantized
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.huggingface import changed_models
from tests.huggingface.samples import same

if TYPE_CHECKING:
    from collections.abc import Callable


class ModelType(NamedTuple):
    """A type of models.

    Attributes:
        kind: transformers' class.
        config: What its configuration has.
        mapping: The mapping to the Hub's names, where the class has others.
        wide: Ends of names of tensors that the model has in float32, beside bfloat16.
        quantize: What quantizes the weights; they are frozen, and all else is trained.
        adapter: Options of a LoRA adapter of PEFT, which alone is trained.
    """

    kind: str
    config: dict[str, Any]
    mapping: str | None = None
    wide: tuple[str, ...] = ()
    quantize: Callable[[Any], None] | None = None
    adapter: dict[str, Any] | None = None

    @property
    def as_values(self) -> bool:
        """Whether the folder has the values of quantized weights: no class of the Hub has names for the codes."""
        return self.quantize is changed_models.quantize_to_nf4 and not self.adapter

    @property
    def refused(self) -> str:
        """What doors say that write all of a checkpoint, of which a folder with an adapter has a part."""
        return r"leaves the base model out.*last_save_in_hf=True" if self.adapter else ""


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
    "llama, NF4": ModelType("LlamaForCausalLM", _SIZES, quantize=changed_models.quantize_to_nf4),
    "llama, fp8 with block scales": ModelType("LlamaForCausalLM", _SIZES, quantize=changed_models.quantize_to_fp8),
    "deepseek_v3, fp8 with block scales": ModelType(
        "DeepseekV3ForCausalLM",
        {**_SIZES, **_DEEPSEEK},
        "deepseek_v3",
        ("e_score_correction_bias",),
        quantize=changed_models.quantize_to_fp8,
    ),
    "llama, LoRA": ModelType(
        "LlamaForCausalLM",
        _SIZES,
        "peft",
        adapter={"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    ),
    "llama, LoRA in float32 of NF4": ModelType(
        "LlamaForCausalLM",
        _SIZES,
        "peft",
        quantize=changed_models.quantize_to_nf4,
        adapter={"target_modules": "all-linear", "in_float32": True},
    ),
}

#: What writes a folder in the training, and where below its folder.
DOORS = {
    "export": "export",
    "contiguous": "contiguous",
    "steps_in_hf": "steps_in_hf/step-1",
    "last_save_in_hf": "last_save_in_hf/step-1-hf",
}
#: Those that write a whole checkpoint, too.
WHOLE_DOORS = ("contiguous", "steps_in_hf")
#: What doors say of codes that no class of the Hub has names for.
CODES = "save their values, by dequantize=True"
#: A folder of the last step with another dtype: ``export_dtype``.
WIDENED = "widened/step-1-hf"
IDS = torch.arange(12).reshape(1, 12)


def make_model(name: str, *, is_base: bool = False) -> Any:
    """Return a model of a type, in bfloat16 but for what is wide; its weights are the same on every rank.

    A base is what a folder of the type is loaded into: without an adapter.
    """
    import transformers

    made = TYPES[name]
    kind = getattr(transformers, made.kind)
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**made.config), dtype=torch.bfloat16)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in key for part in made.wide):
            tensor.data = tensor.data.float()
            if key.endswith("bias") and tensor.dim() == 1 and not tensor.requires_grad:
                tensor.data.normal_()  # a router's: 0 before training
    if made.quantize and not (is_base and made.as_values):
        made.quantize(model)
    return changed_models.add_adapter(model, **made.adapter) if made.adapter and not is_base else model


def save_config(name: str, folder: Path) -> None:
    """Write the configuration of a model, or of its adapter."""
    model = make_model(name)
    (model.peft_config["default"] if TYPES[name].adapter else model.config).save_pretrained(folder)


def answer(model: Any) -> torch.Tensor:
    """Return a model's logits."""
    with torch.no_grad():
        return torch.as_tensor(model.eval()(**_inputs(model)).logits)


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}


@patch("transformers.integrations.finegrained_fp8.fp8_linear", changed_models.compute_linear)
def train(name: str, folder: str, assets: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[str]]:
    """Collective: train a step, under FSDP2 on several ranks, and write a checkpoint and a folder by each door.

    Returns:
        The trainer's tensors, whole, and its logits; the keys of those that differ in a model that begins from the
        folder.
    """
    made, model = TYPES[name], _shard(make_model(name))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(**_inputs(model)).logits.float().square().mean().backward()
    optimizer.step()
    describe = partial(to_sharded_state_dict, model, optimizer, dequantize=made.as_values)
    mapping, layout = made.mapping, "auto" if made.mapping else "contiguous"
    dc.save(describe(), f"{folder}/checkpoint")
    if made.as_values:
        codes = to_sharded_state_dict(model, optimizer)
        dc.save(codes, f"{folder}/codes")
        with pytest.raises(CheckpointingException, match=CODES):
            dc.save(codes, f"{folder}/never", SafetensorsSaveShardedStrategy(layout=layout, assets=assets))

    def manage(place: str, **own: Any) -> None:
        options = {"hf_mapping": mapping, "hf_assets_path": assets, **own}
        states = {"model": model, "optimizer": optimizer}
        with CheckpointManager(CheckpointConfig(folder=place, **options), states) as manager:
            manager.save(1, last_step=True)

    doors: dict[str, Callable[[str], Any]] = {
        "export": partial(export_to_huggingface, f"{folder}/checkpoint", assets=assets, mapping=mapping),
        "contiguous": lambda place: dc.save(
            describe(), place, SafetensorsSaveShardedStrategy(layout=layout, assets=assets, mapping=mapping)
        ),
        "steps_in_hf": partial(manage, steps_in_hf=True, strategy="safetensors"),
        "last_save_in_hf": partial(manage, last_save_in_hf=True),
        "widened": partial(manage, last_save_in_hf=True, export_dtype="float32"),
    }
    for door, write in doors.items():
        if made.refused and door in WHOLE_DOORS:
            with pytest.raises(CheckpointingException, match=made.refused):
                write(f"{folder}/{door}")
            assert not Path(folder, door).exists()
        else:
            write(f"{folder}/{door}")
    begins = {"initial_load_path": f"{folder}/export", "initial_load_in_hf": True, "hf_mapping": mapping}
    if made.as_values and isinstance(model, FSDPModule):
        with pytest.raises(CheckpointingException, match="load before the model is quantized"):
            _begin(make_model(name), **begins)
    tensors, begun = list_whole(model), _begin(make_model(name, is_base=made.as_values), **begins)
    return tensors, answer(model), [key for key, tensor in tensors.items() if not same(begun[key], tensor)]


def _begin(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Collective: return the tensors of a model with other values that a manager has begun from a folder.

    The base of an adapter keeps its values.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.requires_grad or not hasattr(model, "peft_config"):
            tensor.data.copy_(torch.rand(tensor.shape).to(tensor.dtype))
    with CheckpointManager(CheckpointConfig(load_only=True, **options), {"model": _shard(model)}) as manager:
        assert manager.load()
    return list_whole(model)


def _shard(model: Any) -> Any:
    """Shard a model on several ranks. FSDP2 groups trained parameters of one dtype: others stay on every rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        trained = [p for p in model.parameters() if p.requires_grad]
        wide = {p for p in trained if p.dtype != torch.bfloat16}
        fully_shard(model, ignored_params=wide if len(wide) < len(trained) else set())
    return model


def list_whole(model: Any) -> dict[str, torch.Tensor]:
    """Collective: return a model's tensors, whole; of quantized ones without scales beside them the values."""
    return {key: _gather(tensor.detach()).clone() for key, tensor in model.state_dict().items()}


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and tensor.dtype == torch.float8_e4m3fn:  # which gloo does not send
        return _gather(tensor.view(torch.uint8)).view(tensor.dtype)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return dequantize(whole) if is_quantized(whole) else whole
