"""The header of the index, JSON: the format, its features, and which save it is of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from shardckpt import __version__
from shardckpt.errors import CorruptCheckpointError, VersionTooNewError, listed
from shardckpt.manifest import SAVE_ID
from shardckpt.storage import parse_json
from shardckpt_safetensors.index_names import FORMAT, KNOWN_FEATURES, MAJOR

if TYPE_CHECKING:
    from shardckpt.manifest import Lineage


#: The version of a format, such as 1.0.
_VERSION = r"^[0-9]{1,9}\.[0-9]{1,9}$"


class IndexHeader(BaseModel):
    """The header of an index. Fields that this release does not know stay in it when keys are removed."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Annotated[str, Field(pattern=_VERSION)]
    required_features: list[str]
    optional_features: list[str]
    id: Annotated[str, Field(pattern=SAVE_ID)]
    parent: Annotated[str, Field(pattern=SAVE_ID)] | None = None
    step: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    created_by: str = ""
    dtypes: list[str]
    codecs: list[str]


def make_header(save_id: str, lineage: Lineage) -> IndexHeader:
    """Return the header of a new index, still without dtypes and codecs."""
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
    """Return the header of an index, if this release reads it.

    Raises:
        VersionTooNewError: A newer release wrote it: its major version or a required feature is unknown.
        CorruptCheckpointError: It is no header.
    """
    try:
        found = parse_json((text or "").encode())
        version = found.get("format") if isinstance(found, dict) else None
        major = (
            int(version.partition(".")[0]) if isinstance(version, str) and re.fullmatch(_VERSION, version) else MAJOR
        )
        if major > MAJOR:  # before the other fields, which may differ in a newer one
            raise VersionTooNewError(
                f"its format is {version}, this release reads {MAJOR}.x: install a newer shardckpt"
            )
        if major < MAJOR:
            raise ValueError(f"its format is {version}, which never was")
        header = IndexHeader.model_validate(found)
    except ValueError as exc:
        raise CorruptCheckpointError(f"the JSON in its metadata is damaged: {exc}") from exc
    unknown = sorted(set(header.required_features) - KNOWN_FEATURES)
    if unknown:
        raise VersionTooNewError(
            f"it needs {listed([repr(name[:100]) for name in unknown])}, which this release does not know: install a "
            f"newer shardckpt (it was written by {header.created_by!r:.100})"
        )
    return header
