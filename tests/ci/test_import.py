from __future__ import annotations

import subprocess
import sys
import textwrap

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
