from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, Trainer

from shardckpt.integrations.transformers import ShardedCheckpointCallback
from tests.huggingface import model_types
from tests.integrations import small
from tests.integrations.accelerated import accelerated
from tests.integrations.transformers import (
    At,
    Crash,
    config_of,
    crash,
    make_arguments,
    resume,
    trainer_of,
    without_ranks,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

__all__ = ["without_ranks"]  # fixtures


def _train(folder: str, crashed: int | None) -> dict[str, torch.Tensor]:
    with accelerated():
        more = [] if crashed is None else [At(crashed, crash)]
        trainer = trainer_of(folder, config_of(folder), *more)
        try:
            return resume(trainer)
        except Crash:
            return {}


def test_under_ddp_all_ranks_resume(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks resume to the weights of two that were not interrupted."""
    whole = ranks.run(2, _train, str(tmp_path / "whole"), None)
    ranks.run(2, _train, str(tmp_path / "parts"), 10)
    resumed = ranks.run(2, _train, str(tmp_path / "parts"), None)
    assert small.is_equal(resumed[0], whole[0])
    assert small.is_equal(resumed[1], whole[1])


def test_steps_of_a_trainer_are_folders_of_the_hub(tmp_path: Path) -> None:
    """`steps_in_hf` and `last_save_in_hf` of the callback: from_pretrained finds each key, and the trainer's logits."""
    model = model_types.make_model("llama")
    model.config.save_pretrained(tmp_path / "assets")
    row = {"input_ids": model_types.IDS[0], "labels": model_types.IDS[0]}
    callbacks = []
    for options in ({"steps_in_hf": True, "strategy": "safetensors"}, {"last_save_in_hf": True}):
        config = config_of(tmp_path / "-".join(options), hf_assets_path=tmp_path / "assets", **options)
        callbacks.append(ShardedCheckpointCallback(config))
    Trainer(model, make_arguments(tmp_path, max_steps=3), train_dataset=[row] * 8, callbacks=callbacks).train()
    logits = model_types.answer(model)
    for folder in ("steps_in_hf-strategy/ours/step-3", "last_save_in_hf/ours/step-3-hf"):
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), (folder, info)
        assert torch.equal(model_types.answer(loaded), logits), folder
