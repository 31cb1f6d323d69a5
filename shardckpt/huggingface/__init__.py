"""Export checkpoints to Hugging Face folders and load from them; convert checkpoints to plain state dicts and back."""

from shardckpt.lazy import attach_stub

# lazy: a format that takes names of the Hub from here must not import the archives, which unpickle
__getattr__, __dir__, __all__ = attach_stub(__name__)
