"""A storage reader and a storage writer for plain ``torch.distributed.checkpoint`` (DCP)."""

from shardckpt_torch_dist.dcp.storage_reader import CheckpointStorageReader
from shardckpt_torch_dist.dcp.storage_writer import CheckpointStorageWriter

__all__ = [
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
]
