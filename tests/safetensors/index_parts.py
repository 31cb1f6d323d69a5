"""What the tests of index parts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import verify_checkpoint
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.safetensors.parts import VALUES, InParts, make_state

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with an index in parts."""
    dc.save(make_state(rank=0, world=1), tmp_path / "c", InParts())
    return tmp_path / "c"


def check_content(path: Path) -> None:
    """All values load."""
    loaded = dc.load_plain_tensors(path)
    assert loaded.keys() == {f"m.{key}" for key in VALUES}
    assert all(torch.equal(loaded[f"m.{key}"], value) for key, value in VALUES.items())
    assert not [result for result in verify_checkpoint(path) if result.fault]
    found = read_checkpoint(str(path)).tensors
    assert {key: shape for key, (_, shape, _) in found.items()} == {f"m.{k}": [*v.shape] for k, v in VALUES.items()}


def list_parts(path: Path) -> list[str]:
    """List the parts of an index."""
    return sorted(file.name for file in path.glob("index_*.safetensors"))
