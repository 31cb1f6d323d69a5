"""The header of the index: its format, its features, and the save that it is of, as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardckpt import __version__
from shardckpt.errors import CorruptCheckpointError, VersionTooNewError, listed
from shardckpt.manifest import SAVE_ID
from shardckpt.storage import parse_json
from shardckpt_safetensors.index_names import FORMAT, KNOWN_FEATURES, MAJOR

if TYPE_CHECKING:
    from shardckpt.manifest import Lineage


class IndexHeader(BaseModel):
    """The JSON of the index; with extensions, which a removal of keys keeps."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$")]
    required_features: list[str]
    optional_features: list[str]
    id: Annotated[str, Field(pattern=SAVE_ID)]
    parent: Annotated[str, Field(pattern=SAVE_ID)] | None = None
    step: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    created_by: str = ""
    dtypes: list[str]
    codecs: list[str]


def make_header(save_id: str, lineage: Lineage) -> IndexHeader:
    """Return the JSON of a new index, still without dtypes and codecs."""
    return IndexHeader(
        format=FORMAT,
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
            if major > MAJOR:
                raise VersionTooNewError(
                    f"its format is {version}, this release reads {MAJOR}.x: install a newer shardckpt"
                )
            if major < MAJOR:
                raise ValueError(f"its format is {version}, which never was")
        header = IndexHeader.model_validate(found)
    except (ValueError, ValidationError) as exc:
        raise CorruptCheckpointError(f"the JSON in its metadata is damaged: {exc}") from exc
    unknown = sorted(set(header.required_features) - KNOWN_FEATURES)
    if unknown:
        raise VersionTooNewError(
            f"it needs {listed([repr(name[:100]) for name in unknown])}, which this release does not know: install a "
            f"newer shardckpt (it was written by {header.created_by!r:.100})"
        )
    return header
