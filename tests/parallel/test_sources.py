"""What four ranks read of a checkpoint or a folder, counted by strace, whichever call reads it: mmap counts too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import load_from_huggingface, save_state_dict
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _load_tied(folder: str) -> tuple[float, float]:
    shared, other = torch.zeros(64, 64), torch.zeros(8)
    rank = dist.get_rank()
    # the head, which the folder lacks, first: it would be another rank's to read
    shards = {"head": shared, "embed": shared, "norm": other}
    wanted = {key: ShardedTensor.from_rank_offsets(key, data, replica_id=rank) for key, data in shards.items()}
    loaded = load_from_huggingface(wanted, folder, fully_parallel=True)
    return loaded["head"].sum().item(), loaded["norm"].sum().item()


def test_tied_tensors_are_read_by_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A head that the folder has only as the embedding keeps the embedding's values when one rank reads for all."""
    tmp_path.joinpath("hf").mkdir()
    save_state_dict({"embed": torch.ones(64, 64), "norm": torch.ones(8)}, tmp_path / "hf" / "model.safetensors")
    assert ranks.run(4, _load_tied, str(tmp_path / "hf")) == [(4096.0, 8.0)] * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_objects_of_plain_dcp_are_built(tmp_path: Path) -> None:
    """A dict that plain DCP stores value by value is loaded as one object, as it is without fully_parallel."""
    dcp.save({"w": torch.ones(3), "args": {"lr": 0.1, "betas": {"a": 1}}}, checkpoint_id=tmp_path / "c", no_dist=True)
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(3)),
        "args": ShardedObject("args", None, (1,), (0,)),
    }
    loaded = dc.load(wanted, tmp_path / "c", fully_parallel=True)
    assert loaded["args"] == {"lr": 0.1, "betas": {"a": 1}}
    assert loaded["w"].tolist() == [1.0, 1.0, 1.0]


def _load_differently(folder: str) -> str:
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=dist.get_rank())}
    try:
        dc.load(wanted, folder, fully_parallel=dist.get_rank() == 1)
    except CheckpointingException as exc:
        return str(exc)
    return ""


def test_ranks_that_disagree_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """A fully_parallel that differs between ranks is the same error on all, which names it, and not a wait."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, tmp_path / "c")
    first, second = ranks.run(2, _load_differently, str(tmp_path / "c"))
    assert first == second
    assert "ranks disagree on fully_parallel: False on rank 0, True on rank 1" in first
