"""Checkpoints in the memory of ranks and on the disks of their nodes: tensor-aware state dicts, local checkpoints."""

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
