"""What the tests of replaced share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt.huggingface import dcp_to_torch_state_dict
from shardckpt.maintenance.verify import verify_checkpoint
from tests.faults import samples
from tests.faults.replacing import (
    NEW,
    OLD,
    Scene,
    plain_dcp,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["1", "0"], ids=["verified", "unverified"])
def verify(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both settings of SHARDCKPT_VERIFY_READS."""
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", request.param)
    return str(request.param)


def plain(path: Path) -> int | list[str]:
    """Which save all tensors and the common state of a checkpoint are of, read in one go."""
    tensors = dcp_to_torch_state_dict(path)
    values = {key: tensors.get(key) for key in ("split", "big", "uneven", "half", "iteration")}
    for version in (OLD, NEW):
        expected = samples.state_dict(version)
        expected["split"] = expected["split"].data
        if all(
            torch.equal(value, getattr(expected[key], "data", expected[key]))
            if isinstance(value, torch.Tensor)
            else value == expected[key]
            for key, value in values.items()
        ):
            return version
    return sorted(values)


def verified(path: Path) -> int | list[str]:
    """Whether verify finds a fault."""
    return NEW if all(not result.fault for result in verify_checkpoint(path)) else ["faults"]


# Other libraries' checkpoints.


@pytest.fixture
def foreign(tmp_path: Path) -> Scene:
    """Two saves of plain DCP, of two files each."""
    for name, version in (("old", OLD), ("new", NEW)):
        writer = dcp.FileSystemWriter(tmp_path / name, single_file_per_rank=False)
        dcp.save(plain_dcp(version), storage_writer=writer, no_dist=True)
    return Scene(tmp_path)
