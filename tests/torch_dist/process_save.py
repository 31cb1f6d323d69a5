"""Program: a rank that calls ``dcp.async_save`` by a process of DCP's, which takes a process that may have children.

``python -m tests.torch_dist.process_save FOLDER RANK RANKS`` saves to FOLDER/c; once more, which must be refused; and
to FOLDER/d, with collectives of its own meanwhile.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardckpt_torch_dist import CheckpointStorageWriter
from tests.torch_dist import plain_states


def main() -> None:
    """Save three times."""
    folder, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    for name, is_refused in (("c", False), ("c", True), ("d", False)):
        future = dcp.async_save(
            plain_states.state(2),
            storage_writer=CheckpointStorageWriter(folder / name),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        dist.all_reduce(torch.ones(1))
        try:
            future.result(timeout=90)
        except CheckpointException as exc:
            if not is_refused or "overwrite=True" not in str(exc):
                raise
        else:
            if is_refused:
                raise SystemExit("the second save was not refused")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
