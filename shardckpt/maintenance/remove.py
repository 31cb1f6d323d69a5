"""Removing keys from a stored checkpoint: new files without them, links to all others, one exchange of directories."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.commit.commit import check_target, replace_target, staging_directory
from shardckpt.engine.integrity import ExpectedFile, find_faults, read_integrity
from shardckpt.engine.operation import Operation
from shardckpt.engine.pruning import clear_leftovers, make_superseded_check
from shardckpt.engine.space import REMOVE, refuse_full
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, format_many
from shardckpt.maintenance.rewrite import rewrite_file
from shardckpt.manifest.models import Integrity
from shardckpt.manifest.names import FINGERPRINTS_NAME, INTEGRITY_NAME, RECORD_NAME
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.storage.disk_usage import allocated_bytes
from shardckpt.storage.filesystem import is_there, wrap_os_errors
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.sums import pack_fingerprints, read_fingerprints
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.strategy import RemovesKeys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.distributed.comm import Comm
    from shardckpt.manifest.models import Manifest, Record
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.strategy import Removal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemovalReport:
    """The result of a removal of keys; with ``dry_run``, its forecast.

    Attributes:
        keys: The removed keys, sorted.
        dropped: The deleted files: they had nothing else.
        rewritten: The data files that were rewritten without the removed bytes.
        bytes_before: Bytes of the directory on disk before, as ``du`` counts them.
        bytes_after: Bytes after; with ``dry_run`` an estimate, correct to a few blocks.
    """

    keys: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0


def remove_keys(
    directory: Path, prefix: str, comm: Comm, plugins: PluginManager, *, dry_run: bool = False
) -> RemovalReport:
    """Collective: remove keys, on the main rank; see :func:`shardckpt.dist_checkpointing.remove_sharded_tensors`.

    Return a report of the removal; the same on every rank.
    """
    operation = Operation("remove", directory, comm, plugins)
    with operation.collective_span():
        with operation.local_phase("comparing the arguments"):
            comm.agree(key_prefix=prefix, dry_run=dry_run)
        with operation.local_phase("removing keys"):
            report = comm.main_runs(
                "removing keys",
                lambda: retry_if_replaced(lambda: _remove(directory, prefix, operation, dry_run=dry_run), directory),
            )
    return report


def _remove(directory: Path, prefix: str, operation: Operation, *, dry_run: bool) -> RemovalReport:
    if not prefix:
        raise CheckpointingException(f"the prefix is {prefix!r}: give the text that the keys to be removed begin with")
    if not dry_run:
        check_target(directory, overwrite=True)
        clear_leftovers(directory, make_superseded_check(operation.plugins), restore=True)
    place, manifest = hold_checkpoint(directory, operation.plugins)
    if manifest.folder:
        raise CheckpointingException(
            f"{directory} is a copy of a URL whose checkpoint was overwritten, and has its files in {manifest.folder}: "
            f"remove keys from {directory / manifest.folder}, which is a checkpoint of its own"
        )
    strategy = choose_reader(directory, manifest, operation.plugins)
    operation.set_strategy(strategy)
    if not isinstance(strategy, RemovesKeys):
        raise CheckpointingException(
            f"{directory} is a {manifest.backend!r} checkpoint, and its {type(strategy).__name__} cannot remove "
            "keys: load the keys to keep, and save them"
        )
    with wrap_os_errors("access", directory):
        before = allocated_bytes(directory)
    with CheckpointReader(place, manifest, verify=True) as reader:
        removal = strategy.remove(prefix, reader)
        if not removal.keys:
            return RemovalReport(bytes_before=before, bytes_after=before)
        removal = _renew_fingerprints(reader, removal)
        if not dry_run:
            rewritten = sum(item.nbytes for items in removal.rewritten.values() for item in items)
            refuse_full(directory, rewritten, REMOVE)
            operation.start_progress(lambda: rewritten)
            _replace(directory, reader, removal, operation.count)
    with wrap_os_errors("access", directory):
        after = before + _growth(directory, removal) if dry_run else allocated_bytes(directory)
    report = RemovalReport(
        tuple(sorted(removal.keys)), tuple(sorted(removal.dropped)), tuple(sorted(removal.rewritten)), before, after
    )
    if not dry_run:
        many = format_many(len(report.keys), "key")
        logger.info("removed %s from %s, which takes %d bytes of %d", many, directory, after, before)
    return report


def _renew_fingerprints(reader: CheckpointReader, removal: Removal) -> Removal:
    """Return the removal with the file of fingerprints without the removed keys, if there is such a file."""
    record = reader.manifest.record
    if record is None or FINGERPRINTS_NAME not in record.list_files():
        return removal
    found = read_fingerprints(reader)
    kept = {key: value for key, value in found.items() if key not in removal.keys}
    return replace(removal, renewed={**removal.renewed, FINGERPRINTS_NAME: pack_fingerprints(kept)})


def _growth(directory: Path, removal: Removal) -> int:
    """Return how many bytes the directory would grow on disk, if the files with digests keep their size."""
    new = {name: len(content) for name, content in removal.renewed.items()}
    new |= {name: items[-1].to + items[-1].nbytes for name, items in removal.rewritten.items()}
    growth, block = 0, os.statvfs(directory).f_frsize
    for path in (directory / name for name in {*new, *removal.dropped}):
        growth -= allocated_bytes(path) if is_there(path) else 0
    return growth + sum(-(-nbytes // block) * block for nbytes in new.values())


def _replace(
    directory: Path, reader: CheckpointReader, removal: Removal, count_bytes: Callable[[int], None] | None
) -> None:
    """Write the new checkpoint next to the old one, with links to the files that do not change; exchange the two."""
    manifest, integrity = reader.manifest, read_integrity(reader.place)
    if integrity is not None:
        _check_sources(reader.place, manifest, integrity, removal)
    opened = reader.place.stat()
    with staging_directory(directory) as staging:
        # one record has one algorithm, and the files that are linked keep their digests
        algorithm = None if manifest.record is None else manifest.record.digest_algorithm
        with CheckpointWriter(staging, 0, sha256=integrity is not None, algorithm=algorithm) as writer:
            for name, items in removal.rewritten.items():
                rewrite_file(name, items, reader, writer, removal.heads.get(name, b""), count_bytes)
            tables = _write(writer, manifest.record, integrity, removal)
        reader.close()  # NFS keeps a file that is removed while it is open, under another name
        # Files that are neither dropped nor rewritten are linked. They must be of the save that was opened: rewriting
        # takes as long as a save, and another save may have replaced the checkpoint meanwhile.
        replace_target(staging, directory, removal.dropped | tables, opened)


def _check_sources(directory: Path, manifest: Manifest, integrity: Integrity, removal: Removal) -> None:
    """Raise if a file that new content is made from is damaged: the new file would get a correct digest of it."""
    sources = (*removal.renewed, *removal.rewritten, RECORD_NAME)
    names = [name for name in sources if name in integrity.files]
    files = [ExpectedFile(name, 0, integrity.files[name]) for name in names]
    faults = [str(error) for error in find_faults(directory, manifest, files) if error is not None]
    if faults:
        raise CorruptCheckpointError(f"{directory}: {'; '.join(faults)}")


def _write(
    writer: CheckpointWriter, record: Record | None, integrity: Integrity | None, removal: Removal
) -> frozenset[str]:
    """Write the new files and the files that name them; return the names of the table files that no longer apply."""
    for name, content in removal.renewed.items():
        writer.write(name, content, keys=0)
    stale: frozenset[str] = frozenset()
    if record is not None:
        ranks = {file.name: file.rank for file in record.files}
        gone = removal.dropped | removal.renewed.keys() | removal.rewritten.keys()
        stale = frozenset(file.table_name for file in record.files if file.table_name and file.name in gone)
        # a file with tables in files of their own has too many for the record
        written = writer.move_tables(writer.files) if any(file.table_name for file in record.files) else writer.files
        files = [file.model_copy(update={"rank": ranks.get(file.name, file.rank)}) for file in written]
        files += [file for file in record.files if file.name not in gone]
        named = {"files": tuple(sorted(files, key=lambda file: file.name))}
        writer.write(RECORD_NAME, record.model_copy(update=named).dump(), keys=0)
    if integrity is not None:
        kept = {name: digest for name, digest in integrity.files.items() if name not in removal.dropped | stale}
        writer.write(INTEGRITY_NAME, Integrity(files={**kept, **writer.sha256}).dump(), keys=0)
    return stale
