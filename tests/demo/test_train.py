"""The training script that users copy, run by ranks that stay between tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.demo import train
from shardckpt.demo.model import ByteTransformer, MixtureOfExperts, feed_forward
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import build_copy, dict_list_map_outplace, nested_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.ranks import Ranks

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts the bytes read in /proc")


def _reports(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What a rank of train.py reports."""
    reports: list[dict[str, Any]] = []
    train.train(train.parse(["--dir", str(folder), *options]), lambda **fields: reports.append(fields))
    return reports


def _losses(reports: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {fields["step"]: fields["loss"] for fields in reports if "loss" in fields}


@pytest.mark.parametrize("options", [(), pytest.param(("--ep", "2"), marks=pytest.mark.proof)])
@pytest.mark.proof
def test_the_same_ranks_go_on_bit_for_bit(ranks: Ranks, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Two steps, a checkpoint and two more in a new model with other parameters are four steps in one go."""
    once = ranks.run(4, _reports, tmp_path / "once", "--steps=4", "--interval=9", *options)[0]
    ranks.run(4, _reports, tmp_path / "twice", "--steps=2", *options)
    resumed = ranks.run(4, _reports, tmp_path / "twice", "--steps=4", "--seed=1", *options)
    assert resumed[0][0]["loaded"] == 2
    assert _losses(resumed[0]) == {step: loss for step, loss in _losses(once).items() if step > 2}
    assert resumed[0][-1]["state"] == once[-1]["state"]
    assert all(reports == resumed[0] for reports in resumed)


@pytest.mark.proof
def test_experts_are_trained_alike_however_they_are_split(ranks: Ranks, tmp_path: Path) -> None:
    """From the same parameters, ep 2 x efsdp 2, ep 4 and one process without a group make the same steps."""
    alone = _losses(_reports(tmp_path / "1", "--steps=3", "--ep=1"))
    for ep in ("2", "4"):
        reports, *_ = ranks.run(4, _reports, tmp_path / ep, "--steps=3", f"--ep={ep}")
        assert _losses(reports) == pytest.approx(alone, rel=1e-5)


def _shards(ep: int, key: str) -> tuple[tuple[int, ...], list[int]]:
    """The global shape of a key, and the first row of this rank's shard and the one behind its last."""
    model = ByteTransformer(MixtureOfExperts if ep else feed_forward)
    train.shard(model, ep)
    (shard,) = (
        shard
        for shard in nested_values(dict_list_map_outplace(build_copy, to_sharded_state_dict(model)))
        if isinstance(shard, ShardedTensor) and shard.key == key
    )
    first = shard.global_offset[0]
    return shard.global_shape, [first, first + shard.local_shape[0]]


@pytest.mark.parametrize(
    ("ep", "key", "shape", "rows"),
    [
        (0, "embedding.weight", (257, 250), [[0, 65], [65, 130], [130, 195], [195, 257]]),
        (2, "blocks.0.network.experts.up", (7, 250, 100), [[0, 2], [4, 6], [2, 4], [6, 7]]),
        (4, "blocks.0.network.experts.up", (7, 250, 100), [[0, 2], [2, 4], [4, 6], [6, 7]]),
    ],
)
def test_shards_are_uneven(ranks: Ranks, ep: int, key: str, shape: tuple[int, ...], rows: list[list[int]]) -> None:
    """The demo shows tensors that 4 ranks do not divide, and experts split over ep first, by FSDP2 inside."""
    assert ranks.run(4, _shards, ep, key) == [(shape, part) for part in rows]


def _read_so_far() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _bytes_of_a_load(folder: Path) -> tuple[int, int]:
    """Bytes of this rank's parameters, and bytes that it reads to load them and their optimizer state."""
    model = ByteTransformer(feed_forward)
    if dist.is_initialized():
        train.shard(model, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(folder=str(folder / "checkpoints"), load_only=True)
    dist_checkpointing.get_default_load_sharded_strategy(folder / "checkpoints" / "step-2")  # imports outside the count
    before = _read_so_far()
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        assert manager.load()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.numel() * p.element_size() for p in local), _read_so_far() - before


@linux_only
@pytest.mark.ci
def test_ranks_read_little_more_than_they_need(ranks: Ranks, tmp_path: Path) -> None:
    """What each of 2 ranks reads is a little more than its own shards: they do not read the checkpoint twice."""
    ranks.run(4, _reports, tmp_path, "--steps=2")
    ranks.run(2, _bytes_of_a_load, tmp_path)  # imports
    sizes = ranks.run(2, _bytes_of_a_load, tmp_path)
    assert all(3 * own <= read for own, read in sizes)  # parameters, and two moments of each
    assert sum(read for _, read in sizes) < 1.5 * 3 * sum(own for own, _ in sizes)


@pytest.mark.proof  # starts four interpreters: `shardckpt demo` runs the same script, without torchrun
def test_the_command_lines_of_its_docstring_run(tmp_path: Path) -> None:
    """Torchrun trains with 2 ranks, and one process goes on from its checkpoint."""
    script = ["-m", "shardckpt.demo.train", "--dir", str(tmp_path), "--interval", "2", "--steps"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = [
        subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        ).stdout
        for command in ([*torchrun, *script, "2"], [*script, "4"])
    ]
    assert '{"saved": 2, ' in outputs[0]
    assert '{"loaded": 2, ' in outputs[1]
    assert '{"saved": 4, ' in outputs[1]
