"""Removing leftovers: what killed saves, overwrites and removals have left; never the only complete checkpoint."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.commit import (
    adopt_staging,
    create_staging,
    find_foreign,
    find_leftovers,
    find_spools,
    freed_bytes,
    get_save_id,
    is_free,
    new_save_id,
    remove_free,
    remove_leftover,
    spool_folder,
    stem,
    why_kept,
)
from shardckpt.engine.integrity import list_recorded_files
from shardckpt.engine.locations import locate_local
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME
from shardckpt.plugins import choose_reader, get_plugin_manager, read_manifest
from shardckpt.storage import file_size, sync_directory, wrap_os_errors
from shardckpt.strategy import OwnsFiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.commit import Leftover
    from shardckpt.plugins import PluginManager
    from shardckpt.storage import Journal

#: Takes a checkpoint that an overwrite has moved aside, and its target; returns whether the first is not needed.
IsSuperseded: TypeAlias = "Callable[[Path, Path], bool]"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruneResult:
    """A leftover, and whether it was removed.

    Attributes:
        path: Its path.
        nbytes: Bytes on disk that its removal frees.
        kept: Why it is needed; ``""`` if it is not: it was removed, or with ``dry_run`` would be.
        error: Why it could not be removed; ``""`` if it could.
    """

    path: Path
    nbytes: int
    kept: str = ""
    error: str = ""


def prune_leftovers(
    path: str | os.PathLike[str], older_than: float | None = None, *, dry_run: bool = False
) -> list[PruneResult]:
    """Remove what killed saves, overwrites, exports and removals have left. Not collective: one process calls.

    Nothing is removed that a living process owns, nor the only complete checkpoint.

    Args:
        path: A folder of checkpoints; or one checkpoint, whose leftovers are next to it.
        older_than: Hours since the last write after which a leftover whose owner is on another host, or not known,
            counts as dead; by default ``SHARDCKPT_LEFTOVER_HOURS``.
        dry_run: Remove nothing; report what would be removed.

    Returns:
        Every leftover, sorted by name: those next to ``path``, then those in it.

    Raises:
        StorageError: neither ``path`` nor a leftover of it exists, or a folder cannot be listed.
    """
    place = locate_local(path, "prune")
    siblings = find_leftovers(place.parent, _belongs_to(place))
    if not siblings and not place.is_dir():
        raise StorageError(f"{place} is no directory, and has no leftovers next to it: give a checkpoint's folder")
    inside = find_leftovers(place, lambda _: True) if place.is_dir() else []
    return [_prune(leftover, older_than, dry_run=dry_run) for leftover in [*siblings, *inside]]


def prune_spools(
    folder: str | os.PathLike[str] | None = None, older_than: float | None = None, *, dry_run: bool = False
) -> list[PruneResult]:
    """Remove the local directories in which killed processes had files to upload to a store. Not collective.

    Args:
        folder: The folder that has them; by default ``SHARDCKPT_SPOOL_DIR``, or the system's temporary directory.
        older_than: As for :func:`prune_leftovers`.
        dry_run: As for :func:`prune_leftovers`.

    Returns:
        Every such directory, sorted by name.

    Raises:
        StorageError: the folder does not exist.
    """
    place = spool_folder() if folder is None else locate_local(folder, "prune")
    if not place.is_dir():
        raise StorageError(f"{place} is no directory: give the one that SHARDCKPT_SPOOL_DIR named for the save")
    return [_prune(leftover, older_than, dry_run=dry_run) for leftover in find_spools(place)]


def open_staging(
    target: Path, is_superseded: IsSuperseded, *, restore: bool, journal: Journal | None = None
) -> tuple[Path, str]:
    """Create a staging directory, or take over that of a killed process, after its leftovers are removed.

    Args:
        target: What is to be written.
        is_superseded: As for :func:`clear_leftovers`.
        restore: As for :func:`clear_leftovers`.
        journal: The journal of what is written, if another process may go on with it.

    Returns:
        The directory, and the save's id.
    """
    staging = None if journal is None else adopt_staging(target, journal)
    clear_leftovers(target, is_superseded, restore=restore, keep=staging)
    if staging is None:
        staging = create_staging(target, new_save_id())
        if journal is not None:
            journal.begin(staging)
    return staging, get_save_id(staging)


def clear_leftovers(target: Path, is_superseded: IsSuperseded, *, restore: bool, keep: Path | None = None) -> None:
    """Remove, before a save, what earlier saves to the target have left and no living process owns.

    Leftovers that are kept, or cannot be removed, are a warning: the save continues. The folder is listed once.

    Args:
        target: The save's target.
        is_superseded: Tells whether a checkpoint that an overwrite has moved aside is not needed.
        restore: Whether to rename such a checkpoint back first, if nothing is at the target.
        keep: What this process uses.
    """
    try:
        found = find_leftovers(target.parent, _belongs_to(target))
        if restore:
            found = _restore_target(target, found)
    except (CheckpointingException, OSError) as exc:  # OSError: another process has moved one meanwhile
        logger.warning("leftovers of earlier saves to %s are not removed: %s", target, exc)
        return
    kept = remove_free(
        (leftover for leftover in found if leftover.path != keep),
        lambda leftover: explain_kept_leftover(leftover, target, is_superseded),
    )
    if kept:
        logger.warning(
            "next to %s are directories of other saves, which are kept (`shardckpt prune` removes those that are not "
            "needed): %s",
            target,
            "; ".join(f"{leftover.path} ({reason})" for leftover, reason in kept),
        )


def explain_kept_leftover(
    leftover: Leftover, target: Path, is_superseded: IsSuperseded, older_than: float | None = None
) -> str:
    """Return why a leftover is kept; ``""`` if no living process owns it, and it is not the only complete checkpoint.

    Args:
        leftover: The leftover.
        target: The checkpoint that it is a leftover of.
        is_superseded: Tells whether a checkpoint that an overwrite has moved aside is not needed.
        older_than: As for :func:`prune_leftovers`.
    """
    reason = why_kept(leftover, older_than)
    if reason or not leftover.is_replaced or is_superseded(leftover.path, target):
        return reason
    return (
        f"an interrupted overwrite moved it aside, and {target.name} is not a complete checkpoint, or lacks other "
        f"files that are in it: rename it to {target.name}, or delete it"
    )


def make_superseded_check(plugins: PluginManager) -> IsSuperseded:
    """Return the :data:`IsSuperseded` for checkpoints.

    It is true if the checkpoint at the target is complete, and the target has all other files of the one moved aside.

    Args:
        plugins: The plugin manager.
    """

    def is_superseded(aside: Path, target: Path) -> bool:
        try:
            files = list_recorded_files(target, read_manifest(target, plugins))
            if not files or any(size not in (None, file_size(target / name)) for name, size in files.items()):
                return False
            foreign = find_foreign(aside, owned_files(aside, plugins, moved=True))
        except (CheckpointingException, OSError):
            return False
        return all(os.path.lexists(target / name) for name in foreign)

    return is_superseded


def owned_files(directory: Path, plugins: PluginManager, *, moved: bool = False) -> set[str]:
    """Return the paths of what belongs to the checkpoint in a directory: an overwrite keeps all other files.

    Args:
        directory: The checkpoint.
        plugins: The plugin manager.
        moved: Whether an overwrite has moved it aside.
    """
    owned = {MARKER_NAME, RECORD_NAME, INTEGRITY_NAME}
    try:
        manifest = read_manifest(directory, plugins, moved=moved)
        if manifest.record is not None:
            return owned | manifest.record.list_files().keys()
        reader = choose_reader(directory, manifest, plugins)
    except CheckpointingException as exc:
        logger.warning("%s is no readable checkpoint: all its files are kept (%s)", directory, exc)
        return owned
    return owned | (reader.owned_files(directory) if isinstance(reader, OwnsFiles) else set())


def _belongs_to(target: Path) -> Callable[[str], bool]:
    """Return a test whether a stem is the target's; older releases did not shorten long names."""
    return {stem(target.name), target.name}.__contains__


def _restore_target(target: Path, found: list[Leftover]) -> list[Leftover]:
    """Rename back what an overwrite moved aside before it died between its two renames; return the other leftovers."""
    aside = [leftover for leftover in found if leftover.is_replaced and not why_kept(leftover)]
    if not aside or not is_free(target):  # no place to rename one to
        return found
    # of several that died, the one whose files were written last
    newest = max(aside, key=lambda leftover: leftover.path.lstat().st_mtime_ns)
    with wrap_os_errors(f"rename {newest.path} to", target):
        os.rename(newest.path, target)
    sync_directory(target.parent)
    logger.warning(
        "an overwrite of %s was interrupted: the checkpoint that it had moved aside was renamed back", target
    )
    return [leftover for leftover in found if leftover is not newest]


def _target_of(leftover: Leftover) -> Path:
    """Return the target of a leftover; if its name was shortened, the path in the folder that shortens to the same."""
    found = leftover.path.with_name(leftover.stem)
    if found.exists():
        return found
    return next((path for path in found.parent.iterdir() if stem(path.name) == leftover.stem), found)


def _prune(leftover: Leftover, older_than: float | None, *, dry_run: bool) -> PruneResult:
    nbytes = freed_bytes(leftover.path)
    target = _target_of(leftover) if leftover.is_replaced else leftover.path
    kept = explain_kept_leftover(leftover, target, make_superseded_check(get_plugin_manager()), older_than)
    error = ""
    if not kept and not dry_run:
        try:
            remove_leftover(leftover)
        except StorageError as exc:
            error = str(exc)
    return PruneResult(leftover.path, nbytes, kept, error)
