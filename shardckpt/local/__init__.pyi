from shardckpt.local.clique import CliqueReplication as CliqueReplication
from shardckpt.local.local_checkpoint import load_local as load_local
from shardckpt.local.local_checkpoint import save_local as save_local
from shardckpt.local.local_manager import LocalCheckpointManager as LocalCheckpointManager
from shardckpt.local.memory_shards import KeptShards as KeptShards
from shardckpt.local.tensor_aware import TensorAwareStateDict as TensorAwareStateDict
