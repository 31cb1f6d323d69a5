"""Write ``torch.save`` archives, and read them without ``torch.load``: pickles go through an allow-list."""

from shardckpt.lazy import attach_stub

# lazy: archives can be described without torch, which takes seconds to import
__getattr__, __dir__, __all__ = attach_stub(__name__)
