"""Whether a checkpoint's files are as they were written: by our own digests and by Megatron's ``integrity.json``."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.distributed import Comm
from shardckpt.engine.locations import locate, locate_local
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError, StorageError
from shardckpt.manifest import INTEGRITY_ALGORITHM, INTEGRITY_LIMIT, INTEGRITY_NAME, RECORD_NAME, Integrity, Manifest
from shardckpt.planning import assign_holders
from shardckpt.plugins import hold_checkpoint, host, parse_file
from shardckpt.storage import (
    CheckpointReader,
    CheckpointWriter,
    check_file_name,
    detect_replacement,
    file_size,
    is_there,
    naming,
    replaced_error,
    retry_if_replaced,
    sync_directory,
    was_replaced,
)
from shardckpt.strategy import ChecksFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.strategy import LoadStrategy

_UNFINISHED = f"{INTEGRITY_NAME}.unfinished"
#: What says that there is no such file, beside ELOOP for a link in its place.
_NOT_THE_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class ExpectedFile:
    """A file of a checkpoint, and what is known of it.

    Attributes:
        name: Its name in the directory.
        nbytes: Its size: as it was written where that is known, else as it is.
        sha256: What ``integrity.json`` has for it, in hex; ``""`` for nothing.
    """

    name: str
    nbytes: int
    sha256: str


def verify_integrity(directory: Path, manifest: Manifest, comm: Comm) -> None:
    """Read every file once, and compare it with all digests that there are; ranks and threads share the work.

    Args:
        directory: The checkpoint.
        manifest: What it says of itself.
        comm: The ranks, all of which call.

    Raises:
        CorruptCheckpointError: names every file that is missing or not as it was written.
        CheckpointingException: there are no digests.
    """
    files = comm.main_runs("reading the digests", lambda: expected_files(directory, manifest))
    owners = assign_holders([tuple(range(comm.world_size))] * len(files), [file.nbytes for file in files])
    with comm.local_phase("checking files"):
        mine = [file for file, owner in zip(files, owners, strict=True) if owner == comm.rank]
        errors = find_faults(directory, manifest, mine)
        faults = [(file.name, str(error)) for file, error in zip(mine, errors, strict=True) if error is not None]
    everyone = comm.all_gather(faults)
    with comm.local_phase("comparing digests"):
        bad = sorted(found for part in everyone for found in part)
        if bad:
            listed = "".join(f"\n  {name}: {fault}" for name, fault in bad)
            raise CorruptCheckpointError(f"{directory}: of {len(files)} files {len(bad)} are not as written:{listed}")


def expected_files(directory: Path, manifest: Manifest) -> list[ExpectedFile]:
    """Every file that ``shardckpt.json`` or ``integrity.json`` has a digest of, by name.

    Raises:
        CheckpointingException: the checkpoint has neither, or one that is damaged.
    """
    files = digested_files(directory, manifest)
    if files is None:
        raise CheckpointingException(
            f"{directory} was saved without digests: it has neither {RECORD_NAME} nor {INTEGRITY_NAME}, and there is "
            "nothing to check it against; load it without verify_integrity, or load it and save it again"
        )
    return files


def digested_files(directory: Path, manifest: Manifest) -> list[ExpectedFile] | None:
    """Every file of which there is a digest, by name; None where the checkpoint was saved without any.

    Raises:
        CorruptCheckpointError: what has the digests is damaged.
    """
    integrity = read_integrity(directory)
    if integrity is None and manifest.record is None:
        return None
    sizes = {} if manifest.record is None else {file.name: file.size for file in manifest.record.files}
    hashes = {} if integrity is None else integrity.files
    return [
        ExpectedFile(name, sizes[name] if name in sizes else _size(directory / name), hashes.get(name, ""))
        for name in sorted({*sizes, *hashes})
    ]


def find_faults(
    directory: Path, manifest: Manifest, files: Sequence[ExpectedFile]
) -> list[CheckpointingException | None]:
    """What is wrong with each of the files, or why it could not be read; None for nothing."""
    contents = _Contents(directory, manifest)
    return contents.reader.map(contents.fault, files, size=lambda file: file.nbytes)


def is_damage(error: CheckpointingException) -> bool:
    """Whether an error says that a file is missing or not what was written; else only that it could not be read."""
    cause: BaseException | None = error
    while isinstance(cause, StorageError):
        cause = cause.__cause__
    return isinstance(cause, (CorruptCheckpointError, *_NOT_THE_FILE)) or (
        isinstance(cause, OSError) and cause.errno == errno.ELOOP
    )


class UnfitFile(NamedTuple):
    """A file of a checkpoint that is missing, or too short for what is in it.

    Attributes:
        name: Its name.
        fault: What is wrong with it.
        keys: The tensors and objects that are in it, or parts of them; none where nothing says so.
    """

    name: str
    fault: str
    keys: tuple[str, ...]


def find_unfit_files(strategy: LoadStrategy, reader: CheckpointReader) -> list[UnfitFile]:
    """The files that are missing or have not the size that they need; no data file is opened for it.

    Raises:
        CheckpointReplacedError: the files are gone because another save has replaced the checkpoint.
    """
    record = reader.manifest.record
    sizes = {} if record is None else {file.name: file.size for file in record.files}
    listed = {file.name: file for file in strategy.list_files(reader)} if isinstance(strategy, ChecksFiles) else {}
    found = []
    for name in sorted({*sizes, *listed}):
        least = listed[name].nbytes if name in listed else 0
        fault = _size_fault(reader.place / name, sizes.get(name), least)
        if fault:
            found.append(UnfitFile(name, fault, listed[name].keys if name in listed else ()))
    if found and reader.was_replaced():
        raise replaced_error(reader.directory, f"{found[0].name} {found[0].fault}")
    return found


def _size_fault(path: Path, written: int | None, least: int) -> str:
    try:
        with naming("look at", path):
            found = file_size(path)
    except StorageError as exc:
        if is_damage(exc):
            return "is missing"
        raise
    if written not in (None, found):
        return f"has {found:,} bytes, {written:,} were written"
    return f"has {found:,} bytes, and needs {least:,}" if found < least else ""


def read_integrity(directory: Path) -> Integrity | None:
    """What ``integrity.json`` says; None if there is none.

    Raises:
        CorruptCheckpointError: it is damaged, names files that cannot be the checkpoint's, or has other digests.
    """
    path = directory / INTEGRITY_NAME
    if not is_there(path):
        return None
    found = parse_file(Integrity.parse, path, INTEGRITY_LIMIT)
    if found.algorithm != INTEGRITY_ALGORITHM:
        raise CorruptCheckpointError(
            f"{path}: its digests are {found.algorithm!r}, and this release checks {INTEGRITY_ALGORITHM!r}; upgrade "
            "shardckpt, or load without verify_integrity"
        )
    for name in found.files:
        check_file_name(name)
    return found


def named_files(directory: Path, manifest: Manifest) -> dict[str, int | None]:
    """The files that a checkpoint says it has, each with its bytes where it says them; empty where it says nothing."""
    if manifest.record is not None:
        return {file.name: file.size for file in manifest.record.files}
    integrity = read_integrity(directory)
    return {} if integrity is None else dict.fromkeys(integrity.files)


def save_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write ``integrity.json`` for a checkpoint that has none, over all files beside it; one process calls.

    ``save(..., verify_integrity=True)`` does it while it writes; this reads every file again.

    Raises:
        CorruptCheckpointError: a file is not as it was written already, by the digests of ``shardckpt.json``.
    """
    directory = locate_local(checkpoint_dir, "write integrity.json into")
    place, manifest = hold_checkpoint(directory, host())
    contents = _Contents(place, manifest)
    with naming("list", directory):
        (directory / _UNFINISHED).unlink(missing_ok=True)
        found = sorted(path.name for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    names = [name for name in found if name != INTEGRITY_NAME]
    hashes = contents.reader.map(contents.sha256, names, size=lambda name: _size(directory / name))
    with CheckpointWriter(directory, 0) as writer:
        writer.write(_UNFINISHED, Integrity(files=dict(zip(names, hashes, strict=True))).dump())
    if was_replaced(place):
        (directory / _UNFINISHED).unlink(missing_ok=True)
        raise replaced_error(directory, f"{INTEGRITY_NAME} would have digests of another save's files")
    with naming(f"rename {_UNFINISHED} to", directory / INTEGRITY_NAME):
        os.rename(directory / _UNFINISHED, directory / INTEGRITY_NAME)
    sync_directory(directory)


def verify_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Check a checkpoint's files as :func:`verify_integrity` does, in this process alone.

    Raises:
        CorruptCheckpointError: names every file that is missing or not as it was written.
        CheckpointingException: there is no ``integrity.json``.
    """

    def attempt() -> None:
        directory, manifest = hold_checkpoint(locate(checkpoint_dir, host()), host())
        with detect_replacement(directory):
            if not is_there(directory / INTEGRITY_NAME):
                raise CheckpointingException(
                    f"{directory} has no {INTEGRITY_NAME}: save with verify_integrity=True, or write one for a "
                    "checkpoint that is known to be sound by save_integrity_manifest"
                )
            verify_integrity(directory, manifest, Comm(alone=True))

    retry_if_replaced(attempt, checkpoint_dir)


class _Contents:
    """The bytes of a checkpoint's files, each read once for all its digests, and open only meanwhile."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._recorded = frozenset(file.name for file in manifest.record.files) if manifest.record else frozenset()
        self.reader = CheckpointReader(directory, manifest, verify=True)
        self._other = CheckpointReader(directory, Manifest(backend=manifest.backend, version=manifest.version))

    def sha256(self, name: str) -> str:
        """The file's SHA-256, in hex; CorruptCheckpointError if our own digests are of other bytes."""
        found = hashlib.sha256()
        for block in self._reader_of(name).blocks(name):
            found.update(block)
        return found.hexdigest()

    def fault(self, file: ExpectedFile) -> CheckpointingException | None:
        """What is wrong with a file."""
        try:
            if not file.sha256:
                self._read(file.name)
                return None
            found = self.sha256(file.name)
        except CheckpointReplacedError:
            raise
        except CheckpointingException as exc:
            return exc
        if found == file.sha256:
            return None
        return CorruptCheckpointError(
            f"the SHA-256 of {self._directory / file.name} is {found}, {INTEGRITY_NAME} has {file.sha256}"
        )

    def _read(self, name: str) -> None:
        for _ in self._reader_of(name).blocks(name):
            pass

    def _reader_of(self, name: str) -> CheckpointReader:
        return self.reader if name in self._recorded else self._other


def _size(path: Path) -> int:
    try:
        return file_size(path)
    except OSError:  # it is missing: reading it will say so
        return 0


__all__ = [
    "INTEGRITY_LIMIT",
    "INTEGRITY_NAME",
    "ExpectedFile",
    "Integrity",
    "UnfitFile",
    "digested_files",
    "expected_files",
    "find_faults",
    "find_unfit_files",
    "is_damage",
    "named_files",
    "read_integrity",
    "save_integrity_manifest",
    "verify_integrity",
    "verify_integrity_manifest",
]
