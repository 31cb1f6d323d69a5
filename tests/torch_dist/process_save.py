"""Program: ``dcp.async_save`` by a process of DCP's, which takes a process that may have children.

``python -m tests.torch_dist.process_save FOLDER`` saves to FOLDER/c, and once more, which must be refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardckpt_torch_dist import CheckpointStorageWriter
from tests.torch_dist import plain_states


def main() -> None:
    """Save twice."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    for number in range(2):
        future = dcp.async_save(
            plain_states.state(2),
            storage_writer=CheckpointStorageWriter(folder / "c"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        try:
            future.result(timeout=90)
        except CheckpointException as exc:
            if not number or "overwrite=True" not in str(exc):
                raise
        else:
            if number:
                raise SystemExit("the second save was not refused")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
