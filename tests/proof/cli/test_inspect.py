"""``shardckpt inspect``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from tests.backends import Backend, both_in_proof

if TYPE_CHECKING:
    from pathlib import Path


@both_in_proof
def test_inspect_does_not_wait_for_dtensor(backend: Backend, tmp_path: Path) -> None:
    """Where ``inspect`` needs torch, a new interpreter imports neither DTensor nor DCP, which take a second."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "c")
    (tmp_path / "c" / "metadata.json").unlink()  # it has no outline then
    program = (
        "import sys; from shardckpt.cli import main; code = main(['inspect', sys.argv[1]])\n"
        "print(*{'torch.distributed.tensor', 'torch.distributed.checkpoint', 'sympy'} & sys.modules.keys())\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "c")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    *_, summary, _, imported = ended.stdout.split("\n")[:-1]
    assert summary == "1 tensor of 8 bytes, 2 parameters, 0 objects"
    assert imported == ""
