"""The JSON files of a checkpoint, as pydantic models: these models are the specification.

``metadata.json`` has Megatron's four fields and says which strategy reads the rest. ``shardckpt.json`` is ours: which
release saved, which files belong to the checkpoint, and their digests. Both are written last, before the commit.
``integrity.json`` is Megatron's, since 0.18, and optional: the SHA-256 of every other file.

Each is parsed strictly: two readers must not see two checkpoints in the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.manifest.models import (
        FileRecord,
        Integrity,
        Manifest,
        Marker,
        Record,
        SaveTimings,
    )
    from shardckpt.manifest.names import (
        FINGERPRINTS_NAME,
        GENERATION,
        HUB_ADAPTER,
        HUB_FILES,
        HUB_INDEX,
        HUB_WEIGHTS,
        INTEGRITY_ALGORITHM,
        INTEGRITY_LIMIT,
        INTEGRITY_NAME,
        MARKER_LIMIT,
        MARKER_NAME,
        NAME_RULE,
        RECORD_LIMIT,
        RECORD_NAME,
        SAVE_ID,
        TABLE_SUFFIX,
        Lineage,
        find_folders,
        find_generation,
        generation_name,
        is_file_name,
        list_files,
        list_parents,
    )
    from shardckpt.manifest.plain import PlainFile, PlainRecord, parse_plain
    from shardckpt.manifest.strict_json import MOST_LEVELS, parse_json

# lazy: to import pydantic takes longer than to list a checkpoint
__getattr__ = lazy_getattr(
    __name__,
    {
        "models": ("FileRecord", "Integrity", "Manifest", "Marker", "Record", "SaveTimings"),
        "names": (
            "FINGERPRINTS_NAME",
            "GENERATION",
            "HUB_ADAPTER",
            "HUB_FILES",
            "HUB_INDEX",
            "HUB_WEIGHTS",
            "INTEGRITY_ALGORITHM",
            "INTEGRITY_LIMIT",
            "INTEGRITY_NAME",
            "MARKER_LIMIT",
            "MARKER_NAME",
            "NAME_RULE",
            "RECORD_LIMIT",
            "RECORD_NAME",
            "SAVE_ID",
            "TABLE_SUFFIX",
            "Lineage",
            "find_folders",
            "find_generation",
            "generation_name",
            "is_file_name",
            "list_files",
            "list_parents",
        ),
        "plain": ("PlainFile", "PlainRecord", "parse_plain"),
        "strict_json": ("MOST_LEVELS", "parse_json"),
    },
)

__all__ = [
    "FINGERPRINTS_NAME",
    "GENERATION",
    "HUB_ADAPTER",
    "HUB_FILES",
    "HUB_INDEX",
    "HUB_WEIGHTS",
    "INTEGRITY_ALGORITHM",
    "INTEGRITY_LIMIT",
    "INTEGRITY_NAME",
    "MARKER_LIMIT",
    "MARKER_NAME",
    "MOST_LEVELS",
    "NAME_RULE",
    "RECORD_LIMIT",
    "RECORD_NAME",
    "SAVE_ID",
    "TABLE_SUFFIX",
    "FileRecord",
    "Integrity",
    "Lineage",
    "Manifest",
    "Marker",
    "PlainFile",
    "PlainRecord",
    "Record",
    "SaveTimings",
    "find_folders",
    "find_generation",
    "generation_name",
    "is_file_name",
    "list_files",
    "list_parents",
    "parse_json",
    "parse_plain",
]
