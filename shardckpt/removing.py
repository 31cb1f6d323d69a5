"""Taking keys out of a stored checkpoint: links to what is kept and new names for it, exchanged with it in one step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.gate import choose_reader, read_manifest
from shardckpt.integrity import ExpectedFile, find_faults, read_integrity
from shardckpt.manifest import INTEGRITY_NAME, RECORD_NAME, Integrity
from shardckpt.operation import Operation
from shardckpt.storage import commit
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.strategy import RemovesKeys

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.comm import Comm
    from shardckpt.manifest import Manifest, Record
    from shardckpt.plugins import PluginHost
    from shardckpt.strategy import Removal

logger = logging.getLogger(__name__)


def remove_keys(directory: Path, prefix: str, comm: Comm, host: PluginHost) -> None:
    """Let the main rank do it; see :func:`shardckpt.dist_checkpointing.remove_sharded_tensors`."""
    operation = Operation("remove", directory, comm, host)
    with operation.whole():
        with operation.step("comparing the arguments"):
            comm.agree(key_prefix=prefix)
        with operation.step("removing keys"):
            if comm.is_main:
                _remove(directory, prefix, operation)


def _remove(directory: Path, prefix: str, operation: Operation) -> None:
    if not prefix:
        raise CheckpointingException(f"key_prefix={prefix!r}: give the text that the keys to be removed begin with")
    manifest = read_manifest(directory, operation.host)
    strategy = choose_reader(directory, manifest, operation.host)
    operation.dispatched(strategy)
    if not isinstance(strategy, RemovesKeys):
        raise CheckpointingException(
            f"{directory} is a {manifest.backend!r} checkpoint, and its {type(strategy).__name__} cannot take keys out "
            "of one: load what is to be kept, and save that"
        )
    with CheckpointReader(directory, manifest, verify=True) as reader:
        removal = strategy.remove(prefix, reader)
    if not removal.keys:
        logger.warning("no tensor or object of %s has a key that begins with %r: nothing is removed", directory, prefix)
        return
    _replace(directory, manifest, removal)
    logger.info("removed %d keys and %d files from %s", len(removal.keys), len(removal.dropped), directory)


def _replace(directory: Path, manifest: Manifest, removal: Removal) -> None:
    integrity = read_integrity(directory)
    if integrity is not None:
        _check_renewed(directory, manifest, integrity, removal)
    staging = commit.create_staging(directory, commit.new_save_id())
    try:
        # what stays has digests of the old record's algorithm
        algorithm = None if manifest.record is None else manifest.record.digest_algorithm
        with CheckpointWriter(staging, 0, sha256=integrity is not None, algorithm=algorithm) as writer:
            _write(writer, manifest.record, integrity, removal)
        commit.replace(staging, directory, removal.dropped)  # all that is neither dropped nor written anew is linked
    except BaseException:
        if staging.exists():
            commit.discard(staging)
        raise


def _check_renewed(directory: Path, manifest: Manifest, integrity: Integrity, removal: Removal) -> None:
    """Whether what is written anew is made from what was written: a damaged file must not get a sound digest."""
    names = [name for name in (*removal.renewed, RECORD_NAME) if name in integrity.files]
    files = [ExpectedFile(name, 0, integrity.files[name]) for name in names]
    faults = [str(error) for error in find_faults(directory, manifest, files) if error is not None]
    if faults:
        raise CorruptCheckpointError(f"{directory}: {'; '.join(faults)}")


def _write(writer: CheckpointWriter, record: Record | None, integrity: Integrity | None, removal: Removal) -> None:
    for name, content in removal.renewed.items():
        writer.write(name, content, keys=0)
    if record is not None:
        gone = removal.dropped | removal.renewed.keys()
        files = [*writer.files, *(file for file in record.files if file.name not in gone)]
        named = {"files": tuple(sorted(files, key=lambda file: file.name))}
        writer.write(RECORD_NAME, record.model_copy(update=named).dump(), keys=0)
    if integrity is not None:
        kept = {name: digest for name, digest in integrity.files.items() if name not in removal.dropped}
        writer.write(INTEGRITY_NAME, Integrity(files={**kept, **writer.sha256}).dump(), keys=0)


__all__ = ["remove_keys"]
