from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.manager.preemption import heard

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["heard"]  # fixtures

RANK = """
import os, signal, sys
import torch, torch.distributed as dist
from shardckpt.manager import CheckpointConfig, CheckpointManager

heard, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)  # a byte for each signal
dist.init_process_group("gloo")
torch.manual_seed(0)
config = CheckpointConfig(folder=sys.argv[1], interval=1000, save_on_sigterm=True)
with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager:
    manager.save(1)
    for said in (f"ready {os.getpid()}", "signalled", "signalled again"):
        os.write(1, f"{said}\\n".encode())
        if said != "signalled again":
            os.read(heard, 1)
    manager.save(2)
    assert manager.preempted
"""


def test_a_step_is_saved_under_torchrun(tmp_path: Path) -> None:
    """Every process of the job is signalled, and torchrun signals its ranks once more: the step is saved whole."""
    (tmp_path / "rank.py").write_text(RANK)
    steps = tmp_path / "steps"
    command = [*("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")]
    command = [sys.executable, *command, str(tmp_path / "rank.py"), str(steps)]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as job,
    ):
        assert job.stdout is not None
        try:
            pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            assert [job.stdout.readline() for _ in range(2)] == ["signalled\n"] * 2
            job.terminate()
            said = job.stdout.read()
        finally:
            job.kill()
    assert said == "signalled again\n" * 2, (tmp_path / "errors").read_text()
    assert sorted(path.name for path in steps.glob("step-*")) == ["step-2"]
