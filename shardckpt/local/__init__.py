"""Checkpoints in the memory of ranks, and on disks of their own: tensor-aware state dicts and local checkpoints."""

from shardckpt.local.clique import CliqueReplication
from shardckpt.local.local_checkpoint import load_local, save_local
from shardckpt.local.local_manager import LocalCheckpointManager
from shardckpt.local.memory_shards import KeptShards
from shardckpt.local.tensor_aware import TensorAwareStateDict

__all__ = [
    "CliqueReplication",
    "KeptShards",
    "LocalCheckpointManager",
    "TensorAwareStateDict",
    "load_local",
    "save_local",
]
