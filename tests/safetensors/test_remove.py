from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import verify_checkpoint
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.safetensors.checkpoints import BIAS, save

if TYPE_CHECKING:
    from pathlib import Path


def test_a_rewritten_file_opens_as_safetensors(tmp_path: Path) -> None:
    """After a removal the data file is smaller, has a new header, and stock safetensors reads what stays."""
    save(tmp_path / "c")
    file = tmp_path / "c" / "rank_0_0.safetensors"
    before = file.stat().st_size
    dc.remove_sharded_tensors(tmp_path / "c", "layers.0.w")
    assert file.stat().st_size < before
    with safe_open(file, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("layers.0.bias"), BIAS)
        assert not [name for name in opened.keys() if "weight" in name]  # noqa: SIM118 - not a dict
    assert not [result.fault for result in verify_checkpoint(tmp_path / "c") if result.fault]
    assert dc.load({"o": ShardedObject("rng", None, (1,), (0,))}, tmp_path / "c")["o"]["seed"] == 3


def test_files_without_other_keys_go(tmp_path: Path) -> None:
    """A file of which all keys are removed is deleted, and empty tensors beside large ones stay what they were."""
    large = torch.arange(1 << 19, dtype=torch.float32)
    state = {
        "e": ShardedTensor.from_rank_offsets("keep.empty", torch.empty(0, 3)),
        "l": ShardedTensor.from_rank_offsets("keep.large", large),
        "g": ShardedTensor.from_rank_offsets("gone.large", large + 1),
        "f": ShardedTensor.from_rank_offsets("keep.none", torch.empty(2, 0)),
    }
    dc.save(state, tmp_path / "c", SafetensorsSaveShardedStrategy(thread_count=2))
    dc.remove_sharded_tensors(tmp_path / "c", "gone")
    loaded = dc.load_plain_tensors(tmp_path / "c")
    assert {key: tuple(value.shape) for key, value in loaded.items()} == {
        "keep.empty": (0, 3),
        "keep.large": (1 << 19,),
        "keep.none": (2, 0),
    }
    assert torch.equal(loaded["keep.large"], large)
    dc.remove_sharded_tensors(tmp_path / "c", "keep")
    assert not list((tmp_path / "c").glob("rank_*"))
    assert not [result.fault for result in verify_checkpoint(tmp_path / "c") if result.fault]
