from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import convert_checkpoint
from shardckpt.mapping import ShardedTensor
from tests.resources import watch_reads
from tests.safetensors.checkpoints import ROWS, save
from tests.safetensors.conformance.draft import Saved, Tensor, make

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    return save(tmp_path / "c")


def test_objects_of_other_writers_are_kept(tmp_path: Path) -> None:
    """Objects whose names no ShardedObject has, as another program may write them, come along in a conversion."""
    objects = [Saved("rng", "json", b'{"seed":3}'), Saved("a/b", "raw", b"x"), Saved("o/shard_0_1", "json", b"1")]
    (tmp_path / "old").mkdir()
    for name, data in make([Tensor("w", (2,), "F32")], objects).items():
        (tmp_path / "old" / name).write_bytes(data)
    # one is a ShardedObject; the others are for readers of other libraries, and not counted, as inspect does
    assert convert_checkpoint(tmp_path / "old", tmp_path / "new", "torch_dist").objects == 1
    wanted = {"rng": None, "a/b": None}
    dcp.load(wanted, checkpoint_id=tmp_path / "new", no_dist=True)
    assert wanted == {"rng": {"seed": 3}, "a/b": b"x"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_neighbours_are_one_read(path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Pieces that follow each other in a file are read by one call, with a cast, too."""
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    reads = watch_reads(monkeypatch)
    wanted = ShardedTensor("layers.0.weight", None, dtype, (10, 2), (12, 4), (1, 1), None)
    loaded = dc.load({"w": wanted}, path, validate_access_integrity=False)["w"]
    assert torch.equal(loaded, ROWS[1:11, 1:3].to(dtype))
    assert [read.name for read in reads].count("rank_0_0.safetensors") == 1
