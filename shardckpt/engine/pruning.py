"""Clearing away what killed saves, overwrites and removals have left beside checkpoints, never the last whole one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.engine.integrity import named_files
from shardckpt.engine.locations import locate_local
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME
from shardckpt.plugins import choose_reader, host, read_manifest
from shardckpt.storage import (
    file_size,
    find_leftovers,
    find_spools,
    freed_bytes,
    is_free,
    naming,
    remove_free,
    remove_leftover,
    spool_folder,
    stem,
    sync_directory,
    why_kept,
)
from shardckpt.strategy import OwnsFiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.plugins import PluginHost
    from shardckpt.storage import Leftover

#: Whether a checkpoint that an overwrite has moved aside (the first path) is of no use beside what is at its target.
IsSuperseded: TypeAlias = "Callable[[Path, Path], bool]"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruneResult:
    """A leftover, and what became of it.

    Attributes:
        path: Where it is, or was.
        nbytes: What its removal frees.
        kept: Why it stays; ``""`` if it was removed, or would be.
        error: Why it could not be removed; ``""`` if it was.
    """

    path: Path
    nbytes: int
    kept: str = ""
    error: str = ""


def prune_leftovers(
    path: str | os.PathLike[str], older_than: float | None = None, *, dry_run: bool = False
) -> list[PruneResult]:
    """Remove what killed saves, overwrites, exports and removals have left, of which no living process is known.

    Args:
        path: A folder of checkpoints; or one checkpoint, beside which its leftovers are.
        older_than: Hours since the last write after which what another host owns, or nobody, is taken for dead; by
            default ``SHARDCKPT_LEFTOVER_HOURS``.
        dry_run: Remove nothing, and say what would be.

    Returns:
        Every leftover, in the order of names.

    Raises:
        StorageError: there is neither the path nor anything of it, or a folder cannot be listed.
    """
    place = locate_local(path, "prune")
    beside = find_leftovers(place.parent, _is_of(place))
    if not beside and not place.is_dir():
        raise StorageError(f"{place} is no directory, and no leftovers of it lie beside it: give a checkpoint's folder")
    inside = find_leftovers(place, lambda _: True) if place.is_dir() else []
    return [_pruned(leftover, older_than, dry_run=dry_run) for leftover in [*beside, *inside]]


def prune_spools(
    folder: str | os.PathLike[str] | None = None, older_than: float | None = None, *, dry_run: bool = False
) -> list[PruneResult]:
    """Remove the directories in which killed processes had files for a store.

    Args:
        folder: Where they are; by default where saves make them: ``SHARDCKPT_SPOOL_DIR``, or the system's directory for
            temporary files.
        older_than: As for :func:`prune_leftovers`.
        dry_run: As for :func:`prune_leftovers`.
    """
    place = spool_folder() if folder is None else locate_local(folder, "prune")
    if not place.is_dir():
        raise StorageError(f"{place} is no directory: give the one that SHARDCKPT_SPOOL_DIR names where it was saved")
    return [_pruned(leftover, older_than, dry_run=dry_run) for leftover in find_spools(place)]


def clear_leftovers(target: Path, is_superseded: IsSuperseded, *, restore: bool) -> None:
    """Before a save: remove what earlier ones to the target have left and no living process owns.

    What stays, or cannot be removed, is a warning: the save goes on. The folder is listed once.

    Args:
        target: Where the save goes to.
        is_superseded: Whether a checkpoint that an overwrite has moved aside is of no use.
        restore: Whether to put such a one back first, where nothing stands at the target.
    """
    try:
        found = find_leftovers(target.parent, _is_of(target))
        if restore:
            found = _restored(target, found)
    except (CheckpointingException, OSError) as exc:  # OSError: another process has moved one meanwhile
        logger.warning("what earlier saves to %s have left stays there: %s", target, exc)
        return
    kept = remove_free(found, lambda leftover: why_kept_beside(leftover, target, is_superseded))
    if kept:
        logger.warning(
            "beside %s lie other saves' directories, which stay (`shardckpt prune` removes what is not needed): %s",
            target,
            "; ".join(f"{leftover.path} ({reason})" for leftover, reason in kept),
        )


def why_kept_beside(
    leftover: Leftover, target: Path, is_superseded: IsSuperseded, older_than: float | None = None
) -> str:
    """Why a leftover must stay; ``""`` if no living process has it, and it is not the only whole checkpoint.

    Args:
        leftover: What was found.
        target: What it is of.
        is_superseded: Whether a checkpoint that an overwrite has moved aside is of no use.
        older_than: As for :func:`prune_leftovers`.
    """
    reason = why_kept(leftover, older_than)
    if reason or not leftover.is_replaced or is_superseded(leftover.path, target):
        return reason
    return (
        f"an interrupted overwrite moved it aside, and {target.name} is not a whole checkpoint, or lacks other files "
        f"that are in it: rename it to {target.name}, or delete it"
    )


def supersedes(host: PluginHost) -> IsSuperseded:
    """For checkpoints: whether the one at the target is whole, and has all other files of the one moved aside."""

    def is_superseded(aside: Path, target: Path) -> bool:
        try:
            files = named_files(target, read_manifest(target, host))
            if not files or any(size not in (None, file_size(target / name)) for name, size in files.items()):
                return False
            foreign = {path.name for path in aside.iterdir()} - owned_files(aside, host, moved=True)
        except (CheckpointingException, OSError):
            return False
        return all(os.path.lexists(target / name) for name in foreign)

    return is_superseded


def owned_files(directory: Path, host: PluginHost, *, moved: bool = False) -> set[str]:
    """The files of the checkpoint in a directory; what is not among them is kept by an overwrite.

    Args:
        directory: Where it is.
        host: The installed plugins.
        moved: Whether an overwrite has moved it aside.
    """
    owned = {MARKER_NAME, RECORD_NAME, INTEGRITY_NAME}
    try:
        manifest = read_manifest(directory, host, moved=moved)
        if manifest.record is not None:
            return owned | {file.name for file in manifest.record.files}
        reader = choose_reader(directory, manifest, host)
    except CheckpointingException as exc:
        logger.warning("%s is no readable checkpoint: all its files are kept (%s)", directory, exc)
        return owned
    return owned | (reader.owned_files(directory) if isinstance(reader, OwnsFiles) else set())


def _is_of(target: Path) -> Callable[[str], bool]:
    """Whether a stem is the target's; older releases did not cut long names."""
    return {stem(target.name), target.name}.__contains__


def _restored(target: Path, found: list[Leftover]) -> list[Leftover]:
    """Put back what an overwrite that died between its two renames has moved aside; the other leftovers."""
    aside = [leftover for leftover in found if leftover.is_replaced and not why_kept(leftover)]
    if not aside or not is_free(target):
        return found
    newest = max(aside, key=lambda leftover: leftover.path.lstat().st_mtime_ns)
    with naming(f"rename {newest.path} to", target):
        os.rename(newest.path, target)
    sync_directory(target.parent)
    logger.warning("an overwrite of %s was interrupted: the checkpoint that it had moved aside is there again", target)
    return [leftover for leftover in found if leftover is not newest]


def _target_of(leftover: Leftover) -> Path:
    """What a leftover is of; of a long name that is cut, whatever in the folder has it."""
    found = leftover.path.with_name(leftover.stem)
    if found.exists():
        return found
    return next((path for path in found.parent.iterdir() if stem(path.name) == leftover.stem), found)


def _pruned(leftover: Leftover, older_than: float | None, *, dry_run: bool) -> PruneResult:
    nbytes = freed_bytes(leftover.path)
    target = _target_of(leftover) if leftover.is_replaced else leftover.path
    kept = why_kept_beside(leftover, target, supersedes(host()), older_than)
    error = ""
    if not kept and not dry_run:
        try:
            remove_leftover(leftover)
        except StorageError as exc:
            error = str(exc)
    return PruneResult(leftover.path, nbytes, kept, error)


__all__ = [
    "IsSuperseded",
    "PruneResult",
    "clear_leftovers",
    "owned_files",
    "prune_leftovers",
    "prune_spools",
    "supersedes",
    "why_kept_beside",
]
