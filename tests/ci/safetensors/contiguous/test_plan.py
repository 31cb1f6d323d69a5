from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.storage import CheckpointWriter
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.safetensors.contiguous import jobs

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardckpt.testing.ranks import RankPool


def test_sha256_of_files_that_several_ranks_write(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """integrity.json has them, too, and no rank reads all of them."""
    hashed = gloo_ranks.run(3, _save_with_sha256, str(tmp_path / "c"))
    weights = sorted(name for name in jobs.digest_weights(tmp_path / "c") if name.endswith(".safetensors"))
    assert sorted(name for names in hashed for name in names) == weights
    assert all(hashed)
    listed = json.loads((tmp_path / "c" / "integrity.json").read_text())["files"]
    assert jobs.digest_weights(tmp_path / "c").items() <= listed.items()


def _save_with_sha256(path: str) -> list[str]:
    """Save, and return the files with tensors of all ranks that this rank has read for their SHA-256."""
    found: list[str] = []
    hash_files = CheckpointWriter.hash_files

    def record(self: CheckpointWriter, names: Iterable[str]) -> None:
        found.extend(names := [*names])
        hash_files(self, names)

    strategy = SafetensorsSaveShardedStrategy(layout="contiguous", max_shard_size="300KB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "hash_files", record)
        dc.save(jobs._state(0.0), path, strategy, verify_integrity=True)
    return found
