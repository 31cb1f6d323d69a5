"""Remove the leftovers of killed saves, overwrites and removals; never the only complete checkpoint."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from shardckpt import settings
from shardckpt.commit.commit import create_staging, find_foreign, is_free
from shardckpt.commit.leftovers import (
    belongs_to,
    explain_kept,
    find_leftovers,
    find_leftovers_of,
    find_spool_folder,
    find_spools,
    remove_leftover,
    remove_unused,
)
from shardckpt.commit.resume import adopt_staging
from shardckpt.commit.staging_names import get_save_id, new_save_id, stem
from shardckpt.commit.unfinished import explain_unfinished_kept, find_unfinished, remove_unfinished
from shardckpt.engine.locations import locate, locate_local
from shardckpt.engine.progress import Progress
from shardckpt.errors import CheckpointingException, StorageError, is_first_warning, listed
from shardckpt.manifest.names import GENERATION, INTEGRITY_NAME, MARKER_NAME, RECORD_NAME, find_generation
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import choose_reader, read_manifest
from shardckpt.plugins.stores import ABSENT, open_below
from shardckpt.storage.abilities import find_ability, takes_requests
from shardckpt.storage.disk_usage import freed_bytes
from shardckpt.storage.filesystem import file_size, is_there, name_siblings, sync_directory, wrap_os_errors
from shardckpt.storage.places import get_bucket, get_url, list_folders, list_names
from shardckpt.storage.remote import ListsFolders, attempt, map_requests
from shardckpt.storage.store_abilities import AbortsUploads
from shardckpt.strategy import OwnsFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from shardckpt.commit.staging_names import Leftover
    from shardckpt.commit.unfinished import Unfinished
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.store_abilities import PendingUpload

#: Takes a checkpoint that an overwrite has moved aside, and its target; returns whether the first is not needed.
IsSuperseded: TypeAlias = "Callable[[Path, Path], bool]"

logger = logging.getLogger(__name__)

_HOUR = 3600.0


@dataclass(frozen=True)
class PruneResult:
    """A leftover, and whether it was removed.

    Attributes:
        path: Its path; on a store the URL that the save or removal was of.
        nbytes: Bytes that its removal frees.
        kept: Why it is needed; ``""`` if it is not: it was removed, or with ``dry_run`` would be.
        error: Why it could not be removed; ``""`` if it could.
    """

    path: Path
    nbytes: int
    kept: str = ""
    error: str = ""

    @property
    def is_removed(self) -> bool:
        """Whether it is not needed, and its removal has not failed."""
        return not self.kept and not self.error


def prune_leftovers(
    path: str | os.PathLike[str], older_than: float | None = None, *, dry_run: bool = False
) -> list[PruneResult]:
    """Remove the leftovers of killed saves, overwrites, exports and removals. Not collective: one process calls.

    Keeps everything that a living process owns, and the only complete checkpoint. The path is a folder of checkpoints,
    or one checkpoint, whose leftovers are next to it; at a URL they are in the checkpoint's folder. A leftover whose
    owner is on another host, or not known, counts as dead ``older_than`` hours after the last write, by default
    ``SHARDCKPT_LEFTOVER_HOURS``.

    Returns every leftover, sorted by name: those next to ``path``, then those in it. It is a StorageError if neither
    ``path`` nor a leftover of it exists.
    """
    plugins = get_plugin_manager()
    place = locate(path, plugins)
    if takes_requests(place):
        return _prune_store(place, plugins, older_than, dry_run=dry_run)
    found = find_leftovers_of(place)
    if not found and not place.is_dir():
        raise StorageError(
            f"{place} is no directory, and has no leftovers next to it: give a checkpoint's folder "
            f"{name_siblings(place)}".rstrip()
        )
    return _prune_all(found, place, older_than, dry_run=dry_run)


def prune_spools(
    folder: str | os.PathLike[str] | None = None, older_than: float | None = None, *, dry_run: bool = False
) -> list[PruneResult]:
    """Remove the local directories in which killed processes had files to upload to a store. Not collective.

    They are in ``folder``, by default ``SHARDCKPT_SPOOL_DIR``, or the system's temporary directory. Returns every such
    directory, sorted by name. It is a StorageError if the folder does not exist.
    """
    place = find_spool_folder() if folder is None else locate_local(folder, "prune")
    if not place.is_dir():
        raise StorageError(f"{place} is no directory: give the one that SHARDCKPT_SPOOL_DIR named for the save")
    return _prune_all(find_spools(place), place, older_than, dry_run=dry_run)


def clear_unfinished(
    place: Path, names: Iterable[str], plugins: PluginManager, older_than: float | None = None, *, dry_run: bool
) -> list[PruneResult]:
    """Remove the leftovers of killed saves and removals in folders of a store; return them, sorted by name.

    The name ``""`` is the URL itself.
    """
    names = sorted(names)
    folders = [open_below(place, name, plugins) for name in names]
    found = map_requests(find_unfinished, folders, "shardckpt-list")
    results = []
    for name, unfinished in zip(names, found, strict=True):
        if unfinished is not None:
            kept = explain_unfinished_kept(unfinished, older_than)
            if not kept:  # before the in-progress objects go, by which the uploads are found again after a crash
                results += _abort_uploads(unfinished.path, _find_own_uploads(unfinished), dry_run=dry_run)
            nbytes, remove = sum(unfinished.objects.values()), partial(remove_unfinished, unfinished)
            results.append(_remove(unfinished.path, nbytes, kept, remove, dry_run=dry_run))
            parent = find_ability(place, ListsFolders)
            if name and results[-1].is_removed and not dry_run and parent is not None:
                parent.remove_folder(name)  # where folders outlive their objects
    return results


def clear_uploads(
    place: Path, plugins: PluginManager, older_than: float | None = None, *, dry_run: bool
) -> list[PruneResult]:
    """Abort the uploads below a URL that began so long ago that their processes count as dead.

    Nothing else is left that names their owner: the rest of their saves was removed, or overwritten. Uploads to the
    folder of a save that may live stay at any age; it is a StorageError if the store does not say whether a save lives.
    Returns a result for each upload that has not ended; none of a directory, or if they cannot be listed.
    """
    limit = settings.leftover_hours() if older_than is None else older_than
    old, results = [], []
    found = _list_uploads(place) or ()
    places = {"", *(name for upload in found if (name := upload.name.rpartition("/")[0].partition("/")[0]))}
    living = {name: _explain_living(place, name, plugins, older_than) for name in places} if found else {}
    for upload in found:
        hours = max(time.time() - upload.begun, 0.0) / _HOUR
        kept = living[""] or living[upload.name.rpartition("/")[0].partition("/")[0]]
        if not kept and hours < limit:
            kept = (
                f"an upload that began {hours:.1f} hours ago: it is removed after {limit:g}, or with the other files "
                "of its save"
            )
        if kept:
            results.append(PruneResult(place / upload.name, 0, kept))
        else:
            old.append(upload)
    return results + _abort_uploads(place, old, dry_run=dry_run)


def explain_unseen_uploads(path: str | os.PathLike[str]) -> str:
    """Return advice about uploads of killed saves that nothing here can list.

    ``""`` for a directory, or where they can be listed.
    """
    if _list_uploads(place := locate(path, get_plugin_manager())) is not None:
        return ""
    return (
        f"parts that killed saves have sent to {place} are not seen from here, and are paid for: `pip install s3fs` "
        "(for s3://) and allow s3:ListBucketMultipartUploads, or let the bucket remove them (S3: a lifecycle rule with "
        "AbortIncompleteMultipartUpload, DaysAfterInitiation: 1)"
    )


def open_staging(
    target: Path, is_superseded: IsSuperseded, *, restore: bool, journal: Journal | None = None
) -> tuple[Path, str]:
    """Remove leftovers, then create a staging directory, or take over the one of a killed process.

    Returns the directory, and the save's id. There is a journal if another process may continue the write.
    """
    staging = None if journal is None else adopt_staging(target, journal)
    clear_leftovers(target, is_superseded, restore=restore, keep=staging)
    if staging is None:
        staging = create_staging(target, new_save_id())
        if journal is not None:
            journal.begin(staging)
    return staging, get_save_id(staging)


def clear_leftovers(target: Path, is_superseded: IsSuperseded, *, restore: bool, keep: Path | None = None) -> None:
    """Remove, before a save, the leftovers of earlier saves to the target that no living process owns.

    Leftovers that are kept, or cannot be removed, are a warning: the save continues. The folder is listed once. A
    checkpoint that an overwrite has moved aside goes if it ``is_superseded``; with ``restore`` it is first renamed
    back, if nothing is at the target.
    """
    try:
        found = find_leftovers(target.parent, belongs_to(target))
        if restore:
            found = _restore_target(target, found)
    except (CheckpointingException, OSError) as exc:  # OSError: another process has moved one meanwhile
        logger.warning("leftovers of earlier saves to %s are not removed: %s", target, exc)
        return
    kept = remove_unused(
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

    ``is_superseded`` tells whether a checkpoint that an overwrite has moved aside is not needed.
    """
    reason = explain_kept(leftover, older_than)
    if reason or not leftover.is_replaced or is_superseded(leftover.path, target):
        return reason
    return (
        f"an interrupted overwrite moved it aside, and {target.name} is not a complete checkpoint, or lacks other "
        f"files that are in it: rename it to {target.name}, or delete it"
    )


def make_superseded_check(plugins: PluginManager) -> IsSuperseded:
    """Return the :data:`IsSuperseded` for checkpoints.

    It is true if the checkpoint at the target is complete, and the target has all other files of the one moved aside.
    """

    def is_superseded(aside: Path, target: Path) -> bool:
        from shardckpt.engine.integrity import list_recorded_files  # it imports torch, which ls does without

        try:
            manifest = read_manifest(target, plugins)
            files, place = list_recorded_files(target, manifest), target / manifest.folder
            if not files or any(size not in (None, file_size(place / name)) for name, size in files.items()):
                return False
            foreign = find_foreign(aside, owned_files(aside, plugins, target, moved=True))
            return all(is_there(target / name) for name in foreign)
        except (CheckpointingException, OSError):
            return False

    return is_superseded


def owned_files(directory: Path, plugins: PluginManager, new: Path, *, moved: bool = False) -> set[str]:
    """Return the paths of the checkpoint's own files in a directory: an overwrite keeps all others.

    ``new`` is the directory of the checkpoint that takes its place. ``moved``: an overwrite has moved it aside.
    """
    owned = {MARKER_NAME, RECORD_NAME, INTEGRITY_NAME}
    try:
        manifest = read_manifest(directory, plugins, moved=moved)
        if manifest.folder:  # a copy of a URL that was overwritten
            return owned | {manifest.folder}
        if manifest.record is not None:
            return owned | manifest.record.list_files().keys()
        reader = choose_reader(directory, manifest, plugins)
    except CheckpointingException as exc:
        with wrap_os_errors("list the files of", directory):
            kept = [name for name in find_foreign(directory, owned) if not is_there(new / name)]
        if kept:
            logger.warning(
                "%s is no readable checkpoint (%s), and nothing says which files are its own: those that the new one "
                "does not have stay: %s",
                *(directory, exc, listed(kept, limit=6)),
            )
        return owned
    return owned | (reader.owned_files(directory) if isinstance(reader, OwnsFiles) else set())


def _restore_target(target: Path, found: list[Leftover]) -> list[Leftover]:
    """Rename back a checkpoint that an overwrite moved aside before it died; return the other leftovers."""
    aside = [leftover for leftover in found if leftover.is_replaced and not explain_kept(leftover)]
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


def _prune_store(place: Path, plugins: PluginManager, older_than: float | None, *, dry_run: bool) -> list[PruneResult]:
    names = [] if find_ability(place, ListsFolders) is None else list_folders(place)
    names = [name for name in names if not re.fullmatch(GENERATION, name)]  # the checkpoint's own
    if not names and not list_names(place):
        raise StorageError(f"{place} {ABSENT}")
    results = clear_unfinished(place, ["", *names], plugins, older_than, dry_run=dry_run)
    aborted = {result.path for result in results if not result.kept}
    return results + [
        each for each in clear_uploads(place, plugins, older_than, dry_run=dry_run) if each.path not in aborted
    ]


def _explain_living(place: Path, name: str, plugins: PluginManager, older_than: float | None) -> str:
    """Return why a save in a folder of a URL counts as living; ``""`` if there is none. ``""`` is the URL itself."""
    unfinished = find_unfinished(open_below(place, name, plugins))
    return "" if unfinished is None else explain_unfinished_kept(unfinished, older_than)


def _list_uploads(place: Path) -> list[PendingUpload] | None:
    """Return the uploads below a URL that have not ended; None, and a warning, if they cannot be listed."""
    if (store := find_ability(place, AbortsUploads)) is None:
        return []
    try:
        return attempt("list the uploads to", place, store.uploads)
    except StorageError as exc:  # a permission of its own, of another client: all else continues without it
        # prune asks three times, and a manager after each save
        is_first = is_first_warning(__name__, get_bucket(get_url(place)))
        logger.log(logging.WARNING if is_first else logging.DEBUG, "%s", exc)
        return None


def _find_own_uploads(unfinished: Unfinished) -> list[PendingUpload]:
    """Return the uploads of saves that have died, none of a save that has begun there since."""
    folders = {name.partition("/")[0] for name in unfinished.objects if "/" in name}
    found = [
        upload
        for upload in _list_uploads(unfinished.path) or ()
        if "/" not in upload.name or find_generation(upload.name) or upload.name.partition("/")[0] in folders
    ]
    now = find_unfinished(unfinished.path) if found else None
    # a save writes its in-progress object before it uploads anything
    return found if now is not None and now.marks == unfinished.marks else []


def _abort_uploads(place: Path, uploads: Iterable[PendingUpload], *, dry_run: bool) -> list[PruneResult]:
    results = []
    if (store := find_ability(place, AbortsUploads)) is not None:
        for upload in uploads:
            path = place / upload.name
            abort = partial(attempt, "abort the upload of", path, partial(store.abort_upload, upload))
            results.append(_remove(path, 0, "", abort, dry_run=dry_run))
    return results


def _prune_all(found: Iterable[Leftover], place: Path, older_than: float | None, *, dry_run: bool) -> list[PruneResult]:
    """Remove the removable leftovers of a place, and report the bytes that are done."""
    sizes = [(leftover, freed_bytes(leftover.path)) for leftover in found]
    if not sizes:
        return []
    progress = Progress("prune", place, sum(size for _, size in sizes), get_plugin_manager())
    results = []
    for leftover, size in sizes:
        results.append(_prune(leftover, size, older_than, dry_run=dry_run))
        progress.add(size)
    return results


def _prune(leftover: Leftover, nbytes: int, older_than: float | None, *, dry_run: bool) -> PruneResult:
    target = _target_of(leftover) if leftover.is_replaced else leftover.path
    kept = explain_kept_leftover(leftover, target, make_superseded_check(get_plugin_manager()), older_than)
    return _remove(leftover.path, nbytes, kept, partial(remove_leftover, leftover), dry_run=dry_run)


def _remove(path: Path, nbytes: int, kept: str, remove: Callable[[], None], *, dry_run: bool) -> PruneResult:
    """Remove the leftovers that are not kept, and return the results."""
    error = ""
    if not kept and not dry_run:
        try:
            remove()
        except StorageError as exc:
            error = str(exc)
    return PruneResult(path, nbytes, kept, error)
