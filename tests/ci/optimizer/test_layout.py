"""Loaded state lies where its parameter lies, whatever the layout in which it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from tests.adapters.layouts import S0
from tests.optimizer.layout import load

if TYPE_CHECKING:
    from tests.ranks import RankPool

MIB = 1 << 20
ROWS = 16 * MIB // 256


def _measured(directory: Path) -> tuple[int, int]:
    """Peak of new memory, and bytes read, in bytes."""
    mesh = init_device_mesh("cpu", (4,))
    local = torch.zeros(ROWS // 4, 64)
    params = {"w": DTensor.from_local(local, mesh, [S0], run_check=False)}
    load(directory, params)  # what is imported at first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    memory, read = _status("status", "VmHWM"), _status("io", "rchar")
    slots = load(directory, params)["w"]
    assert len(slots) == 3
    return (_status("status", "VmHWM") - memory) * 1024, _status("io", "rchar") - read


def _status(name: str, field: str) -> int:
    lines = Path(f"/proc/self/{name}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_no_rank_holds_or_reads_more_than_its_part(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Of 3 tensors of 16 MiB each of 4 ranks takes memory for 12 MiB in all, and reads hardly more than that."""
    state = {slot: torch.full((ROWS, 64), 3.0) for slot in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    dist_checkpointing.save(to_sharded_state_dict({"optimizer": {"state": {"w": state}}}), tmp_path / "ckpt")

    for memory, read in gloo_ranks.run(4, _measured, tmp_path / "ckpt"):
        assert memory < 20 * MIB
        assert 12 * MIB <= read < 18 * MIB
