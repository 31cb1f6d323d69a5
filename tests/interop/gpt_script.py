"""Small GPTModels of Megatron-Core 0.16.1: saved under TP 2 x PP 2 x EP 2, and run by one rank, on CPUs.

Its functions are called by ``tests.interop.megatron_script``, in a process that has Megatron.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from tests.huggingface.megatron_models import count_experts, make_config

TOKENS = 12
#: What a config of transformers has besides, so that both run alike; it is said to Megatron below.
RUNNING: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts_per_tok": 2, "norm_topk_prob": True},
    # Megatron's own attention takes values as wide as queries, and runs no layers that predict
    "deepseek_v3": {
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "v_head_dim": 6,
        "num_nextn_predict_layers": 0,
    },
}


def make_running_config(kind: str) -> dict[str, Any]:
    """Return the content of a config.json of a model that Megatron runs."""
    return {**make_config(kind), "rms_norm_eps": 1e-6, "rope_theta": 10000.0, **RUNNING.get(kind, {})}


def train(kind: str, stacked: str, path: str) -> None:
    """Save a model with weights by chance, of 4 ranks; all layers along one axis if ``stacked`` is ``"yes"``."""
    from megatron.core import dist_checkpointing as dc

    rank = torch.distributed.get_rank()
    with _parallel(2):
        model = _make_model(kind, 2)
        torch.manual_seed(rank)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    tensor.copy_(torch.randn_like(tensor) * 0.2 + float("norm" in name))
        if rank == 0:
            os.makedirs(path)  # noqa: PTH103 - a path is a text here
        torch.distributed.barrier()
        dc.save(_describe(model, stacked), path)


def score(kind: str, stacked: str, path: str, logits: str) -> None:
    """Load it into a model of this rank alone, and write the logits of some tokens."""
    from megatron.core import dist_checkpointing as dc

    with _parallel(1):
        model = _make_model(kind, 1).eval()
        state = dc.load(_describe(model, stacked), path)
        model.load_state_dict({name: state.get(name) for name in model.state_dict()})
        places = torch.arange(TOKENS).reshape(1, TOKENS)
        mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
        with torch.no_grad():
            torch.save(model(places, places, mask), logits)


def _describe(model: Any, stacked: str) -> Any:
    return model.sharded_state_dict(metadata={"non_homogeneous_layers": stacked != "yes"})


@contextlib.contextmanager
def _parallel(size: int) -> Any:
    """Tensor, pipeline and expert parallelism of one size, without an accelerator or Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import dot_product_attention, multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    vars(moe_utils)["te_general_gemm"] = None
    for name in ("TELinear", "TEColumnParallelLinear"):
        vars(multi_latent_attention)[name] = type(name, (), {})
    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    attention: Any = dot_product_attention.DotProductAttention
    if not hasattr(attention, "made"):
        attention.made = attention.__init__

        def make(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **options: Any) -> None:
            """Widths of keys and values are Transformer Engine's alone."""
            del k_channels, v_channels
            attention.made(self, *args, **options)

        attention.__init__ = make
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=size,
        pipeline_model_parallel_size=size,
        expert_model_parallel_size=size,
        expert_tensor_parallel_size=1,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _make_model(kind: str, size: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = make_running_config(kind)
    is_latent = "kv_lora_rank" in values
    config: Any = (MLATransformerConfig if is_latent else TransformerConfig)(**_list_options(kind, values, size))
    if is_latent:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
    return GPTModel(
        config,
        spec,
        vocab_size=values["vocab_size"],
        max_sequence_length=values["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=bool(values.get("tie_word_embeddings")),
    )


def _list_options(kind: str, values: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the arguments of a TransformerConfig."""
    found: dict[str, Any] = {
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "ffn_hidden_size": values["intermediate_size"],
        "num_attention_heads": values["num_attention_heads"],
        "num_query_groups": values["num_key_value_heads"],
        "kv_channels": values.get("head_dim"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": values["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": bool(values.get("mlp_bias")),
        "add_qkv_bias": kind.startswith("qwen2"),
        "qk_layernorm": kind.startswith("qwen3") or kind == "deepseek_v3",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": size,
        "pipeline_model_parallel_size": size,
        "pipeline_dtype": torch.float32,
    }
    off = ("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion")
    found |= dict.fromkeys((*off, "persist_layer_norm", "gradient_accumulation_fusion"), False)
    experts = count_experts(values)
    if experts:
        found |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": values.get("moe_intermediate_size", values["intermediate_size"]),
            "moe_router_topk": 2,
            "moe_router_pre_softmax": kind == "qwen2_moe",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": size,
            "expert_tensor_parallel_size": 1,
        }
    if kind == "qwen2_moe":
        found |= {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True}
    if kind == "deepseek_v3":
        found |= {name: values[name] for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")}
        found |= {
            "multi_latent_attention": True,
            "qk_head_dim": values["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": values["qk_rope_head_dim"],
            "num_query_groups": None,
            "kv_channels": values["v_head_dim"],
            "rope_type": "rope",
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": values["moe_intermediate_size"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": values["n_group"],
            "moe_router_group_topk": values["topk_group"],
            "moe_router_topk_scaling_factor": values["routed_scaling_factor"],
        }
    return found
