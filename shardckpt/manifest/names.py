"""Names and rules of a checkpoint's JSON files, and the checks that work without their models: no pydantic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MARKER_NAME = "metadata.json"
RECORD_NAME = "shardckpt.json"
INTEGRITY_NAME = "integrity.json"
#: The links of a manager to steps, and the words for these steps in paths.
LATEST, BEST = LINKS = ("latest", "best")
#: The files that mark a directory as a checkpoint: of shardckpt and Megatron, of plain DCP.
MARKERS = (MARKER_NAME, ".metadata")
#: Fingerprints of the tensors, if the save was asked for them; a file of the checkpoint like any other.
FINGERPRINTS_NAME = "tensors.fingerprints"
#: The key in ``content_metadata`` of a CheckpointManager's notes on a step.
CONTENT_KEY = "shardckpt_manager"
#: The key of the common state under which a save stores its caller's ``content_metadata``.
CONTENT = "content_metadata"
#: The key in ``content_metadata`` of how many keys a rescue (``convert --skip-damaged``) has left out.
_RESCUED = "shardckpt_rescued"
#: The key there of the first of them.
_RESCUED_KEYS = "shardckpt_rescued_keys"
#: Most names of them that a checkpoint stores: the record is read by every listing.
_MOST_RESCUED = 1000
#: Largest size of each file that a reader accepts, in bytes.
MARKER_LIMIT = 1 << 20
RECORD_LIMIT = 1 << 31
INTEGRITY_LIMIT = 1 << 26

#: The algorithm of the digests in ``integrity.json``.
INTEGRITY_ALGORITHM = "sha256"

#: The rule for names of files, for errors. Letters are ASCII's: file systems and stores disagree on others.
NAME_RULE = (
    "a file of a checkpoint has a name of letters, digits, '.', '_' and '-'; or a path of such names, joined by '/', "
    "with at most 32 of them, 255 characters in each and 1024 in all; none is '.' or '..'"
)
_PART = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9._-]{1,255}"
_FILE_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,31}}")
_NAME_LENGTH = 1024  # the limit of object stores for a key

#: The pattern of a save's id.
SAVE_ID = r"^[0-9a-f]{32}$"

#: Newest format of ``shardckpt.json`` that this release reads.
NEWEST_FORMAT = 3

#: Names of the folders in which overwrites at a URL put new saves; see :func:`generation_name`.
GENERATION = r"^generation-[0-9a-f]{32}$"

#: End of the name of a table file.
TABLE_SUFFIX = ".digests"

#: The placeholder for the digest of ``shardckpt.json`` where that digest is computed.
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
    """Return the name of the folder in which an overwrite at a URL puts the new save, next to the old one.

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


class Rescue(NamedTuple):
    """The keys that a rescue (``convert --skip-damaged``), or several after each other, have left out as damaged.

    Attributes:
        total: How many; 0 if it is no rescue.
        keys: The first of them.
    """

    total: int = 0
    keys: tuple[str, ...] = ()

    @classmethod
    def parse(cls, total: object, keys: object) -> Rescue:
        """Parse the values of a checkpoint; the rescue is empty where they are absent or malformed."""
        if type(total) is not int or total <= 0:
            return cls()
        names = keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else []
        return cls(total, tuple(names[: min(total, _MOST_RESCUED)]))

    @classmethod
    def from_content(cls, content: object) -> Rescue:
        """Return the rescue in the ``content_metadata``."""
        found = content if isinstance(content, dict) else {}
        return cls.parse(found.get(_RESCUED), found.get(_RESCUED_KEYS))

    def to_content(self) -> dict[str, Any]:
        """Return the entries of the ``content_metadata``."""
        return {_RESCUED: self.total, _RESCUED_KEYS: [*self.keys]}

    def add(self, damaged: Collection[str]) -> Rescue:
        """Return it with more keys that are left out."""
        return Rescue(self.total + len(damaged), (*self.keys, *damaged)[:_MOST_RESCUED])


class Lineage(NamedTuple):
    """A checkpoint's place among the checkpoints of its training.

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
