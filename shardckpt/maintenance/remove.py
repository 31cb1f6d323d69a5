"""Taking keys out of a stored checkpoint: files without them, links to all others, exchanged with it in one step."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.engine import ExpectedFile, Operation, clear_leftovers, find_faults, read_integrity, supersedes
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.manifest import INTEGRITY_NAME, RECORD_NAME, Integrity
from shardckpt.plugins import choose_reader, hold_checkpoint
from shardckpt.storage import (
    CheckpointReader,
    CheckpointWriter,
    allocated_bytes,
    create_staging,
    discard_staging,
    is_there,
    naming,
    new_save_id,
    replace_target,
    retry_if_replaced,
    rewrite_file,
)
from shardckpt.strategy import RemovesKeys

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.distributed import Comm
    from shardckpt.manifest import Manifest, Record
    from shardckpt.plugins import PluginHost
    from shardckpt.strategy import Removal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemovalReport:
    """What a removal of keys has done, or would do.

    Attributes:
        keys: The keys that are gone, sorted.
        dropped: The files that are gone: they held nothing else.
        rewritten: The data files that were written anew without what was removed.
        bytes_before: Bytes that the directory took on its disk, with all that is in it, as ``du`` counts them.
        bytes_after: What it takes now; where nothing was done, what it would take, to some blocks.
    """

    keys: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0


def remove_keys(directory: Path, prefix: str, comm: Comm, host: PluginHost, *, dry_run: bool = False) -> RemovalReport:
    """Let the main rank do it; see :func:`shardckpt.dist_checkpointing.remove_sharded_tensors`."""
    operation = Operation("remove", directory, comm, host)
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
        raise CheckpointingException(f"key_prefix={prefix!r}: give the text that the keys to be removed begin with")
    if not dry_run:
        clear_leftovers(directory, supersedes(operation.host), restore=True)
    place, manifest = hold_checkpoint(directory, operation.host)
    strategy = choose_reader(directory, manifest, operation.host)
    operation.dispatched(strategy)
    if not isinstance(strategy, RemovesKeys):
        raise CheckpointingException(
            f"{directory} is a {manifest.backend!r} checkpoint, and its {type(strategy).__name__} cannot take keys out "
            "of one: load what is to be kept, and save that"
        )
    before = allocated_bytes(directory)
    with CheckpointReader(place, manifest, verify=True) as reader:
        removal = strategy.remove(prefix, reader)
        if not removal.keys:
            logger.warning(
                "no tensor or object of %s has a key that begins with %r: nothing is removed", directory, prefix
            )
            return RemovalReport(bytes_before=before, bytes_after=before)
        if not dry_run:
            _replace(directory, reader, removal)
    after = before + _growth(directory, removal) if dry_run else allocated_bytes(directory)
    report = RemovalReport(
        tuple(sorted(removal.keys)), tuple(sorted(removal.dropped)), tuple(sorted(removal.rewritten)), before, after
    )
    if not dry_run:
        logger.info("removed %d keys from %s, which takes %d bytes of %d", len(report.keys), directory, after, before)
    return report


def _growth(directory: Path, removal: Removal) -> int:
    """How many more bytes the directory would take on its disk; what has digests is taken to stay as large."""
    new = {name: len(content) for name, content in removal.renewed.items()}
    new |= {name: items[-1].to + items[-1].nbytes for name, items in removal.rewritten.items()}
    growth = 0
    with naming("look at", directory):
        block = os.statvfs(directory).f_frsize
        for name in {*new, *removal.dropped}:
            path = directory / name
            taken = path.lstat().st_blocks * 512 if is_there(path) else 0
            growth += -(-new.get(name, 0) // block) * block - taken
    return growth


def _replace(directory: Path, reader: CheckpointReader, removal: Removal) -> None:
    """Make the new checkpoint beside the old one, links to all files that stay as they are, and exchange the two."""
    manifest, integrity = reader.manifest, read_integrity(reader.place)
    if integrity is not None:
        _check_renewed(reader.place, manifest, integrity, removal)
    opened = reader.place.stat()
    staging = create_staging(directory, new_save_id())
    try:
        # what stays has digests of the old record's algorithm
        algorithm = None if manifest.record is None else manifest.record.digest_algorithm
        with CheckpointWriter(staging, 0, sha256=integrity is not None, algorithm=algorithm) as writer:
            for name, items in removal.rewritten.items():
                rewrite_file(name, items, reader, writer)
            _write(writer, manifest.record, integrity, removal)
        reader.close()  # what is open while it is removed stays there under another name on NFS
        # All that is neither dropped nor written anew is linked. It must be of the save that was opened: writing takes
        # as long as a save, in which another may have come.
        replace_target(staging, directory, removal.dropped, opened)
    except BaseException:
        if staging.exists():
            discard_staging(staging)
        raise


def _check_renewed(directory: Path, manifest: Manifest, integrity: Integrity, removal: Removal) -> None:
    """Whether what is written anew is made from what was written: a damaged file must not get a sound digest."""
    made_from = (*removal.renewed, *removal.rewritten, RECORD_NAME)
    names = [name for name in made_from if name in integrity.files]
    files = [ExpectedFile(name, 0, integrity.files[name]) for name in names]
    faults = [str(error) for error in find_faults(directory, manifest, files) if error is not None]
    if faults:
        raise CorruptCheckpointError(f"{directory}: {'; '.join(faults)}")


def _write(writer: CheckpointWriter, record: Record | None, integrity: Integrity | None, removal: Removal) -> None:
    for name, content in removal.renewed.items():
        writer.write(name, content, keys=0)
    if record is not None:
        ranks = {file.name: file.rank for file in record.files}
        gone = removal.dropped | removal.renewed.keys() | removal.rewritten.keys()
        files = [file.model_copy(update={"rank": ranks.get(file.name, file.rank)}) for file in writer.files]
        files += [file for file in record.files if file.name not in gone]
        named = {"files": tuple(sorted(files, key=lambda file: file.name))}
        writer.write(RECORD_NAME, record.model_copy(update=named).dump(), keys=0)
    if integrity is not None:
        kept = {name: digest for name, digest in integrity.files.items() if name not in removal.dropped}
        writer.write(INTEGRITY_NAME, Integrity(files={**kept, **writer.sha256}).dump(), keys=0)


__all__ = ["RemovalReport", "remove_keys"]
