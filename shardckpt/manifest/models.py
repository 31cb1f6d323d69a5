"""The models of a checkpoint's JSON files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shardckpt import __version__
from shardckpt.errors import VersionTooNewError
from shardckpt.manifest.names import (
    GENERATION,
    INTEGRITY_ALGORITHM,
    NAME_RULE,
    NEWEST_FORMAT,
    NO_DIGEST,
    RECORD_NAME,
    SAVE_ID,
    TABLE_SUFFIX,
    Lineage,
    find_folders,
    is_file_name,
    list_files,
)
from shardckpt.manifest.strict_json import parse_json

if TYPE_CHECKING:
    from typing_extensions import Self


def _check_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{name!r:.200}: {NAME_RULE}")
    return name


_Name = Annotated[str, AfterValidator(_check_name)]
#: JSON's numbers are exact in every reader below this.
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
#: JSON has lists, and a model that does not change has tuples.
_FROM_LIST = Field(strict=False)
_T = TypeVar("_T")
_Column = Annotated[tuple[_T, ...], _FROM_LIST]
_STRICT = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Marker(BaseModel):
    """``metadata.json``: which strategy, by Megatron's names; other fields are ignored.

    After an overwrite at a URL, the marker there has ``shardckpt_generation``, too: the folder next to it with all
    files of the newest save, its own ``metadata.json`` among them.

    Megatron reads a missing version as 1, and so does this. It always writes one, and so do we: a checkpoint with a
    record is refused without.
    """

    model_config = _STRICT

    sharded_backend: str
    sharded_backend_version: _Count = 1
    common_backend: str = "torch"
    common_backend_version: _Count = 1
    shardckpt_generation: Annotated[str | None, Field(pattern=GENERATION)] = None

    def dump(self) -> bytes:
        """Return the bytes of the file: no field that is not set, since Megatron takes no other than its own."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def parse(cls, data: bytes) -> Marker:
        """Return the marker in the bytes of ``metadata.json``.

        Raises:
            ValueError: they are not such a file.
        """
        return cls.model_validate(parse_json(data))

    @classmethod
    def check_written(cls, data: bytes, record: Record) -> None:
        """Compare the bytes of ``metadata.json`` with the fields that the save that wrote the record wrote there.

        A load needs the backend and its version; the others are for Megatron, and a load would not see that they are
        damaged. A format's specification may let its writers leave them out or write others: they are compared only
        where shardckpt wrote the record and they are there.

        Raises:
            ValueError: a field differs, or is missing.
        """
        found = parse_json(data)
        written = cls(sharded_backend=record.backend, sharded_backend_version=record.version)
        expected = written.model_dump(exclude_none=True)
        needed = {"sharded_backend", "sharded_backend_version"}
        has_all = "shardckpt" in record.writer and found.keys() != needed
        for name, value in expected.items():
            if not has_all and name not in needed:
                continue
            if name not in found:
                raise ValueError(f"it has no {name!r}, and was written with {value!r}")
            if found[name] != value or type(found[name]) is not type(value):  # JSON's true equals 1
                raise ValueError(f"{name!r} is {found[name]!r}, and was written as {value!r}")


class FileRecord(BaseModel):
    """A file of the checkpoint: its path, size in bytes, rank and digests (:mod:`shardckpt.storage.digest`).

    The table of digests stands in ``segments`` as text. Where the tables of all ranks would be too much for one file,
    each stands in a file of its own next to the file, the table file, and ``segments`` is the number of its bytes.
    ``digest`` is the SHA-256 of the table, and so of the table file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: _Name
    size: _Count
    rank: _Count
    keys: _Count
    digest: str
    segments: str | Annotated[int, Field(gt=0, lt=1 << 53)]

    @property
    def table_name(self) -> str:
        """The path of the table file; ``""`` if there is none."""
        return f"{self.name}{TABLE_SUFFIX}" if isinstance(self.segments, int) else ""

    def list_files(self) -> dict[str, int]:
        """Return the size in bytes, by name, of the file and of its table file, if it has one."""
        return {self.name: self.size} | ({self.table_name: self.segments} if isinstance(self.segments, int) else {})


class _Format(BaseModel):
    """The fields of ``shardckpt.json`` in every release."""

    model_config = _STRICT

    format: Annotated[int, Field(ge=1)]
    writer: dict[str, str] = {}


class SaveTimings(BaseModel):
    """When the phases of a save began, and how long they lasted, in seconds, as columns by rank.

    Phases: ``plan`` (from the call to the first byte), ``stage`` (copy for a background save), ``write``, ``sync``
    (fsync, the part of ``write`` that waits for it), ``commit`` (from the end of this rank's writing until the record
    of all ranks was written: it has the wait for the slowest). Time 0 is when the first rank began; the ranks' clocks
    are aligned at the message in which they agree on the save's id.
    """

    model_config = _STRICT

    #: Whether the save ran behind the training.
    background: bool = False
    #: The ranks of the columns: all; of many, the main rank and those whose writing ended last.
    ranks: _Column[_Count]
    #: Bytes that each of them wrote.
    nbytes: _Column[_Count]
    #: By phase, when it began; None where a rank did not have the phase.
    start: dict[str, _Column[float | None]]
    #: By phase, how long it lasted.
    seconds: dict[str, _Column[float | None]]
    #: By phase, the least, the median and the largest duration of all ranks.
    spread: dict[str, Annotated[tuple[float, float, float], _FROM_LIST]]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        columns = (self.nbytes, *self.start.values(), *self.seconds.values())
        if any(len(column) != len(self.ranks) for column in columns) or self.start.keys() != self.seconds.keys():
            raise ValueError("the columns of the timings have different lengths")
        return self


class Record(BaseModel):
    """``shardckpt.json``.

    Checkpoints with table files have format 3, those with files in folders format 2. All others have format 1, which is
    all that the first releases read: they refuse the formats that they do not know.
    """

    model_config = _STRICT

    format: Annotated[int, Field(ge=1, le=NEWEST_FORMAT)] = 1
    save_id: Annotated[str, Field(pattern=SAVE_ID)]
    backend: str
    version: _Count
    #: Oldest shardckpt (or plugin distribution) whose reader understands this version, for the gate's error.
    reader: str
    writer: dict[str, str]
    world_size: Annotated[int, Field(ge=1, lt=1 << 53)]
    digest_algorithm: str
    files: Annotated[tuple[FileRecord, ...], _FROM_LIST]
    #: The save id of the checkpoint that the job was resumed from, and the step of the training, if they were given.
    parent: Annotated[str, Field(pattern=SAVE_ID)] | None = None
    step: _Count | None = None
    #: The save's ``content_metadata``, if it is plain JSON; it is in the common state too.
    content_metadata: Any = None
    #: The times of each rank's work; None in a checkpoint of an earlier release, and where it was not measured.
    timings: SaveTimings | None = None
    #: SHA-256, in hex, of the file's bytes with zeros in the place of this digest.
    self_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = NO_DIGEST

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
        filled = self.model_copy(update={"self_digest": NO_DIGEST, "format": 3 if has_tables else least})
        # a checkpoint with table files is large, and so is its record: every rank of a load reads it
        text = filled.model_dump_json(indent=None if has_tables else 1)
        # from the right: the digest is the last field, and the caller's metadata before it may have the same digits
        head, _, tail = text.rpartition(NO_DIGEST)
        return (head + hashlib.sha256(text.encode()).hexdigest() + tail).encode()

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """Return the record in the bytes of ``shardckpt.json``.

        Raises:
            ValueError: they are not the bytes that were written.
            VersionTooNewError: a later release wrote them, in a format that this one does not know.
        """
        found = parse_json(data)
        known = _Format.model_validate(found)
        if known.format > NEWEST_FORMAT:
            release = known.writer.get("shardckpt", "")
            writer = f"written by shardckpt {release}" if release else "and does not say which release wrote it"
            raise VersionTooNewError(
                f"{RECORD_NAME} has format {known.format}, {writer}; this release, {__version__}, reads formats 1 to "
                f"{NEWEST_FORMAT}: upgrade shardckpt to the release that wrote it, or newer"
            )
        record = cls.model_validate(found)
        head, _, tail = data.rpartition(record.self_digest.encode())
        if hashlib.sha256(head + NO_DIGEST.encode() + tail).hexdigest() != record.self_digest:
            raise ValueError("its bytes are not those that were written (digest differs)")
        return record


class Integrity(BaseModel):
    """``integrity.json``: digests, in hex, by file name."""

    model_config = _STRICT

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
        return cls.model_validate(parse_json(data))


class Manifest(BaseModel):
    """The metadata of a checkpoint, read before any data file is opened."""

    model_config = ConfigDict(frozen=True)

    backend: str
    version: int
    #: Ours, or None for a checkpoint that another library wrote.
    record: Record | None = None
    #: Set where the checkpoint has no ``metadata.json`` and a strategy recognised it by content.
    recognised_as: str | None = None
    #: Name of the folder that has the files, after an overwrite at a URL; ``""`` if they are in the directory itself.
    folder: str = ""

    @property
    def save_id(self) -> str:
        """The id of the save, 32 hex digits that no other save has; ``""`` for a checkpoint of another library."""
        return "" if self.record is None else self.record.save_id

    @property
    def lineage(self) -> Lineage:
        """The checkpoint's parent and step, as it records them."""
        return Lineage() if self.record is None else Lineage(self.record.parent, self.record.step)
