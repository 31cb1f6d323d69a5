"""The JSON files of a checkpoint, as pydantic models: these models are the specification.

``metadata.json`` has Megatron's four fields and says which strategy reads the rest. ``shardckpt.json`` is ours: which
release saved, which files belong to the checkpoint, and their digests. Both are written last, before the commit.
``integrity.json`` is Megatron's, since 0.18, and optional: the SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardckpt.errors import VersionTooNewError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

MARKER_NAME = "metadata.json"
RECORD_NAME = "shardckpt.json"
INTEGRITY_NAME = "integrity.json"
#: Fingerprints of the tensors, if the save was asked for them; a file of the checkpoint like any other.
FINGERPRINTS_NAME = "tensors.fingerprints"
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
_NEWEST_FORMAT = 3

#: End of the name of a table file.
TABLE_SUFFIX = ".digests"

_NO_DIGEST = "0" * 64


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


def list_files(files: Iterable[FileRecord]) -> dict[str, int]:
    """Return the size in bytes, by name, of the files of some records, table files included."""
    return {name: size for file in files for name, size in file.list_files().items()}


def _check_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{name!r:.200}: {NAME_RULE}")
    return name


_Name = Annotated[str, AfterValidator(_check_name)]
_Count = Annotated[int, Field(ge=0)]


class Lineage(NamedTuple):
    """Where a checkpoint stands among those of its training.

    Attributes:
        parent: The save id of the checkpoint that the job was resumed from, 32 hex digits; None if from none.
        step: The step of the training; None if it was not given.
    """

    parent: str | None = None
    step: int | None = None


class Marker(BaseModel):
    """``metadata.json``: which strategy, by Megatron's names; other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


class FileRecord(BaseModel):
    """A file of the checkpoint: its path, size in bytes, rank and digests (:mod:`shardckpt.storage.digest`).

    The table of digests stands in ``segments`` as text. Where the tables of all ranks would be too much for one file,
    each stands in a file of its own beside the file, the table file, and ``segments`` is the number of its bytes.
    ``digest`` is the SHA-256 of the table, and so that of the table file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    size: _Count
    rank: _Count
    keys: _Count
    digest: str
    segments: str | Annotated[int, Field(gt=0, strict=True)]

    @property
    def table_name(self) -> str:
        """The path of the table file; ``""`` if there is none."""
        return f"{self.name}{TABLE_SUFFIX}" if isinstance(self.segments, int) else ""

    def list_files(self) -> dict[str, int]:
        """Return the size in bytes, by name, of the file and of its table file, if it has one."""
        return {self.name: self.size} | ({self.table_name: self.segments} if isinstance(self.segments, int) else {})


class _Format(BaseModel):
    """What a later release's ``shardckpt.json`` has in any case."""

    format: int = 0
    writer: dict[str, str] = {}


class SaveTimings(BaseModel):
    """When the phases of a save began, and how long they lasted, in seconds, as columns by rank.

    Phases: ``plan`` (from the call to the first byte), ``stage`` (copy for a background save), ``write``, ``sync``
    (fsync, the part of ``write`` that waits for it), ``commit`` (from the end of this rank's writing until the record
    of all ranks was written: it has the wait for the slowest). Time 0 is when the first rank began; the ranks' clocks
    are aligned at the message in which they agree on the save's id.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Whether the save ran behind the training.
    background: bool = False
    #: The ranks of the columns: all; of many, the main rank and those whose writing ended last.
    ranks: tuple[_Count, ...]
    #: Bytes that each of them wrote.
    nbytes: tuple[_Count, ...]
    #: By phase, when it began; None where a rank did not have the phase.
    start: dict[str, tuple[float | None, ...]]
    #: By phase, how long it lasted.
    seconds: dict[str, tuple[float | None, ...]]
    #: By phase, the least, the median and the largest duration of all ranks.
    spread: dict[str, tuple[float, float, float]]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        columns = (self.nbytes, *self.start.values(), *self.seconds.values())
        if any(len(column) != len(self.ranks) for column in columns) or self.start.keys() != self.seconds.keys():
            raise ValueError("the columns of the timings have different lengths")
        return self


class Record(BaseModel):
    """``shardckpt.json``.

    Format 3 is that of a checkpoint with table files, format 2 that of one with files in folders. All others have
    format 1, which is all that the first releases read: they refuse the formats that they do not know.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1, 2, 3] = 1
    save_id: str
    backend: str
    version: int
    #: Oldest shardckpt (or plugin distribution) whose reader understands this version, for the gate's error.
    reader: str
    writer: dict[str, str]
    world_size: Annotated[int, Field(ge=1)]
    digest_algorithm: str
    files: tuple[FileRecord, ...]
    #: The save id of the checkpoint that the job was resumed from, and the step of the training, if they were given.
    parent: Annotated[str, Field(pattern=SAVE_ID)] | None = None
    step: _Count | None = None
    #: What was saved as ``content_metadata``, if it is plain JSON; it is in the common state too.
    content_metadata: Any = None
    #: When each rank did what; None in a checkpoint of an earlier release, and where nobody measured it.
    timings: SaveTimings | None = None
    #: SHA-256, in hex, of the file's bytes with zeros in the place of this digest.
    self_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = _NO_DIGEST

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        names = {file.name for file in self.files}
        folders = find_folders(names)
        for file in self.files:
            if file.name in folders:
                raise ValueError(f"{file.name!r} is the name of a file, and of a folder with files")
            if table := file.table_name:
                _check_name(table)
                if table in folders or table in names:
                    raise ValueError(f"{table!r} is the name of a table of digests, and of another file or a folder")
        return self

    def list_files(self) -> dict[str, int]:
        """Return the size in bytes of every file by its name, table files included."""
        return list_files(self.files)

    def dump(self) -> bytes:
        """Return the bytes of ``shardckpt.json``, its own digest and the lowest format that can say it included."""
        least = 2 if any("/" in file.name for file in self.files) else 1
        has_tables = any(file.table_name for file in self.files)
        filled = self.model_copy(update={"self_digest": _NO_DIGEST, "format": 3 if has_tables else least})
        # a checkpoint with table files is large, and so is its record: every rank of a load reads it
        text = filled.model_dump_json(indent=None if has_tables else 1)
        # from the right: the digest is the last field, and the caller's metadata before it may have the same digits
        head, _, tail = text.rpartition(_NO_DIGEST)
        return (head + hashlib.sha256(text.encode()).hexdigest() + tail).encode()

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """Return the record in the bytes of ``shardckpt.json``.

        Raises:
            ValueError: they are not the bytes that were written.
            VersionTooNewError: a later release wrote them, in a format that this one does not know.
        """
        try:
            record = cls.model_validate_json(data)
        except ValidationError as exc:
            found = _Format.model_validate_json(data)
            if found.format <= _NEWEST_FORMAT:
                raise
            raise VersionTooNewError(
                f"{RECORD_NAME} has format {found.format}, and this release reads those up to {_NEWEST_FORMAT}: "
                f"upgrade shardckpt to {found.writer.get('shardckpt', 'the release that saved it')} or newer"
            ) from exc
        head, _, tail = data.rpartition(record.self_digest.encode())
        if hashlib.sha256(head + _NO_DIGEST.encode() + tail).hexdigest() != record.self_digest:
            raise ValueError("its bytes are not those that were written (digest differs)")
        return record


class Integrity(BaseModel):
    """``integrity.json``: digests, in hex, by file name."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    algorithm: str = INTEGRITY_ALGORITHM
    files: Annotated[dict[_Name, str], Field(min_length=1)]

    def dump(self) -> bytes:
        """Return the bytes of ``integrity.json``."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def parse(cls, data: bytes) -> Integrity:
        """Return the digests in the bytes of ``integrity.json``.

        Raises:
            ValueError: they are not such a file.
        """
        return cls.model_validate_json(data)


class Manifest(BaseModel):
    """What a reader knows of a checkpoint before it opens a data file."""

    model_config = ConfigDict(frozen=True)

    backend: str
    version: int
    #: Ours, or None for a checkpoint that another library wrote.
    record: Record | None = None
    #: Set where the checkpoint has no ``metadata.json`` and a strategy recognised it by content.
    recognised_as: str | None = None

    @property
    def save_id(self) -> str:
        """The id of the save, 32 hex digits that no other save has; ``""`` for a checkpoint of another library."""
        return "" if self.record is None else self.record.save_id

    @property
    def lineage(self) -> Lineage:
        """What the checkpoint says of its parent and its step."""
        return Lineage() if self.record is None else Lineage(self.record.parent, self.record.step)


__all__ = [
    "FINGERPRINTS_NAME",
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
    "FileRecord",
    "Integrity",
    "Lineage",
    "Manifest",
    "Marker",
    "Record",
    "SaveTimings",
    "find_folders",
    "is_file_name",
    "list_files",
    "list_parents",
]
