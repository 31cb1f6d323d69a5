"""Leftovers of killed saves, overwrites and removals: found by name, and removed if no living process owns them.

Whether a process of the same boot of the same host is alive is certain, by its id and start time. Leftovers of another
host, or without an owner in the name, are removed when nothing was written to them for ``SHARDCKPT_LEFTOVER_HOURS``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
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
from shardckpt.storage.abilities import on_store
from shardckpt.storage.filesystem import sync_directory, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

logger = logging.getLogger(__name__)

_HOUR = 3600.0
_SPOOL = "shardckpt-spool-"
#: The owner, and the random end that ``mkdtemp`` adds; older releases wrote no owner.
_SPOOL_NAME = re.compile(rf"{_SPOOL}(?:([0-9a-f]{{32}})-)?[a-z0-9_]{{8}}")


def find_leftovers(folder: Path, is_wanted: Callable[[str], bool]) -> list[Leftover]:
    """Find the temporary directories in a folder by their names, sorted; none if the folder does not exist.

    ``is_wanted`` returns whether to include those of a target, given the stem of the target's name.
    """
    found = [parse_temporary(path) for path in _list_temporary(folder)]
    return sorted(leftover for leftover in found if leftover is not None and is_wanted(leftover.stem))


def find_leftovers_of(path: Path) -> list[Leftover]:
    """Find the temporary directories of a checkpoint, which are next to it, and those of all in it if it is a folder.

    Those next to it come first, sorted, then those in it. It need not exist.
    """
    inside = find_leftovers(path, lambda _: True) if path.is_dir() else []
    return [*find_leftovers(path.parent, belongs_to(path)), *inside]


class FoundFolders(NamedTuple):
    """The result of a walk.

    ``with_leftovers`` are folders that have leftovers in them, ``links`` are links to folders, which are not followed,
    and ``broken`` links to what does not exist.
    """

    with_leftovers: list[Path]
    links: list[Path]
    broken: list[Path]


def walk_folders(top: Path) -> FoundFolders:
    """Find the folders that leftovers are in, at any depth; not what is hidden or in a checkpoint, nor behind links."""
    found = FoundFolders([], [], [])
    for path, names, files in os.walk(top):
        folder = Path(path)
        if any("shardckpt-" in name for name in names) and find_leftovers(folder, lambda _: True):
            found.with_leftovers.append(folder)
        is_checkpoint = MARKER_NAME in files
        names[:] = [] if is_checkpoint else sorted(name for name in names if not name.startswith("."))
        found.links.extend(folder / name for name in names if (folder / name).is_symlink())
        paths = [] if is_checkpoint else [folder / name for name in sorted(files)]
        found.broken.extend(path for path in paths if path.is_symlink() and not os.path.exists(path))  # noqa: PTH110 - Path's raises for a loop
    return found


def belongs_to(target: Path) -> Callable[[str], bool]:
    """Return a test whether a stem is the target's; older releases did not shorten long names."""
    return {stem(target.name), target.name}.__contains__


def why_kept(leftover: Leftover, hours: float | None = None) -> str:
    """Return why a leftover must stay; ``""`` if no living process uses it, and it may be removed.

    It is judged by its owner and the times of its files. ``hours`` after the last write an owner on another host counts
    as dead; by default ``SHARDCKPT_LEFTOVER_HOURS``.
    """
    owner = leftover.owner
    if leftover.is_garbage:
        return ""
    alive = None if owner is None else owner.is_alive()
    if owner is not None and alive:
        # this process claims the directories that it fills; another one of its own is what a failed call has left
        if owner == Owner.current() and leftover.stem and not is_claimed(leftover.path.name):
            return ""
        return f"process {owner.pid} of this host is alive"
    if alive is False:
        return ""
    limit = settings.leftover_hours() if hours is None else hours
    age = (time.time() - _last_write(leftover)) / _HOUR
    if limit <= 0 or age >= limit:  # clocks of other hosts may be ahead
        return ""
    whose = "an older release" if owner is None else "a process of another host, container or boot"
    return f"of {whose}, written to {max(age, 0):.1f} hours ago: it goes after {limit:g}"


def remove_leftover(leftover: Leftover) -> None:
    """Remove a leftover; several processes may do so at a time. StorageError if a part of it still exists."""
    path = leftover.path
    with wrap_os_errors("remove", path):
        try:
            if leftover.stem and not leftover.is_garbage:
                # one rename first: a half-removed directory must not look like a checkpoint that was moved aside
                path = path.with_name(discarded_name(path.name))
                os.rename(leftover.path, path)
        except FileNotFoundError:
            return  # another process was first
    if leftover.kind in (REPLACED, REMOVED):
        sync_directory(path.parent)  # else a power cut may undo the rename but not the removal of files
    remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory, or a file, if it exists.

    If a part of it could not be removed, which is a StorageError, the rest was.
    """
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as exc:
        shutil.rmtree(path, ignore_errors=True)  # removes all that can be removed
        if os.path.lexists(path):
            raise StorageError(f"cannot remove {path}, which is no longer needed: {exc}") from exc


def remove_free(
    leftovers: Iterable[Leftover],
    why_kept: Callable[[Leftover], str] = why_kept,
    report: Callable[[Leftover, Exception], None] = lambda _, error: logger.warning("%s", error),
) -> list[tuple[Leftover, str]]:
    """Remove the leftovers that may be removed; return those that must stay, each with the reason.

    ``why_kept`` returns it, or ``""``. ``report`` gets each whose removal fails, and the error; by default it logs a
    warning.
    """
    kept = []
    for leftover in leftovers:
        try:
            reason = why_kept(leftover)
            if reason:
                kept.append((leftover, reason))
                continue
            remove_leftover(leftover)
            if leftover.owner == Owner.current():  # a removal of its own has two parts, and this is the second
                logger.debug("removed %s", leftover.path)
            else:
                logger.info("removed %s, which an interrupted save or removal had left", leftover.path)
        except (CheckpointingException, OSError) as exc:
            report(leftover, exc)
    return kept


def create_spool() -> Path:
    """Create a directory for files to be uploaded, and return its path; remove the spools of killed processes first."""
    folder = spool_folder()
    try:
        remove_free(find_spools(folder))
    except (StorageError, OSError) as exc:
        logger.warning("%s", exc)
    with wrap_os_errors("make a spool directory in", folder):
        return Path(tempfile.mkdtemp(prefix=f"{_SPOOL}{Owner.current().text}-", dir=folder))


def spool_folder() -> Path:
    """Return the directory in which spool directories are created: ``SHARDCKPT_SPOOL_DIR`` or the temporary one."""
    return Path(settings.spool_directory() or tempfile.gettempdir())


def find_spools(folder: Path) -> list[Leftover]:
    """Return this user's spool directories in a folder, sorted; empty if the folder does not exist."""
    found = []
    for path in _list_temporary(folder):
        name = _SPOOL_NAME.fullmatch(path.name)
        with suppress(FileNotFoundError):
            if name and path.is_dir() and path.lstat().st_uid == os.geteuid():  # others may share the folder
                found.append(Leftover(path, "", STAGING, Owner.from_text(name[1]) if name[1] else None))
    return sorted(found)


def freed_bytes(path: Path) -> int:
    """Return the bytes that a removal would free: of all files in it without a second hard link."""
    return sum(info.st_size for info in _walk(path) if stat.S_ISREG(info.st_mode) and info.st_nlink == 1)


def find_last_write(path: Path) -> float | None:
    """Return when a place, or anything in it, was last written, moved or copied, in seconds since 1970.

    None if it is on a store that does not say.
    """
    if (remote := on_store(path)) is not None:
        return max(remote.times().values(), default=None)
    return max((max(info.st_mtime, info.st_ctime) for info in _walk(path)), default=0.0)


def used_bytes(path: Path) -> int:
    """Return the bytes of all files in a file or directory, one with several hard links in it once."""
    found = {(info.st_dev, info.st_ino): info.st_size for info in _walk(path) if stat.S_ISREG(info.st_mode)}
    return sum(found.values())


def _list_temporary(folder: Path) -> list[Path]:
    """Return what may be ours in a folder; links are not, so nothing outside of it is removed."""
    with wrap_os_errors("list", folder):
        try:
            with os.scandir(folder) as entries:
                return [Path(entry.path) for entry in entries if "shardckpt-" in entry.name and not entry.is_symlink()]
        except FileNotFoundError:
            return []


def _last_write(leftover: Leftover) -> float:
    """Return the time of the last write. Files of a replaced checkpoint are old: there ctime, the move, counts, too."""
    times = [max(info.st_mtime, info.st_ctime * leftover.is_replaced) for info in _walk(leftover.path)]
    return max(times, default=0.0)


def _walk(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a file or directory and of all its content; skip what disappears."""
    try:
        yield path.lstat()
        below = [] if path.is_symlink() or not path.is_dir() else list(path.iterdir())
    except OSError:
        return
    for inner in below:
        yield from _walk(inner)
