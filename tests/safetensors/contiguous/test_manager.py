"""A manager whose steps are Hugging Face folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.safetensors.contiguous import jobs
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@table("mode", ["disabled", "async"])
def test_every_step_is_a_folder_of_the_hub(tmp_path: Path, mode: str) -> None:
    """Steps have the model's names and assets, and load; the last step is not exported to another folder."""
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text('{"model_type": "llama"}')
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(
        folder=tmp_path / "steps",
        interval=1,
        strategy="safetensors",
        steps_in_hf=True,
        last_save_in_hf=True,
        hf_assets_path=assets,
        async_mode=mode,
        save_rng=False,
    )
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        for step in (1, 2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            manager.save(step, last_step=step == 2)
        manager.wait()
    for step in (1, 2):
        folder = tmp_path / "steps" / f"step-{step}"
        assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}
        assert jobs.read_like_vllm(folder).keys() == {"weight", "bias"}
    assert torch.equal(jobs.read_like_vllm(tmp_path / "steps" / "step-2")["weight"], model.weight)
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step-1", "step-2"]
    other = torch.nn.Linear(64, 64)
    with CheckpointManager(config, {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}) as manager:
        assert manager.load(step=1)


def test_other_strategies_say_what_to_do(tmp_path: Path) -> None:
    """steps_in_hf with a strategy that stores no such folders is an error that names those that do."""
    config = CheckpointConfig(folder=tmp_path, strategy="torch_dist", steps_in_hf=True)
    with pytest.raises(CheckpointingException, match="choose strategy='safetensors'"):
        CheckpointManager(config, {"model": torch.nn.Linear(2, 2)})
