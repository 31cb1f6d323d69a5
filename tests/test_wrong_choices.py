"""Names of settings, formats and modes that are mistyped in the Python API: each error asks for the nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}


def _load(folder: Path, **options: Any) -> Any:
    dc.save(_state(), folder / "saved")
    return dc.load(_state(), folder / "saved", **options)


def _manage(folder: Path, **settings: Any) -> None:
    model = torch.nn.Linear(2, 2)
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with CheckpointManager(CheckpointConfig(folder=folder, **settings), states) as manager:
        manager.load()


def _export(folder: Path) -> None:
    dc.save(_state(), folder / "saved")
    export_to_huggingface(folder / "saved", folder / "hf", format="safetensor")  # type: ignore[arg-type]


@table(
    "call, asked",
    [
        (lambda at: dc.save(_state(), at, "safetensor"), "safetensors"),
        (lambda at: dc.save(_state(), at, ("torchdist", 1)), "torch_dist"),
        (lambda at: dc.save(_state(), at, SafetensorsSaveShardedStrategy(layout="contigous")), "contiguous"),  # type: ignore[arg-type]
        (lambda at: dc.save(_state(), at, SafetensorsSaveShardedStrategy(layout={"*": "box"})), "boxes"),  # type: ignore[dict-item]
        (lambda at: _load(at, strict="log_unexpectd"), "log_unexpected"),
        (lambda at: _load(at, on_unused="eror"), "error"),
        (lambda at: convert_checkpoint(at, at / "new", "safetensor"), "safetensors"),
        (lambda at: convert_checkpoint(at, at / "new", "dpc"), "dcp"),
        (lambda at: merge_checkpoints([at, at], at / "new", missing="eror"), "error"),
        (_export, "safetensors"),
        (lambda at: _manage(at, strategy="safetensor"), "safetensors"),
        (lambda at: _manage(at, exclude_from_loading="optimzer"), "optimizer"),
        (lambda at: _manage(at, keep_options="wieght_decay"), "weight_decay"),
        (lambda at: _manage(at, rename={"net": "modle"}), "model"),
        (lambda at: _manage(at, save_on_signals="SIGUSR"), "SIGUSR2"),
        (lambda at: _manage(at, retention=[{"policy": "KeepLates", "count": 2}]), "KeepLatest"),
        (lambda at: _manage(at, save_when=["SaveEvry"]), "SaveEvery"),
    ],
)
def test_a_mistyped_name_is_asked_for(tmp_path: Path, call: Callable[[Path], Any], asked: str) -> None:
    """By the one function that finds the nearest of the right ones."""
    with pytest.raises((CheckpointingException, ValueError), match=rf"did you mean {asked}\?"):
        call(tmp_path)
