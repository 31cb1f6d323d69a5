"""Checking a checkpoint's files against the digests of ``shardckpt.json`` and of Megatron's ``integrity.json``."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate, locate_local
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    RefusedByPolicyError,
    StorageError,
    format_many,
)
from shardckpt.manifest.models import Integrity, Manifest
from shardckpt.manifest.names import INTEGRITY_ALGORITHM, INTEGRITY_LIMIT, INTEGRITY_NAME, RECORD_NAME
from shardckpt.planning.shard_copies import assign_holders
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint, parse_file
from shardckpt.storage.directory import detect_replacement, replaced_error, retry_if_replaced, was_replaced
from shardckpt.storage.filesystem import (
    check_file_name,
    file_size,
    find_size,
    is_there,
    refuse_linked_folders,
    sync_directory,
    wrap_os_errors,
)
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.strategy import ChecksFiles, StoredFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from shardckpt.plugins.manager import PluginManager
    from shardckpt.strategy import LoadStrategy

_TEMPORARY = f"{INTEGRITY_NAME}.unfinished"
#: Errors of opening a file that does not exist; a link in its place raises an OSError with ELOOP.
_NOT_THE_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class ExpectedFile:
    """A file of a checkpoint that has a digest.

    The size comes from ``shardckpt.json``, or else from the file itself. The SHA-256 in hex comes from
    ``integrity.json``, or else, for a table file, from ``shardckpt.json``; ``""`` if it has none.
    """

    name: str
    nbytes: int
    sha256: str


def verify_integrity(directory: Path, manifest: Manifest, comm: Comm) -> None:
    """Collective: read every file once, and compare it with all its digests; ranks and threads share the work.

    The CorruptCheckpointError names every file that is missing or damaged. It is an error, too, if there are no
    digests.
    """

    def list_files() -> list[ExpectedFile]:
        files = list_digested_files(directory, manifest)
        if files is None:
            raise CheckpointingException(
                f"{directory} was saved without digests: it has neither {RECORD_NAME} nor {INTEGRITY_NAME}, and there "
                "is nothing to check it against; load it without verify_integrity, or load it and save it again"
            )
        return files

    files = comm.main_runs("reading the digests", list_files)
    owners = assign_holders([tuple(range(comm.world_size))] * len(files), [file.nbytes for file in files])
    with comm.local_phase("checking files"):
        mine = [file for file, owner in zip(files, owners, strict=True) if owner == comm.rank]
        errors = find_faults(directory, manifest, mine)
        faults = [(file.name, str(error)) for file, error in zip(mine, errors, strict=True) if error is not None]
    everyone = comm.all_gather(faults)  # every rank names the files of all, since every rank raises
    with comm.local_phase("comparing digests"):
        bad = sorted(found for part in everyone for found in part)
        if bad:
            listed = "".join(f"\n  {name}: {fault}" for name, fault in bad)
            total = format_many(len(files), "file")
            raise CorruptCheckpointError(f"{directory}: {len(bad)} of {total} not as written:{listed}")


def list_digested_files(directory: Path, manifest: Manifest) -> list[ExpectedFile] | None:
    """Return the files that have a digest, sorted by name; None if the checkpoint was saved without digests."""
    integrity = read_integrity(directory)
    if integrity is None and manifest.record is None:
        return None
    sizes = {} if manifest.record is None else manifest.record.list_files()
    hashes = _list_table_digests(manifest) | ({} if integrity is None else integrity.files)
    return [
        ExpectedFile(name, sizes[name] if name in sizes else find_size(directory / name), hashes.get(name, ""))
        for name in sorted({*sizes, *hashes})
    ]


def _list_table_digests(manifest: Manifest) -> dict[str, str]:
    """Return the SHA-256 of every table file by its name: the digest of the file whose table it has."""
    files = () if manifest.record is None else manifest.record.files
    return {file.table_name: file.digest for file in files if file.table_name}


def find_faults(
    directory: Path, manifest: Manifest, files: Sequence[ExpectedFile], count: Callable[[int], None] | None = None
) -> list[CheckpointingException | None]:
    """Read files, and compare them with their digests; threads share the work. Not collective.

    Returns for each file, in order, the error, also if it could not be read, or None if it is as written. Each thread
    calls ``count`` with the number of bytes that it has read since the last call.
    """
    contents = _Contents(directory, manifest, count)
    return contents.reader.map(contents.find_fault, files, size=lambda file: file.nbytes)


def is_damage(error: CheckpointingException) -> bool:
    """Return whether an error means that a file is missing or not as written, not only that it could not be read."""
    # the reader wraps the system's error, perhaps several times: the innermost error decides
    cause: BaseException | None = error
    while isinstance(cause, StorageError):
        cause = cause.__cause__
    return isinstance(cause, (CorruptCheckpointError, *_NOT_THE_FILE)) or (
        isinstance(cause, OSError) and cause.errno == errno.ELOOP
    )


class IncompleteFile(NamedTuple):
    """A file of a checkpoint that is missing or has the wrong size.

    Attributes:
        name: Its name.
        fault: The fault, for errors: ``"is missing"``.
        keys: The tensors and objects that have lost bytes in it; empty if that is not known.
        kept: Keys whose bytes in the file all come before its end as it is now.
    """

    name: str
    fault: str
    keys: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def find_incomplete_files(strategy: LoadStrategy | None, reader: CheckpointReader) -> list[IncompleteFile]:
    """Return the files that are missing or have the wrong size; no data file is opened. Not collective.

    If the strategy :class:`ChecksFiles`, its files are checked, too; without one only the files of ``shardckpt.json``,
    and the index is not read. It is a CheckpointReplacedError if they are gone because another save has replaced the
    checkpoint.
    """
    record = reader.manifest.record
    sizes = {} if record is None else record.list_files()
    # a record has all files and their sizes: the index, which may be large, is only read for the keys of bad ones
    indexed = {} if strategy is None or record is not None else _list_indexed_files(strategy, reader)
    found, left = list[IncompleteFile](), dict[str, int]()
    for name in sorted({*sizes, *indexed}):
        size, file = _find_size(reader.place, name), indexed.get(name, StoredFile(name))
        if fault := _find_size_fault(size, sizes.get(name), file.nbytes) or file.fault:
            found.append(IncompleteFile(name, fault))
            # nothing is left of a missing file, nor of one that is longer than the record says: it is another
            left[name] = size if size is not None and size <= sizes.get(name, size) else 0
    if found and strategy is not None:
        indexed = indexed or _list_indexed_files(strategy, reader)
        found = [
            IncompleteFile(name, fault, *indexed[name].split_keys(left[name]) if name in indexed else ())
            for name, fault, *_ in found
        ]
    if found and reader.was_replaced():  # the files of a checkpoint that is replaced are deleted: they are no fault
        raise replaced_error(reader.directory, f"{found[0].name} {found[0].fault}")
    return found


def _list_indexed_files(strategy: LoadStrategy, reader: CheckpointReader) -> dict[str, StoredFile]:
    """Return the files that the index names, by name; empty if the strategy cannot tell."""
    return {file.name: file for file in strategy.list_files(reader)} if isinstance(strategy, ChecksFiles) else {}


def _find_size(directory: Path, name: str) -> int | None:
    """Return a file's size in bytes; None if it is missing."""
    try:
        refuse_linked_folders(directory, name)
        with wrap_os_errors("access", directory / name):
            return file_size(directory / name)
    except StorageError as exc:
        if is_damage(exc):
            return None
        raise


def _find_size_fault(found: int | None, written: int | None, least: int) -> str:
    """Return the fault of a file's size; ``""`` if it has the recorded size and at least ``least`` bytes."""
    if found is None:
        return "is missing"
    if written not in (None, found):
        return f"has {found:,} bytes, {written:,} were written"
    return f"has {found:,} bytes, and needs {least:,}" if found < least else ""


def read_integrity(directory: Path) -> Integrity | None:
    """Return the content of ``integrity.json``; None if there is no such file.

    It is a CorruptCheckpointError if it is damaged, has names that no file of a checkpoint can have, or another
    algorithm.
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
    return found


def list_recorded_files(directory: Path, manifest: Manifest) -> dict[str, int | None]:
    """Return the files that ``shardckpt.json`` or else ``integrity.json`` lists, with sizes in bytes.

    A size that is not recorded is None. There are none if the checkpoint has neither file.
    """
    if manifest.record is not None:
        return dict(manifest.record.list_files())
    integrity = read_integrity(directory)
    return {} if integrity is None else dict.fromkeys(integrity.files)


def refuse_damage(directory: Path, reader: CheckpointReader, plugins: PluginManager) -> None:
    """Raise the first fault of a checkpoint without digests, before it gets some: they would say that it is right.

    Faults are those that its index and its archives show. A checkpoint with a record, or one that no installed strategy
    reads, is not examined.
    """
    if reader.manifest.record is not None:
        return
    try:
        strategy = choose_reader(directory, reader.manifest, plugins)
    except RefusedByPolicyError:
        raise
    except CannotLoadError:  # of a version that nothing reads but a migration
        return
    if isinstance(strategy, ChecksFiles):
        for error in filter(None, strategy.check_files(reader).values()):
            raise error


def save_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write ``integrity.json`` for a checkpoint that has none, with all its files. Not collective: one process calls.

    ``save(..., verify_integrity=True)`` writes it while it saves; this function reads every file again. It takes a
    directory, not a URL. It is a CorruptCheckpointError if a file is damaged already, by the digests of
    ``shardckpt.json``; or, where there are none, by the index and the CRC-32 of archives.
    """
    directory = locate_local(checkpoint_dir, "write integrity.json into")
    place, manifest = hold_checkpoint(directory, get_plugin_manager())
    contents = _Contents(place, manifest)
    refuse_damage(directory, contents.reader, get_plugin_manager())
    with wrap_os_errors("list", directory):
        (directory / _TEMPORARY).unlink(missing_ok=True)
        found = {path.name for path in directory.iterdir() if path.is_file() and not path.is_symlink()}
    # of files in folders only those with a record: other libraries give them names that no list of files may have
    found.update(() if manifest.record is None else manifest.record.list_files())
    # a reader opens another library's files under any name, but refuses such names in a list of files
    names = [check_file_name(name) for name in sorted(found) if name != INTEGRITY_NAME]
    hashes = contents.reader.map(contents.sha256, names, size=lambda name: find_size(directory / name))
    # renamed when it is complete, so that a crash leaves no truncated integrity.json, which would fail every load
    with CheckpointWriter(directory, 0) as writer:
        writer.write(_TEMPORARY, Integrity(files=dict(zip(names, hashes, strict=True))).dump())
    if was_replaced(place):
        (directory / _TEMPORARY).unlink(missing_ok=True)
        raise replaced_error(directory, f"{INTEGRITY_NAME} would have digests of another save's files")
    with wrap_os_errors(f"rename {_TEMPORARY} to", directory / INTEGRITY_NAME):
        os.rename(directory / _TEMPORARY, directory / INTEGRITY_NAME)
    sync_directory(directory)


def verify_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Check a checkpoint's files against all digests. Not collective: :func:`verify_integrity` in this process alone.

    The error names every file that is missing or damaged. It is an error, too, if there is no ``integrity.json``.
    """

    def attempt() -> None:
        directory, manifest = hold_checkpoint(locate(checkpoint_dir, get_plugin_manager()), get_plugin_manager())
        with detect_replacement(directory):
            if not is_there(directory / INTEGRITY_NAME):
                raise CheckpointingException(
                    f"{directory} has no {INTEGRITY_NAME}: save with verify_integrity=True, or write one for a "
                    "checkpoint that is known to be undamaged by save_integrity_manifest"
                )
            verify_integrity(directory, manifest, Comm(alone=True))

    retry_if_replaced(attempt, checkpoint_dir)


class _Contents:
    """Reads a checkpoint's files, each once for all its digests."""

    def __init__(self, directory: Path, manifest: Manifest, count: Callable[[int], None] | None = None) -> None:
        self._directory = directory
        self._count = count
        self._recorded = frozenset(file.name for file in manifest.record.files) if manifest.record else frozenset()
        self.reader = CheckpointReader(directory, manifest, verify=True)
        self._tables = _list_table_digests(manifest)
        # for table files, and files that shardckpt.json does not list, such as itself: they have only a SHA-256
        self._other = CheckpointReader(directory, Manifest(backend=manifest.backend, version=manifest.version))

    def sha256(self, name: str) -> str:
        """Return a file's SHA-256, in hex; raise CorruptCheckpointError if the digests of its record do not match."""
        found = hashlib.sha256()
        for block in self._blocks(name):
            found.update(block)
        return found.hexdigest()

    def find_fault(self, file: ExpectedFile) -> CheckpointingException | None:
        """Return the fault of a file, or None."""
        try:
            if not file.sha256:
                for _ in self._blocks(file.name):  # the reader compares them with the digests of shardckpt.json
                    pass
                return None
            # for a table file the size is compared first: a file that has taken its place may have any size
            if file.name in self._tables:
                size = _find_size(self._directory, file.name)
                if fault := _find_size_fault(size, file.nbytes, 0):
                    return CorruptCheckpointError(f"{self._directory / file.name} {fault}")
            found = self.sha256(file.name)
        except CheckpointReplacedError:  # no fault of the file: the caller reads the new checkpoint from the start
            raise
        except CheckpointingException as exc:
            return exc
        if found == file.sha256:
            return None
        source = RECORD_NAME if self._tables.get(file.name) == file.sha256 else INTEGRITY_NAME
        return CorruptCheckpointError(
            f"the SHA-256 of {self._directory / file.name} is {found}, {source} has {file.sha256}"
        )

    def _blocks(self, name: str) -> Iterator[memoryview]:
        for block in (self.reader if name in self._recorded else self._other).blocks(name):
            yield block
            if self._count is not None:
                self._count(block.nbytes)
