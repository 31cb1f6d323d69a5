"""The JSON files of a checkpoint, as pydantic models: these models are the specification.

``metadata.json`` has Megatron's four fields and says which strategy reads the rest. ``shardckpt.json`` is ours: which
release saved, which files belong to the checkpoint, and their digests. Both are written last, before the commit.
``integrity.json`` is Megatron's, since 0.18, and optional: the SHA-256 of every other file.

Each is parsed strictly: two readers must not see two checkpoints in the same bytes.
"""

from shardckpt.lazy import attach_stub

# lazy: to import pydantic takes longer than to list a checkpoint
__getattr__, __dir__, __all__ = attach_stub(__name__)
