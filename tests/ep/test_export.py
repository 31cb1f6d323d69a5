"""Exports of a mixture of experts: the bytes of the Hugging Face folder do not tell how the experts lay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.ep.export import HUB_NAMES, exported, make_experts
from tests.huggingface.samples import read

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["exported"]  # fixtures


def test_the_export_has_a_matrix_for_every_expert(exported: Path) -> None:
    """The folder's tensors are each expert's own, by Qwen3-MoE's names, and those beside them."""
    found = read(exported)
    for name, value in make_experts().items():
        place, _, ours = name.rpartition(".")
        for expert in range(5):
            hub = f"model.{place.replace('moe', 'mlp')}.{expert}.{HUB_NAMES[ours]}.weight"
            assert torch.equal(found.pop(hub), value[expert])
    assert found.keys() == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.input_layernorm.weight",
    }
    assert torch.equal(found["model.layers.0.mlp.gate.weight"], torch.arange(15.0).reshape(5, 3))
