"""Leftovers of killed saves, overwrites and removals: found by name, and removed if no living process uses them.

An owner of the same boot of the same host is known to be alive or dead by its process id and start time. Leftovers of
another host, container or boot, or without an owner in the name, are removed when nothing was written to them for
``SHARDCKPT_LEFTOVER_HOURS``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardckpt import settings
from shardckpt.commit.owner import Owner, is_claimed
from shardckpt.commit.staging_names import REMOVED, REPLACED, STAGING, Leftover, discarded_name, parse_temporary, stem
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest.names import MARKER_NAME
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.disk_usage import read_last_write
from shardckpt.storage.filesystem import is_there, sync_directory, wrap_os_errors
from shardckpt.storage.places import list_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

_HOUR = 3600.0
#: A process that cannot be asked whether it is alive.
ELSEWHERE = "a process of another host, container or boot"
_SPOOL = "shardckpt-spool-"
#: A prefix, the owner, which older releases did not write, and the random end that ``mkdtemp`` adds.
_SPOOL_NAME = re.compile(rf"{_SPOOL}(?:([0-9a-f]{{32}})-)?[a-z0-9_]{{8}}")


def find_leftovers(folder: Path, is_wanted: Callable[[str], bool]) -> list[Leftover]:
    """Return the temporary directories in a folder, sorted; none at a URL, or if the folder does not exist.

    ``is_wanted`` selects them by the stem of their target's name.
    """
    if takes_requests(folder):
        return []
    leftovers = filter(None, map(parse_temporary, _list_candidates(folder)))
    return sorted(leftover for leftover in leftovers if is_wanted(leftover.stem))


def find_leftovers_of(path: Path) -> list[Leftover]:
    """Return the temporary directories of a checkpoint, or of a folder of checkpoints, which need not exist.

    The leftovers of the path itself, which stand next to it, come first; then the leftovers inside it.
    """
    with wrap_os_errors("access", path):
        is_folder = path.is_dir()
    inside = find_leftovers(path, lambda _: True) if is_folder else []
    return [*find_leftovers(path.parent, belongs_to(path)), *inside]


class FoundFolders(NamedTuple):
    """The result of :func:`walk_folders`.

    Attributes:
        with_leftovers: Folders that contain leftovers.
        links: Symbolic links to folders, which the walk does not follow.
        broken: Symbolic links without a target.
    """

    with_leftovers: list[Path]
    links: list[Path]
    broken: list[Path]


def walk_folders(top: Path) -> FoundFolders:
    """Find the folders with leftovers at any depth. Hidden folders, checkpoints and links are not entered.

    A folder that cannot be listed is left out, with a warning.
    """
    folders = FoundFolders([], [], [])
    for path, names, files in os.walk(top, onerror=_warn_of_unlisted):
        folder = Path(path)
        if any("shardckpt-" in name for name in names) and find_leftovers(folder, lambda _: True):
            folders.with_leftovers.append(folder)
        if MARKER_NAME in files:
            names.clear()  # os.walk enters the names that stay in the list
            continue
        names[:] = sorted(name for name in names if not name.startswith("."))
        folders.links.extend(folder / name for name in names if (folder / name).is_symlink())
        file_links = (folder / name for name in sorted(files) if (folder / name).is_symlink())
        # not Path.exists, which raises for a target in a folder that this user may not enter
        folders.broken.extend(link for link in file_links if not os.path.exists(link))  # noqa: PTH110
    return folders


def _warn_of_unlisted(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):  # removed meanwhile
        logger.warning("not looked into: %s", error)


def belongs_to(target: Path) -> Callable[[str], bool]:
    """Return the ``is_wanted`` of :func:`find_leftovers` for one target; older releases did not shorten long names."""
    return {stem(target.name), target.name}.__contains__


def explain_kept(leftover: Leftover, hours: float | None = None) -> str:
    """Return why a leftover must stay; ``""`` if it may be removed, since no living process uses it.

    Where the owner is unknown or cannot be seen from here, it counts as dead ``hours`` after the last write; by default
    ``SHARDCKPT_LEFTOVER_HOURS``.
    """
    if leftover.is_garbage:
        return ""
    owner = leftover.owner
    is_alive = None if owner is None else owner.is_alive()
    if owner is None or is_alive is None:
        return _explain_by_time(leftover, settings.leftover_hours() if hours is None else hours)
    if not is_alive:
        return ""
    # this process claims the directories that it fills: an unclaimed one of its own was left by a failed call. A spool,
    # which has no stem, is never claimed, so that nothing tells whether it is in use
    if owner == Owner.current() and leftover.stem and not is_claimed(leftover.path.name):
        return ""
    return f"process {owner.pid} of this host is alive"


def _explain_by_time(leftover: Leftover, limit: float) -> str:
    """Return why a leftover may still be written to; ``""`` once its last write is ``limit`` hours old."""
    if limit <= 0:  # whatever the time of the write: another host's clock may be ahead
        return ""
    try:
        # the files of a checkpoint that an overwrite moved aside are old: the time of that rename counts
        written = read_last_write(leftover.path, count_renames=leftover.is_replaced)
    except OSError as exc:
        return f"it cannot be read, so that its last write is not known: {exc}"
    return explain_recent("an older release" if leftover.owner is None else ELSEWHERE, written, limit)


def explain_recent(whose: str, written: float, limit: float) -> str:
    """Explain that a recent write may still go on; ``""`` once it is ``limit`` hours ago."""
    age = (time.time() - written) / _HOUR
    return "" if age >= limit else f"of {whose}, written to {max(age, 0):.1f} hours ago: it is removed after {limit:g}"


def remove_leftover(leftover: Leftover) -> None:
    """Remove a leftover; several processes may do so at a time. StorageError if a part of it still exists."""
    path = leftover.path
    with wrap_os_errors("remove", path):
        try:
            if leftover.stem and not leftover.is_garbage:
                # renamed first: after a crash, a half-removed directory must not look like a checkpoint moved aside
                path = path.with_name(discarded_name(path.name))
                os.rename(leftover.path, path)
        except FileNotFoundError:
            return  # another process was first
    if leftover.kind in (REPLACED, REMOVED):
        sync_directory(path.parent)  # else a power cut may undo the rename but not the removal of files
    remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory or file, if it exists. Raise a StorageError, after all else is gone, if a part of it stays."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as exc:
        shutil.rmtree(path, ignore_errors=True)  # continues after the error
        if is_there(path):
            raise StorageError(f"cannot remove {path}, which is no longer needed: {exc}") from exc


def remove_unused(
    leftovers: Iterable[Leftover],
    explain: Callable[[Leftover], str] = explain_kept,
    report: Callable[[Leftover, Exception], None] = lambda _, error: logger.warning("%s", error),
) -> list[tuple[Leftover, str]]:
    """Remove the leftovers that may be removed; return the others, each with the reason.

    Args:
        leftovers: The candidates.
        explain: Returns why a leftover must stay, or ``""``.
        report: Called with a leftover whose removal failed, and the error. By default it logs a warning.
    """
    kept = []
    for leftover in leftovers:
        try:
            reason = explain(leftover)
            if reason:
                kept.append((leftover, reason))
                continue
            remove_leftover(leftover)
            if leftover.owner == Owner.current():  # a removal or a failed save of this process: no news to its user
                logger.debug("removed %s", leftover.path)
            else:
                logger.info("removed %s, which an interrupted save or removal had left", leftover.path)
        except (CheckpointingException, OSError) as exc:
            report(leftover, exc)
    return kept


def create_spool() -> Path:
    """Create a directory for files to be uploaded, after removing those of killed processes; return its path."""
    folder = find_spool_folder()
    try:
        remove_unused(find_spools(folder))
    except (StorageError, OSError) as exc:
        logger.warning("%s", exc)
    with wrap_os_errors("make a spool directory in", folder):
        return Path(tempfile.mkdtemp(prefix=f"{_SPOOL}{Owner.current().text}-", dir=folder))


def find_spool_folder() -> Path:
    """Return the directory in which spool directories are created: ``SHARDCKPT_SPOOL_DIR`` or the temporary one."""
    return Path(settings.spool_directory() or tempfile.gettempdir())


def find_spools(folder: Path) -> list[Leftover]:
    """Return this user's spool directories in a folder, sorted; empty if the folder does not exist."""
    spools = []
    for path in _list_candidates(folder):
        name = _SPOOL_NAME.fullmatch(path.name)
        with suppress(FileNotFoundError):
            if name and path.is_dir() and path.lstat().st_uid == os.geteuid():  # others may share the folder
                spools.append(Leftover(path, "", STAGING, Owner.from_text(name[1]) if name[1] else None))
    return sorted(spools)


def _list_candidates(folder: Path) -> list[Path]:
    """Return the paths that may be leftovers by name. Links never are, so nothing outside the folder is removed."""
    paths = [folder / name for name in list_names(folder) if "shardckpt-" in name]
    return [path for path in paths if not path.is_symlink()]
