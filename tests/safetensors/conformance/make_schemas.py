"""Write the JSON schemas beside FORMAT.md: ``python -m tests.safetensors.conformance.make_schemas``.

Those of ``metadata.json`` and ``shardckpt.json`` are what the pydantic models say. That of the index's JSON, the string
``shardckpt`` in its header, and that of its parts, are written here from the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardckpt.manifest import Marker, Record
from tests.safetensors.conformance.draft import BITS

FOLDER = Path(__file__).parents[3] / "strategies" / "shardckpt_safetensors" / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAMES = {"type": "array", "items": {"type": "string"}}
_SAVE_ID = "^[0-9a-f]{32}$"

_INDEX = {
    "description": "The string ``shardckpt`` in the header of ``index.safetensors``.",
    "properties": {
        "format": {"type": "string", "pattern": r"^1\.[0-9]+$", "description": "Major and minor version."},
        "required_features": {**_NAMES, "description": "Features without which a reader must refuse the checkpoint."},
        "optional_features": {**_NAMES, "description": "Features that a reader may ignore."},
        "id": {"type": "string", "pattern": _SAVE_ID, "description": "``save_id`` of the record."},
        "parent": {"anyOf": [{"type": "string", "pattern": _SAVE_ID}, {"type": "null"}], "default": None},
        "step": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None},
        "created_by": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "dtypes": {"type": "array", "items": {"enum": sorted(BITS)}},
        "codecs": _NAMES,
    },
    "required": ["format", "required_features", "optional_features", "id", "dtypes", "codecs"],
    "title": "Index",
    "type": "object",
}

_FIELD = {"enum": ["U8", "I16", "I32", "I64"]}
_PART = {
    "description": "The string ``shardckpt`` in the header of a part of the index.",
    "properties": {
        "dtypes": {"type": "array", "items": {"enum": sorted(BITS)}},
        "row": {"type": "array", "items": _FIELD, "minItems": 4, "maxItems": 4},
        "page": {"type": "integer", "minimum": 1, "maximum": (1 << 31) - 1, "description": "Rows of a page."},
    },
    "required": ["dtypes", "row", "page"],
    "title": "Part",
    "type": "object",
}


def make_schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas by file name."""
    found = {
        "metadata.schema.json": Marker.model_json_schema(),
        "shardckpt.schema.json": Record.model_json_schema(),
        "index.schema.json": _INDEX,
        "part.schema.json": _PART,
    }
    return {name: {"$schema": _DIALECT, **schema} for name, schema in found.items()}


def write_schemas() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in make_schemas().items():
        (FOLDER / name).write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    write_schemas()
