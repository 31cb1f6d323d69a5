"""Classes that describe this rank's shards of global tensors and objects: Megatron's names, no process group needed."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
