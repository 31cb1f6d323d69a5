"""Trainings of small transformers models on several ranks, which save their steps with contiguous tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt_ep import expert_layouts, expert_sharded_state_dict
from shardckpt_safetensors import SafetensorsSaveShardedStrategy

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 520,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1200,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
IDS = torch.arange(12).reshape(1, 12)


def import_all() -> None:
    """Import what takes long, before any rank waits for another."""
    make_model("Llama")


def make_model(kind: str, **config: Any) -> Any:
    """Return a small model, the same on every rank."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(**SIZES, **config)
    return getattr(transformers, f"{kind}ForCausalLM")(made)


def train_step(model: Any) -> torch.optim.Optimizer:
    """Train one step on the same data on all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS).logits.square().mean().backward()
    optimizer.step()
    return optimizer


def logits(model: Any) -> torch.Tensor:
    """Return the model's answer."""
    with torch.no_grad():
        return torch.as_tensor(model.eval()(IDS).logits)


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Collective: return copies of the model's parameters, whole."""
    return {name: _gather(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_fsdp(
    path: str, assets: str, config: dict[str, Any], limit: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train a Llama under FSDP2, save a step with its optimizer, and return the trainer's parameters and logits."""
    model = make_model("Llama", **config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = train_step(model)
    strategy = SafetensorsSaveShardedStrategy(layout="contiguous", assets=assets, max_shard_size=limit)
    dc.save(to_sharded_state_dict(model, optimizer), path, strategy)
    return parameters(model), logits(model)


def save_experts(path: str, assets: str, trained: dict[str, torch.Tensor]) -> None:
    """Save a trained Qwen3-MoE: its experts spread over the ranks, the rest under FSDP2.

    The ranks are given the values: had each trained for itself, sums in another order would
    give each its own, and Adam's first step makes a rounding of a small gradient a large one.
    """
    model = make_model("Qwen3Moe", **MOE)
    model.load_state_dict(trained)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    local = set()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, torch.nn.Parameter(parameter.detach().chunk(world)[rank].clone()))
            local.add(getattr(experts, name))
        fully_shard(layer, ignored_params=local)
    fully_shard(model, ignored_params=local)
    layouts = expert_layouts(model, mesh, ["model.layers.*.mlp.experts"])
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    strategy = SafetensorsSaveShardedStrategy(layout="contiguous", assets=assets, mapping="qwen3_moe", prefix="model.")
    dc.save(expert_sharded_state_dict(state, layouts), path, strategy)
