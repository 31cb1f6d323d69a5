from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import convert_checkpoint, diff_checkpoints
from tests.huggingface.megatron_models import CONFIGS
from tests.interop import gpt_script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.conftest import Releases

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [*((kind, "no") for kind in CONFIGS), ("llama", "yes"), ("mixtral", "yes"), ("qwen2_moe", "yes")],
)
def test_transformers_and_megatron_give_the_same_logits(
    kind: str, stacked: str, megatron: Releases, tmp_path: Path
) -> None:
    """What GPTModel saves under TP 2 x PP 2 x EP 2 gives, exported, the logits that Megatron computes from it."""
    script, saved, logits = gpt_script.__file__, str(tmp_path / "c"), str(tmp_path / "logits.pt")
    megatron("0.16.1").run(4, "call", script, "train", kind, stacked, saved)
    megatron("0.16.1").run(1, "call", script, "score", kind, stacked, saved, logits)
    values = gpt_script.make_running_config(kind)
    transformers.AutoConfig.for_model(values.pop("model_type"), **values).save_pretrained(tmp_path / "assets")
    args = {"mapping": "megatron", "strict": True}
    export_to_huggingface(saved, tmp_path / "hf", assets=tmp_path / "assets", **args)  # type: ignore[arg-type]
    auto = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(tmp_path / "hf", output_loading_info=True, attn_implementation="eager")
    assert not any(info.values())
    with torch.no_grad():
        found = model.eval()(torch.arange(gpt_script.TOKENS).reshape(1, -1)).logits
    torch.testing.assert_close(found, torch.load(logits), rtol=1e-4, atol=1e-5)
    convert_checkpoint(tmp_path / "hf", tmp_path / "back", "torch_dist", **args)  # type: ignore[arg-type]
    convert_checkpoint(
        tmp_path / "back",
        tmp_path / "again",
        "hf",
        assets=tmp_path / "assets",
        **args,  # type: ignore[arg-type]
    )
    assert diff_checkpoints(tmp_path / "hf", tmp_path / "again").are_same
