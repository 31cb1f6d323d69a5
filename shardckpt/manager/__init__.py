"""The CheckpointManager of a training loop: when to save, what to load, which checkpoints to keep."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
