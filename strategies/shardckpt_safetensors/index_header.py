"""The header of the index: its format, its features, and the save that it is of, as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardckpt import __version__
from shardckpt.errors import CorruptCheckpointError, VersionTooNewError, listed
from shardckpt.manifest import SAVE_ID
from shardckpt.storage import parse_json

if TYPE_CHECKING:
    from shardckpt.manifest import Lineage

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

_FORMAT = "1.0"
_MAJOR = 1
#: Features that this release reads.
_KNOWN_FEATURES: frozenset[str] = frozenset({FEATURE, UNALIGNED})


class IndexHeader(BaseModel):
    """The JSON of the index; with extensions, which a removal of keys keeps."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$")]
    required_features: list[str]
    optional_features: list[str]
    id: Annotated[str, Field(pattern=SAVE_ID)]
    parent: Annotated[str, Field(pattern=SAVE_ID)] | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    created_by: str = ""
    dtypes: list[str]
    codecs: list[str]


def make_header(save_id: str, lineage: Lineage) -> IndexHeader:
    """Return the JSON of a new index, still without dtypes and codecs."""
    return IndexHeader(
        format=_FORMAT,
        required_features=[],
        optional_features=[],
        id=save_id,
        parent=lineage.parent,
        step=lineage.step,
        created_by=f"shardckpt {__version__}",
        dtypes=[],
        codecs=[],
    )


def parse_header(text: str | None) -> IndexHeader:
    """Return the JSON of the index, if this release reads it."""
    try:
        found = parse_json((text or "").encode())
        version = found.get("format") if isinstance(found, dict) else None
        if isinstance(version, str) and re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", version):
            major = int(version.partition(".")[0])
            if major > _MAJOR:
                raise VersionTooNewError(
                    f"its format is {version}, this release reads {_MAJOR}.x: install a newer shardckpt"
                )
            if major < _MAJOR:
                raise ValueError(f"its format is {version}, which never was")
        header = IndexHeader.model_validate(found)
    except (ValueError, ValidationError) as exc:
        raise CorruptCheckpointError(f"the JSON in its metadata is damaged: {exc}") from exc
    unknown = sorted(set(header.required_features) - _KNOWN_FEATURES)
    if unknown:
        raise VersionTooNewError(
            f"it needs {listed([repr(name[:100]) for name in unknown])}, which this release does not know: install a "
            f"newer shardckpt (it was written by {header.created_by!r:.100})"
        )
    return header
