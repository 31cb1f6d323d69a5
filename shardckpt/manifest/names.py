"""Names and rules of a checkpoint's JSON files, and what is known of it without their models: no pydantic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKER_NAME = "metadata.json"
RECORD_NAME = "shardckpt.json"
INTEGRITY_NAME = "integrity.json"
#: Fingerprints of the tensors, if the save was asked for them; a file of the checkpoint like any other.
FINGERPRINTS_NAME = "tensors.fingerprints"
#: The key in ``content_metadata`` of what a CheckpointManager notes of a step.
CONTENT_KEY = "shardckpt_manager"
#: The key there of how many keys a rescue (``convert --skip-damaged``) has left out.
RESCUED_KEY = "shardckpt_rescued"
#: Largest size of each file that a reader accepts, in bytes.
MARKER_LIMIT = 1 << 20
RECORD_LIMIT = 1 << 31
INTEGRITY_LIMIT = 1 << 26

#: The algorithm of the digests in ``integrity.json``.
INTEGRITY_ALGORITHM = "sha256"

#: The rule for names of files, for errors. Letters are those of ASCII: file systems and stores disagree on others.
NAME_RULE = (
    "a file of a checkpoint has a name of letters, digits, '.', '_' and '-'; or a path of such names, joined by '/', "
    "with at most 32 of them, 255 characters in each and 1024 in all; none is '.' or '..'"
)
_PART = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9._-]{1,255}"
_FILE_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,31}}")
_NAME_LENGTH = 1024  # what object stores allow for a key

#: The pattern of a save's id.
SAVE_ID = r"^[0-9a-f]{32}$"

#: Newest format of ``shardckpt.json`` that this release reads.
NEWEST_FORMAT = 3

#: Names of the folders in which overwrites at a URL put new saves; see :func:`generation_name`.
GENERATION = r"^generation-[0-9a-f]{32}$"

#: End of the name of a table file.
TABLE_SUFFIX = ".digests"

#: What stands in the place of the digest of ``shardckpt.json`` where that digest is computed.
NO_DIGEST = "0" * 64


def is_file_name(name: object) -> bool:
    """Return whether a file of a checkpoint may have a name: a path below its directory, see ``NAME_RULE``."""
    return isinstance(name, str) and len(name) <= _NAME_LENGTH and _FILE_NAME.fullmatch(name) is not None


def list_parents(name: str) -> list[str]:
    """Return the folders on the way to a file, the outermost first: ``["a", "a/b"]`` for ``"a/b/c"``."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def find_folders(names: Iterable[str]) -> set[str]:
    """Return the folders in names of files: ``{"a", "a/b"}`` for ``["a/b/c"]``."""
    innermost = {name.rpartition("/")[0] for name in names} - {""}
    return innermost.union(*map(list_parents, innermost))


def generation_name(save_id: str) -> str:
    """Return the name of the folder in which an overwrite at a URL puts the new save, beside the old one.

    Args:
        save_id: The new save's id.

    Returns:
        A name that :data:`GENERATION` matches.
    """
    return f"generation-{save_id}"


def find_generation(name: str) -> str:
    """Return the generation that a file is in.

    Args:
        name: The file's path below the URL.

    Returns:
        The name of the generation's folder; ``""`` if the file is in none.
    """
    folder, _, rest = name.partition("/")
    return folder if rest and re.fullmatch(GENERATION, folder) else ""


def count_rescued(content: object) -> int:
    """Return how many keys a rescue has left out, as the ``content_metadata`` says; 0 where nothing does."""
    many = content.get(RESCUED_KEY) if isinstance(content, dict) else 0
    return many if isinstance(many, int) and many > 0 else 0


class Lineage(NamedTuple):
    """A checkpoint's place among those of its training.

    Attributes:
        parent: The save id of the checkpoint that the job was resumed from, 32 hex digits; None if from none.
        step: The step of the training; None if it was not given.
    """

    parent: str | None = None
    step: int | None = None


class HasFiles(Protocol):
    """The record of a file, which may have a table file."""

    def list_files(self) -> dict[str, int]:
        """Return the size in bytes, by name, of the file and of its table file, if it has one."""


def list_files(files: Iterable[HasFiles]) -> dict[str, int]:
    """Return the size in bytes, by name, of the files of some records, table files included."""
    return {name: size for file in files for name, size in file.list_files().items()}
