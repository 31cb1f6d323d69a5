from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from shardckpt.manager import mark_checkpoint, pin_step
from shardckpt.manager.marks import identify_save
from tests.commit import owners
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    import sys, torch
    import torch.distributed.checkpoint as dcp, torch.distributed.tensor  # registers its own
    before = {
        "loader": torch.storage._load_from_bytes,
        "safe": set(map(str, torch.serialization.get_safe_globals())),
        "load": torch.load,
        "save": torch.save,
    }
    planners = (dcp.DefaultSavePlanner.create_local_plan, dcp.DefaultLoadPlanner.create_local_plan, dcp.save, dcp.load)
    import shardckpt
    from shardckpt import dist_checkpointing
    from shardckpt.mapping import ShardedTensor
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, sys.argv[1])
    dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, sys.argv[1])
    assert torch.storage._load_from_bytes is before["loader"]
    assert set(map(str, torch.serialization.get_safe_globals())) == before["safe"]
    assert (torch.load, torch.save) == (before["load"], before["save"])
    after = (dcp.DefaultSavePlanner.create_local_plan, dcp.DefaultLoadPlanner.create_local_plan, dcp.save, dcp.load)
    assert after == planners
    foreign = {name.split(".")[0] for name in sys.modules} & {
        "megatron", "transformer_engine", "triton", "psutil", "zarr", "nvidia_resiliency_ext", "torchao", "fsspec_msc",
        "multistorageclient",
    }
    assert not foreign, foreign
"""


def test_nothing_is_patched_and_nothing_foreign_is_imported(tmp_path: object) -> None:
    """A save and a load change no function of torch, register no safe globals, and import no optional package."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), f"{tmp_path}/c"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


LISTING = """
    import sys
    from shardckpt.cli import main
    assert main(["ls", *sys.argv[1:]]) == 0
    assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_ls_of_own_checkpoints_imports_no_torch(tmp_path: Path) -> None:
    """To list sound checkpoints of ours takes no torch, nor do marks, pins, metrics and what killed saves have left."""
    for step in range(3):
        folders.save(tmp_path / "deeper", step, loss=0.5)
    path = tmp_path / "deeper" / "step-1"
    mark_checkpoint(path, identify_save(path), "verified", checked="digests", files=3)
    pin_step(tmp_path / "deeper", 2, "release 1")
    owners.leave(path, owners.dead())
    for how in ([str(tmp_path / "deeper")], [str(tmp_path), "-r"], [str(tmp_path / "deeper" / "step-1"), "--json"]):
        command = [sys.executable, "-c", textwrap.dedent(LISTING), *how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        assert "step-1" in ended.stdout
