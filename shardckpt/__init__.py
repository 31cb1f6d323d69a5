"""shardckpt: sharded checkpoints for PyTorch.

``shardckpt.dist_checkpointing`` saves and loads. Importing this package imports neither torch nor pydantic: each
name is imported at first use.
"""

from shardckpt.lazy import attach_stub

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__)
__all__ += ["__version__"]
