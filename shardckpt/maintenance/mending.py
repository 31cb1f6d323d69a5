"""Recognise damaged checkpoints that have all their data: their descriptions can be written anew."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.engine.integrity import find_incomplete_files, is_damage
from shardckpt.errors import (
    BrokenPluginError,
    CheckpointingException,
    CorruptCheckpointError,
    RefusedByPolicyError,
    StorageError,
    UnknownBackendError,
    UnsafePickleError,
    VersionTooNewError,
    VersionTooOldError,
    name_call,
)
from shardckpt.maintenance.unmarked import hold_unmarked
from shardckpt.manifest.models import Manifest, Marker, Record
from shardckpt.manifest.names import MARKER_LIMIT, MARKER_NAME, RECORD_LIMIT, RECORD_NAME
from shardckpt.plugins.resolver import choose_reader, parse_file
from shardckpt.plugins.stores import open_below
from shardckpt.storage.directory import open_directory
from shardckpt.storage.filesystem import is_there, wrap_os_errors
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import ChecksFiles, LoadContext

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardckpt.plugins.manager import PluginManager

#: The files that describe the others, and can be written anew.
_DESCRIPTIONS = {MARKER_NAME, RECORD_NAME}


def explain_mendable(directory: Path, plugins: PluginManager, damaged: Collection[str] = ()) -> str:
    """Return why and how a checkpoint that lost no data may be mended; ``""`` if it lost some.

    ``damaged`` names files that a verification found not to be as written, though they may have their sizes; if none
    are given, no file was compared with its digest.
    """
    try:
        with wrap_os_errors("access", directory):
            place, manifest = _read_best_description(directory, plugins)
            way = _find_way(directory, place, manifest, plugins, {*damaged} - _DESCRIPTIONS)
    except (
        UnknownBackendError,
        VersionTooNewError,
        VersionTooOldError,
        BrokenPluginError,
        RefusedByPolicyError,
        UnsafePickleError,
    ) as exc:
        return f"no installed plugin can read the rest of it: {str(exc).splitlines()[0]}"
    except CheckpointingException as exc:  # the index may be lost or damaged, too, or the store may not answer
        is_answer = not isinstance(exc, StorageError) or is_damage(exc)
        return "" if is_answer else f"the rest of it cannot be read now: {str(exc).splitlines()[0]}"
    if way is None:
        return ""
    known = "as it was written" if damaged else "by the sizes of its files"
    if manifest.record is None:
        known += ", and no digest says whether its values are as written"
    return f"the data is all there, {known}{way}"


def _read_best_description(directory: Path, plugins: PluginManager) -> tuple[Path, Manifest]:
    """Return the directory and manifest by the first description that can be read, or else by the content."""
    place = open_directory(directory)
    with suppress(CorruptCheckpointError):
        if is_there(place / RECORD_NAME):
            record = parse_file(Record.parse, place / RECORD_NAME, RECORD_LIMIT)
            return place, Manifest(backend=record.backend, version=record.version, record=record)
    marker = None
    with suppress(CorruptCheckpointError):
        if is_there(place / MARKER_NAME):
            marker = parse_file(Marker.parse, place / MARKER_NAME, MARKER_LIMIT)
    if marker is None:
        return hold_unmarked(directory, plugins)
    if marker.shardckpt_generation is None:
        return place, Manifest(backend=marker.sharded_backend, version=marker.sharded_backend_version)
    return _read_best_description(open_below(directory, marker.shardckpt_generation, plugins), plugins)


def _find_way(
    directory: Path, place: Path, manifest: Manifest, plugins: PluginManager, damaged: set[str]
) -> str | None:
    """Return the command that writes the lost files anew, to end a sentence; None if data is lost."""
    # a record has all files and their sizes, whichever strategy wrote them
    strategy = choose_reader(directory, manifest, plugins) if manifest.record is None else None
    with CheckpointReader(place, manifest, verify=False) as reader:
        lost = {file.name for file in find_incomplete_files(strategy, reader)} - _DESCRIPTIONS
    if not lost | damaged and manifest.record is not None:  # the marker's own fault says how to repair it
        return ""
    if lost | damaged and (manifest.record is None or not _is_read_without(lost | damaged, place, manifest, plugins)):
        return None
    # where all files have their sizes, a conversion to the same format is refused as a copy
    options = [] if is_there(place / MARKER_NAME) and damaged <= lost else ["--skip-damaged"]
    call = name_call("convert", directory, "NEW", *options)
    return f": {call} writes the checkpoint anew, or says what it needs; else remove it by hand"


def _is_read_without(lost: Collection[str], place: Path, manifest: Manifest, plugins: PluginManager) -> bool:
    """Return whether no load needs the lost files, such as ``.metadata`` next to an index of our own.

    It is an error if the index or the common state cannot be read.
    """
    strategy = choose_reader(place, manifest, plugins)
    if not isinstance(strategy, ChecksFiles):
        return False
    with CheckpointReader(place, manifest, verify=True) as reader:
        context = LoadContext(reader, Comm(alone=True), ())
        strategy.load_index(context)
        strategy.load_common(context)
        return not any(file.keys and file.name in lost for file in strategy.list_files(reader))
