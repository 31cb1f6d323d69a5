"""Read DeepSpeed's checkpoints, ZeRO and universal ones, without DeepSpeed and without running code in them."""

from shardckpt.lazy import attach_stub

# lazy: what says what a folder is must not import the archives, which unpickle
__getattr__, __dir__, __all__ = attach_stub(__name__)
