"""Fault tolerance: checkpoints of several replicas that train the same model."""
