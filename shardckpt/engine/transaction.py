"""From a staging directory to a commit: what stands at the target changes in one step, or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.engine.pruning import clear_leftovers, owned_files, supersedes
from shardckpt.errors import StorageError, listed
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME, Integrity, Marker, Record
from shardckpt.storage import (
    CRC32,
    CheckpointWriter,
    Owner,
    Upload,
    create_staging,
    discard_staging,
    is_free,
    new_save_id,
    on_store,
    preferred,
    publish_staging,
    refuse_unrecorded,
    replace_target,
    staging_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.engine.operation import Operation
    from shardckpt.manifest import FileRecord

logger = logging.getLogger(__name__)

#: A save's name and owner, 128 bits each, travel as numbers of so many bits, which have these places in them.
_BITS = 52
_PLACES = tuple(_BITS * number for number in range(5))
_DIGEST = re.compile("[0-9a-f]{64}")


class Identity(NamedTuple):
    """What a checkpoint says of itself: backend, version, and the oldest release that reads it."""

    backend: str
    version: int
    reader: str


class Written(NamedTuple):
    """Files that a rank has completed: their records, and their SHA-256 where the save asks for it."""

    files: list[FileRecord]
    sha256: dict[str, str]


class Transaction:
    """A save between its staging directory and its commit; all ranks begin one together.

    A target of this machine has one staging directory for all ranks; for a store each rank has its own, from which it
    uploads.

    Args:
        operation: The save or migration.
        target: The checkpoint's directory or URL.
        identity: What it will say of itself.
        overwrite: Whether an existing checkpoint, or other files, may stand at ``target``; at a URL only the leavings
            of a save that never ended.
        sha256: Whether to write ``integrity.json``.
    """

    def __init__(
        self, operation: Operation, target: Path, identity: Identity, *, overwrite: bool, sha256: bool = False
    ) -> None:
        self.operation = operation
        self.target = target
        self._identity = identity
        self._overwrite = overwrite
        self.sha256 = sha256
        self.staging: Path | None = None
        self.save_id = ""
        #: Of the digests in all files, of every rank: the preferred one, if every rank has it.
        self.algorithm = ""
        #: How many ranks write, for the record.
        self.world_size = operation.comm.world_size
        self._upload: Upload | None = None
        try:
            with operation.local_phase("staging"):
                if (remote := on_store(target)) is not None:
                    self._upload = Upload(remote.folder, MARKER_NAME)
                if operation.comm.is_main:
                    self.save_id = new_save_id()
                    self._take_target()
            owner = self._tell()
            if self._upload is not None:
                self.staging, self._upload.save_id = self._upload.spool, self.save_id
            else:
                self.staging = staging_path(target, self.save_id, owner)
        except BaseException:
            self.abort()
            raise

    @property
    def url(self) -> str:
        """Where files of the staging directory are to be uploaded when they are written; ``""`` for nowhere."""
        remote = on_store(self.target)
        return "" if remote is None else remote.url

    def writer(self) -> CheckpointWriter:
        """A writer of this rank's files."""
        with self.operation.comm.local_phase("starting the file threads"):
            rank, staging = self.operation.comm.rank, self.staging or Path()
            writer = CheckpointWriter(staging, rank, sha256=self.sha256, algorithm=self.algorithm)
        return writer

    def commit(self, writer: CheckpointWriter, before: Written | None = None, content: Any = None) -> None:
        """Make the files of all ranks the checkpoint; it is one after the next sync of errors.

        Args:
            writer: Has written this rank's files; writes those that make them valid.
            before: What was written for this rank by another writer.
            content: The caller's ``content_metadata``.
        """
        comm = self.operation.comm
        with comm.local_phase("looking at the files of this rank"):
            added = writer.recorded_files()
        files = added if before is None else before.files + added
        sha256 = writer.sha256 if before is None else {**before.sha256, **writer.sha256}
        if self._upload is not None:
            with self.operation.local_phase("uploading"):
                self._upload.check([file.name for file in files])
                self._upload.put([file.name for file in added])
            self._upload.hand_over()
        everyone = comm.gather(Written(files, sha256))
        self.operation.wrote(sum(file.size for file in files))
        with self.operation.local_phase("committing"):
            if comm.is_main:
                _check_records([file for part in everyone for file in part.files])
                self._write_markers(writer, everyone, content)
                self._publish(writer, everyone)
        if self._upload is not None:
            self._upload.close()

    def abort(self) -> None:
        """Give up: nothing of the save remains."""
        if self._upload is not None:
            self._upload.abort(main=self.operation.comm.is_main)
        elif self.operation.comm.is_main and self.staging is not None and self.staging.exists():
            discard_staging(self.staging)

    def _tell(self) -> Owner:
        """Let all ranks know the save's name and its owner, the main rank's process, which commits it.

        In the same message they learn whether one of them lacks the preferred digest.
        """
        number = int(self.save_id + Owner.current().text, 16) if self.save_id else 0
        parts = (number >> place & (1 << _BITS) - 1 for place in _PLACES)
        lacks, *found = self.operation.comm.largest(preferred() == CRC32, *parts)
        number = sum(part << place for part, place in zip(found, _PLACES, strict=True))
        self.save_id = f"{number >> 128:032x}"
        self.algorithm = CRC32 if lacks else preferred()
        return Owner.from_number(number & (1 << 128) - 1)

    def _take_target(self) -> None:
        """On the main rank: see that the target may be saved to, and begin."""
        if self._upload is not None:
            self._upload.begin(self.save_id, overwrite=self._overwrite)
            return
        self._check_target()
        clear_leftovers(self.target, supersedes(self.operation.host), restore=self._overwrite)
        self.staging = create_staging(self.target, self.save_id)

    def _check_target(self) -> None:
        if not self._overwrite and not is_free(self.target):
            raise StorageError(
                f"{self.target} is not empty: give another directory, or pass overwrite=True to replace it"
            )

    def _write_markers(self, writer: CheckpointWriter, everyone: list[Written], content: Any) -> None:
        backend, version, reader = self._identity
        files = [file for part in everyone for file in part.files]
        record = Record(
            save_id=self.save_id,
            backend=backend,
            version=version,
            reader=reader,
            writer={"shardckpt": importlib.metadata.version("shardckpt"), "torch": torch.__version__},
            world_size=self.world_size,
            digest_algorithm=self.algorithm,
            files=tuple(sorted(files, key=lambda file: file.name)),
            content_metadata=as_json(content),
        )
        marker = Marker(sharded_backend=backend, sharded_backend_version=version)
        contents = {RECORD_NAME: record.dump(), MARKER_NAME: marker.model_dump_json().encode()}
        for file in [writer.begin(name, content, keys=0) for name, content in contents.items()]:
            writer.finish(file)
        if self.sha256:
            hashes = {name: digest for part in everyone for name, digest in part.sha256.items()}
            writer.write(INTEGRITY_NAME, Integrity(files={**hashes, **writer.sha256}).dump(), keys=0)

    def _publish(self, writer: CheckpointWriter, everyone: list[Written]) -> None:
        files = [file for part in everyone for file in part.files]
        known = {file.name for file in files}
        if self._upload is not None:
            added = [file for file in writer.files if file.name not in {*known, MARKER_NAME}]
            self._upload.put([file.name for file in added])
            self._upload.commit(files + added)
            return
        staging = self.staging or Path()
        refuse_unrecorded(staging, known.union(file.name for file in writer.files))
        if is_free(self.target):
            publish_staging(staging, self.target)
            return
        self._check_target()  # another save may have come first
        replace_target(staging, self.target, owned_files(self.target, self.operation.host))


def commit_files(
    operation: Operation,
    target: Path,
    identity: Identity,
    write: Callable[[CheckpointWriter, str], None],
    *,
    overwrite: bool,
    sha256: bool = False,
    content: Any = None,
) -> None:
    """Let all ranks write into a staging directory, and make it the target if every one of them succeeded.

    Args:
        operation: The save or migration.
        target: The checkpoint's directory or URL.
        identity: What it will say of itself.
        write: Writes this rank's files; gets the writer and the save's id.
        overwrite: Whether an existing checkpoint, or other files, may stand at ``target``.
        sha256: Whether to write ``integrity.json``.
        content: The caller's ``content_metadata``.
    """
    transaction = Transaction(operation, target, identity, overwrite=overwrite, sha256=sha256)
    try:
        with transaction.writer() as writer:
            operation.comm.sync_errors()  # ranks may meet in smaller groups now, and write for hours
            with operation.local_phase("writing"):
                write(writer, transaction.save_id)
            transaction.commit(writer, content=content)
    except BaseException:
        transaction.abort()
        raise


def as_json(content: Any) -> Any:
    """A copy of the value as JSON gives it back, if that is the same; else None."""
    try:
        copy = json.loads(json.dumps(content))
    except (TypeError, ValueError, RecursionError):
        return None
    return copy if copy == content else None


def _check_records(files: list[FileRecord]) -> None:
    """Whether every file of all ranks has one record, with digests."""
    counts = Counter(file.name for file in files)
    twice = [f"{file.name!r} by rank {file.rank}" for file in files if counts[file.name] > 1]
    if twice:
        raise StorageError(f"files were recorded twice: {listed(twice)}; put the rank's number into their names")
    bare = [repr(file.name) for file in files if not (_DIGEST.fullmatch(file.digest) and file.segments)]
    if bare:
        raise StorageError(
            f"files were recorded without digests: {listed(bare)}; write them by the checkpoint's writer, or adopt them"
        )


__all__ = ["Identity", "Transaction", "Written", "as_json", "commit_files"]
