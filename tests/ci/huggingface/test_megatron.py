from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from tests.huggingface.megatron_models import CONFIGS, blank, make_config, make_megatron_state
from tests.huggingface.samples import read, same
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

#: What a model needs besides to run.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "mixtral": {"num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts_per_tok": 2},
}


def _make_model(kind: str) -> Any:
    torch.manual_seed(0)
    values = {**make_config(kind), **MORE.get(kind, {})}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(1, 12)).logits  # type: ignore[no-any-return]


@table("kind", CONFIGS)
def test_transformers_loads_what_megatron_has_trained(kind: str, tmp_path: Path) -> None:
    """TP 2 x PP 2 x EP 2 to from_pretrained, which misses nothing and gives the same logits; and back, bit for bit."""
    model = _make_model(kind)
    model.save_pretrained(tmp_path / "theirs")
    hub = read(tmp_path / "theirs")
    shards = make_megatron_state(hub, make_config(kind), "numbered")
    dc.save({"model": shards}, tmp_path / "c")
    export_to_huggingface(tmp_path / "c", tmp_path / "ours", mapping=kind, assets=tmp_path / "theirs", strict=True)
    found = read(tmp_path / "ours")
    assert found.keys() == hub.keys()
    assert [name for name in hub if not same(found[name], hub[name])] == []
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(_logits(loaded.eval()), _logits(model))
    filled = blank(shards)
    load_from_huggingface({"model": filled}, tmp_path / "theirs", mapping=kind)
    assert [a.key for a, b in zip(filled, shards, strict=True) if not same(a.data, b.data)] == []
