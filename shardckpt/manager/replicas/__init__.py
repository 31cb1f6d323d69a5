"""Fault tolerance: several replicas that train the same model."""
