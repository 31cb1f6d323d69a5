"""Fault tolerance: checkpoints of several replicas that train the same model."""

from shardckpt.manager.replicas.fault_tolerance import FaultTolerance, ReplicaManager
from shardckpt.manager.replicas.replica import Replica

__all__ = [
    "FaultTolerance",
    "Replica",
    "ReplicaManager",
]
