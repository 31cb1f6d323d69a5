"""The storage reader and writer of plain ``torch.distributed.checkpoint``."""

from shardckpt_torch_dist.dcp.storage_reader import CheckpointStorageReader
from shardckpt_torch_dist.dcp.storage_writer import CheckpointStorageWriter

__all__ = [
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
]
