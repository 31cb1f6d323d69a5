"""A tensor's memory and values: bytes, copies, quantized classes, torch's private names."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
