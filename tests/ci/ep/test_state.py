"""State dicts with experts through dist_checkpointing: what is refused, what is told apart, and who reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import programs
from tests.ep.live import FQN
from tests.ep.state import HALVES, save_case

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def test_torch_dist_reads_what_ep_wrote_without_ep(ranks: Ranks, tmp_path: Path) -> None:
    """Where the plugin of ep is off or broken, an instance of torch_dist's reader knows the files by themselves."""
    ranks.run(2, save_case, tmp_path / "ckpt", HALVES)
    code = (
        "import sys, torch\n"
        "from shardckpt import dist_checkpointing as dc\n"
        "from shardckpt.mapping import ShardedTensor\n"
        "from shardckpt_torch_dist import TorchDistLoadShardedStrategy\n"
        f"wanted = {{'w': ShardedTensor.from_rank_offsets('model.{FQN}', torch.zeros(8, 6, 3))}}\n"
        "assert dc.load(wanted, sys.argv[1], TorchDistLoadShardedStrategy())['w'].any()\n"
    )
    done = programs.run(code, str(tmp_path / "ckpt"), environment={"SHARDCKPT_DISABLED_PLUGINS": "ep"})
    assert done.returncode == 0, done.stderr
