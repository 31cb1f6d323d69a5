"""The CheckpointManager of a training loop: it decides when to save, which checkpoint to load, and which to keep."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
