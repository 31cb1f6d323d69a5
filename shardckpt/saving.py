"""A save, from the caller's state dict to a committed directory."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.entries import StrategyAction
from shardckpt.errors import CheckpointingException, StorageError, UnknownBackendError
from shardckpt.gate import choose_reader, read_manifest
from shardckpt.manifest import MARKER_NAME, RECORD_NAME, Marker, Record
from shardckpt.operation import Operation
from shardckpt.registry import parse_key
from shardckpt.state_dict import save_preprocess
from shardckpt.storage import commit
from shardckpt.storage.digest import ALGORITHM
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.strategy import OwnsFiles, SaveContext, SaveStrategy
from shardckpt.validation import compare_common, validate_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.comm import Comm
    from shardckpt.manifest import FileRecord
    from shardckpt.mapping import CommonStateDict, ShardedStateDict
    from shardckpt.plugins import PluginHost

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved; see :func:`shardckpt.dist_checkpointing.save`."""

    validate: bool = True
    overwrite: bool = False
    content_metadata: dict[str, Any] | None = None
    preprocess_common: Callable[[CommonStateDict], CommonStateDict] | None = None
    allow_globals: tuple[Any, ...] = ()


def save_checkpoint(
    sharded_state_dict: ShardedStateDict,
    target: Path,
    strategy: Any,
    comm: Comm,
    host: PluginHost,
    options: SaveOptions,
) -> None:
    """Save; see :func:`shardckpt.dist_checkpointing.save` for the arguments."""
    operation = Operation("save", target, comm, host)
    with operation.whole():
        with operation.step("preparing the state dict"):
            saver = find_saver(strategy, host)
            operation.dispatched(saver)
            shards, common = save_preprocess(sharded_state_dict)
            if options.content_metadata is not None:
                common["content_metadata"] = options.content_metadata
            comm.agree(
                strategy=(saver.backend, saver.version),
                validate_access_integrity=options.validate,
                overwrite=options.overwrite,
            )
        if options.validate:
            with operation.step("validating"):
                validate_shards(shards, comm)
                compare_common(common, options.preprocess_common, comm)

        def write(writer: CheckpointWriter, save_id: str) -> None:
            saver.save(shards, common, SaveContext(writer, comm, save_id, options.allow_globals))

        identity = (saver.backend, saver.version, saver.reader)
        commit_files(operation, target, identity, write, overwrite=options.overwrite)


def find_saver(strategy: Any, host: PluginHost) -> SaveStrategy:
    """The save strategy that a caller means: an instance, a backend (its newest), (backend, version), or the default.

    Raises:
        UnknownBackendError: nothing installed writes it.
    """
    if isinstance(strategy, SaveStrategy):
        return strategy
    backend, version = host.registry.default if strategy is None else parse_key(strategy)
    for entry in host.registry.entries(StrategyAction.SAVE_SHARDED, backend):
        if version in (None, entry.version):
            return entry.create()  # type: ignore[no-any-return]
    known = ", ".join(f"{e.backend} {e.version}" for e in host.registry.entries(StrategyAction.SAVE_SHARDED)) or "none"
    raise UnknownBackendError(f"no installed strategy saves {strategy!r}; installed: {known}{host.faults_text()}")


def commit_files(
    operation: Operation,
    target: Path,
    identity: tuple[str, int, str],
    write: Callable[[CheckpointWriter, str], None],
    *,
    overwrite: bool,
) -> None:
    """Let all ranks write into a staging directory, and make it the target if every one of them succeeded.

    Args:
        operation: The save or migration.
        target: The checkpoint's directory.
        identity: Backend, version, and the oldest release that reads it.
        write: Writes this rank's files; gets the writer and the save's id.
        overwrite: Whether an existing checkpoint, or other files, may stand at ``target``.
    """
    comm = operation.comm
    staging: Path | None = None
    try:
        with operation.step("staging"):
            owned = _claim_target(target, operation, overwrite=overwrite) if comm.is_main else None
            save_id = commit.new_save_id()
            staging = commit.create_staging(target, save_id) if comm.is_main else Path()
        save_id, staging = comm.broadcast((save_id, staging))
        with comm.phase("starting the file threads"):
            writer = CheckpointWriter(staging, comm.rank)
        with writer:
            with operation.step("writing"):
                write(writer, save_id)
                operation.wrote(sum(file.size for file in writer.files))
            everyone = comm.gather(writer.files)
            with operation.step("committing"):
                if comm.is_main:
                    files = [file for part in everyone for file in part]
                    _write_markers(writer, identity, save_id, comm.world_size, files)
                    _publish(staging, target, owned)
    except BaseException:
        if comm.is_main and staging is not None and staging.exists():
            commit.discard(staging)
        raise


def _claim_target(target: Path, operation: Operation, *, overwrite: bool) -> set[str] | None:
    """None if the target is free, else the names of the checkpoint's files that stand there."""
    if commit.is_free(target):
        return None
    if not overwrite:
        raise StorageError(f"{target} is not empty: give another directory, or pass overwrite=True to replace it")
    return _owned_files(target, operation)


def _owned_files(target: Path, operation: Operation) -> set[str]:
    """The files of the checkpoint at ``target``; what is not among them is kept by an overwrite."""
    owned = {MARKER_NAME, RECORD_NAME}
    try:
        manifest = read_manifest(target, operation.host)
        if manifest.record is not None:
            return owned | {file.name for file in manifest.record.files}
        reader = choose_reader(target, manifest, operation.host)
    except CheckpointingException as exc:
        logger.warning("overwriting %s, which is no readable checkpoint: all its files are kept (%s)", target, exc)
        return owned
    return owned | (reader.owned_files(target) if isinstance(reader, OwnsFiles) else set())


def _write_markers(
    writer: CheckpointWriter, identity: tuple[str, int, str], save_id: str, world_size: int, files: list[FileRecord]
) -> None:
    backend, version, reader = identity
    record = Record(
        save_id=save_id,
        backend=backend,
        version=version,
        reader=reader,
        writer={"shardckpt": importlib.metadata.version("shardckpt"), "torch": torch.__version__},
        world_size=world_size,
        digest_algorithm=ALGORITHM,
        files=tuple(sorted(files, key=lambda file: file.name)),
    )
    writer.write(RECORD_NAME, record.dump(), keys=0)
    marker = Marker(sharded_backend=backend, sharded_backend_version=version)
    writer.write(MARKER_NAME, marker.model_dump_json().encode(), keys=0)


def _publish(staging: Path, target: Path, owned: set[str] | None) -> None:
    if owned is None:
        commit.publish(staging, target)
    else:
        commit.replace(staging, target, owned)


__all__ = ["commit_files", "find_saver", "save_checkpoint"]
