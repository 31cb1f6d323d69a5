"""torchtitan's background process, one for each rank."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from tests import programs

if TYPE_CHECKING:
    from pathlib import Path

_CODE = """
import queue, sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from shardckpt.compat.torchtitan import Terminate, checkpoint_mp
messages, done, rank = queue.Queue(), queue.Queue(), int(sys.argv[2])

class Later(queue.Queue):
    def get(self):
        if self.empty():
            return Terminate()
        path = super().get()
        rows = torch.full((2, 2), 1.0 + rank)
        return {"w": DTensor.from_local(rows, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)}, path

messages = Later()
messages.put(sys.argv[1])
checkpoint_mp(messages, done)
assert done.qsize() == 2
assert not torch.distributed.is_initialized()
"""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_the_processes_of_all_ranks_save_together(tmp_path: Path) -> None:
    """They make a group of their own beside the training's store, save one checkpoint, and end their group."""
    path, port = tmp_path / "step-1", _free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 2), "WORLD_SIZE": "2"}
    started = [
        programs.start(_CODE, str(path), str(rank), environment={**place, "RANK": str(rank)}, one_output=True)
        for rank in range(2)
    ]
    for program in started:
        out, _ = program.communicate(120)
        assert program.returncode == 0, out
    loaded = {"w": torch.zeros(4, 2)}
    dcp.load(loaded, checkpoint_id=str(path))
    assert loaded["w"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
