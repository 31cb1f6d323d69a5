"""Read and write the index of a checkpoint: every dialect of ``.metadata``, in one form."""

from shardckpt.lazy import attach_stub

# lazy: torch.distributed.checkpoint takes a third of the time of `import torch`, and reading needs none of it
__getattr__, __dir__, __all__ = attach_stub(__name__)
