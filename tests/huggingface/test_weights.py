from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, KeyMismatchError
from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import TorchDistSaveShardedStrategy
from tests.damage import flip
from tests.resources import watch_reads
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
RANKS = 256


def test_the_files_of_256_ranks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights from 256 files, a row of each, cost at most 1.1 times their bytes; the optimizer's none."""
    # rows of 64 KiB: of each, 4 KiB of the zip archive around it are read, too
    weights = {f"layers.{n}.weight": torch.randn(RANKS, 16 << 10) for n in range(2)}
    moments = {f"optimizer.state.exp_avg.{key}": values[:, : 4 << 10].clone() for key, values in weights.items()}
    state = {
        key: [ShardedTensor.from_rank_offsets(key, values[n : n + 1], (0, n, RANKS)) for n in range(RANKS)]
        for key, values in {**weights, **moments}.items()
    }
    dc.save(state, tmp_path / "c", TorchDistSaveShardedStrategy(thread_count=RANKS))
    assert len(list((tmp_path / "c").glob("*.distcp"))) == RANKS
    reads = watch_reads(monkeypatch)
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        for name, values in checkpoint.weights(memory=8 * MIB):
            assert torch.equal(values, weights.pop(name))
    assert not weights
    assert 32 * MIB <= sum(read.nbytes for read in reads) <= 1.1 * 32 * MIB


@table("strategy", ["torch_dist", "safetensors", "ep"])
def test_weights_of_a_training_checkpoint(tmp_path: Path, strategy: str) -> None:
    """Of a model saved with its optimizer come the weights alone, whole, under their own names, cast if asked."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "c", strategy)
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        found = dict(checkpoint.weights())
        cast = dict(checkpoint.weights(dtype="bfloat16", leave_out=["0.bias"], memory=1))
        everything = dict(checkpoint.weights(prefix="", optimizer=True))
    state = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert cast.keys() == state.keys() - {"0.bias"}
    assert torch.equal(cast["0.weight"], state["0.weight"].bfloat16())
    assert cast["1.num_batches_tracked"].dtype == torch.int64
    assert any(key.startswith("optimizer.") for key in everything)
    assert everything.keys() >= {f"model.{key}" for key in state}


def test_names_and_shapes_are_mapped(tmp_path: Path) -> None:
    """Under a model's mapping, experts in one tensor come one by one, as the Hub has them."""
    experts = torch.randn(4, 2 * 6, 8)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    dc.save(
        {key: [ShardedTensor.from_rank_offsets(key, e, (0, n, 2)) for n, e in enumerate(experts.chunk(2))]}, tmp_path
    )
    with dc.open_checkpoint(tmp_path) as checkpoint:
        found = dict(checkpoint.weights("qwen3_moe"))
    assert len(found) == 8
    assert torch.equal(found["model.layers.0.mlp.experts.3.up_proj.weight"], experts[3, 6:])


def test_errors_of_weights(tmp_path: Path) -> None:
    """A prefix of no weight is an error before the first tensor; a flipped bit is one that names the key."""
    values = torch.arange(MIB, dtype=torch.float32)
    dc.save({key: ShardedTensor.from_rank_offsets(key, values + n) for n, key in enumerate("ab")}, tmp_path / "c")
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        with pytest.raises(KeyMismatchError, match=r"no weight has a key that begins with 'model\.' \(keys: a, b\)"):
            checkpoint.weights(prefix="model.")
        with pytest.raises(CheckpointingException, match="dtype='int8'"):
            checkpoint.weights(dtype="int8")
    flip(next((tmp_path / "c").glob("*.distcp")), (values + 1)[-4:].numpy().tobytes())
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        weights: Iterator[tuple[str, torch.Tensor]] = checkpoint.weights(memory=4 * MIB)
        assert next(weights)[0] == "a"
        with pytest.raises(CorruptCheckpointError, match="b: bytes"):
            next(weights)
