"""Checkpoints that have lost the files that name their format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.commit.staging_names import is_temporary
from shardckpt.commit.upload import is_under_way
from shardckpt.distributed.comm import Comm
from shardckpt.engine.integrity import find_incomplete_files, is_damage
from shardckpt.errors import CheckpointingException, IncompleteCheckpointError, StorageError
from shardckpt.manifest.models import Manifest
from shardckpt.manifest.names import RECORD_NAME
from shardckpt.plugins.entries import StrategyAction
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint
from shardckpt.storage.directory import open_directory
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import ChecksFiles, LoadContext, Recognises

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.plugins.manager import PluginManager


def hold_unmarked(directory: Path, plugins: PluginManager) -> tuple[Path, Manifest]:
    """Open a checkpoint that may have lost ``metadata.json``, and, if all else is there, ``shardckpt.json``, too.

    The errors are as for :func:`~shardckpt.plugins.hold_checkpoint`. An unfinished save stays an error.
    """
    try:
        return hold_checkpoint(directory, plugins, unmarked=True)
    except IncompleteCheckpointError:
        place = open_directory(directory)
        if is_temporary(directory.name) or is_under_way(directory):
            raise
        found = _recognise_index(place, plugins)
        if found is None:
            raise
        return place, found


def _recognise_index(place: Path, plugins: PluginManager) -> Manifest | None:
    """Return the manifest of a checkpoint whose index a strategy reads, if all files that it names are there."""
    for entry in plugins.registry.entries(StrategyAction.LOAD_SHARDED):
        manifest = Manifest(backend=entry.backend, version=entry.version, recognised_as=entry.backend)
        try:
            if _is_whole(place, manifest, plugins):
                return manifest
        except CheckpointingException as exc:
            if isinstance(exc, StorageError) and not is_damage(exc):
                raise
    return None


def _is_whole(place: Path, manifest: Manifest, plugins: PluginManager) -> bool:
    """Return whether a strategy reads a checkpoint's index and common state, and has all files for them."""
    strategy = choose_reader(place, manifest, plugins)
    if not isinstance(strategy, ChecksFiles) or isinstance(strategy, Recognises):  # that one does not recognise it
        return False
    with CheckpointReader(place, manifest, verify=True) as reader:
        strategy.load_common(LoadContext(reader, Comm(alone=True), ()))
        is_named = any(file.keys for file in strategy.list_files(reader))
        return is_named and {file.name for file in find_incomplete_files(strategy, reader)} <= {RECORD_NAME}
