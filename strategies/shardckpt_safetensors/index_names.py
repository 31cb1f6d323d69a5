"""Names in the index: its files, its features and its format, without pydantic."""

from __future__ import annotations

INDEX_FILE = "index.safetensors"
#: The entry of the index's metadata that has this JSON.
HEADER = "shardckpt"
#: The required feature of an index in parts.
FEATURE = "index_parts"
COMMON_FILE = "common.safetensors"
#: The codecs of objects, by their number in a plan.
CODECS = ("json", "safetensors", "raw")
#: The feature of a checkpoint with payloads that do not begin at multiples of ALIGN.
UNALIGNED = "unaligned"
#: An optional feature: which tensors are the scales of others.
BLOCK_SCALES = "block_scales"

FORMAT = "1.0"
MAJOR = 1
#: Features that this release reads.
KNOWN_FEATURES: frozenset[str] = frozenset({FEATURE, UNALIGNED})
