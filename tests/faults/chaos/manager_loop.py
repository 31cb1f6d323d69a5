"""Program: the referee's own loop and model, with a CheckpointManager for its saves."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ckpt_chaos.targets import dcp_ddp
from ckpt_chaos.targets.common import arm_from_env

from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.faults.chaos.phases import RANK, WORLD, parse_phase, report_resume, store_final

if TYPE_CHECKING:
    from pathlib import Path


class Progress:
    """The step that a training has reached."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """As a manager saves it."""
        return {"step": self.step}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """As a manager loads it."""
        self.step = content["step"]


def run(out: Path, *, arm: bool = False) -> int:
    """Train from the newest checkpoint: to the end, or to the save that the referee watches; return where it began."""
    model, wrapped, optimizer = dcp_ddp.build()
    progress = Progress()
    states = {"model": model, "optimizer": optimizer, "progress": progress}
    config = CheckpointConfig(folder=f"{out}/ours", interval=dcp_ddp.SAVE_EVERY)
    with CheckpointManager(config, states) as manager:
        manager.load()
        began = progress.step
        while progress.step < (dcp_ddp.ARM_STEP if arm else dcp_ddp.MAX_STEPS):
            progress.step += 1
            inputs, labels = dcp_ddp.batch(progress.step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(inputs), labels).backward()
            optimizer.step()
            if arm and progress.step == dcp_ddp.ARM_STEP:
                arm_from_env(RANK)
            manager.save(progress.step)
    if not arm:
        store_final(model, out)
    return began


if __name__ == "__main__":
    phase, folder = parse_phase()
    if WORLD > 1:
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    if phase == "resume":
        report_resume(folder, lambda: run(folder))
    else:
        run(folder, arm=phase == "train")
