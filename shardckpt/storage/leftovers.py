"""What killed saves, overwrites and removals have left: found by name, and removed if no living process owns it.

A process on the same boot of the same host is certainly dead or not, by its id and start. What belongs to another host,
or has no owner in its name, is removed when nothing was written to it for ``SHARDCKPT_LEFTOVER_HOURS``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.storage.filesystem import naming, sync_directory
from shardckpt.storage.owner import Owner, is_claimed
from shardckpt.storage.staging_names import REMOVED, REPLACED, STAGING, discarded_name, parse_temporary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

logger = logging.getLogger(__name__)

_HOUR = 3600.0
_SPOOL = "shardckpt-spool-"
#: An owner, and what ``mkdtemp`` adds; older releases wrote no owner.
_SPOOL_NAME = re.compile(rf"{_SPOOL}(?:([0-9a-f]{{32}})-)?[a-z0-9_]{{8}}")


class Leftover(NamedTuple):
    """A temporary directory, or file, that may have no use any more.

    Attributes:
        path: Where it is; no link.
        stem: The :func:`~shardckpt.storage.staging_names.stem` of its target's name; ``""`` for a spool directory.
        kind: ``STAGING``, ``REPLACED`` or ``REMOVED``.
        owner: The process that it belongs to; None where its name does not say.
        is_garbage: Whether nobody wants it, whoever lives: its own process has given it up.
    """

    path: Path
    stem: str
    kind: str
    owner: Owner | None
    is_garbage: bool = False

    @property
    def is_replaced(self) -> bool:
        """Whether it may be the only whole checkpoint: an overwrite has moved it aside."""
        return self.kind == REPLACED and not self.is_garbage


def find_leftovers(folder: Path, is_wanted: Callable[[str], bool]) -> list[Leftover]:
    """The temporary directories in a folder, by name; none where there is no such folder.

    Args:
        folder: The directory in which their targets are.
        is_wanted: Whether those of a target are meant, by the stem of its name.
    """
    found = []
    for entry in _entries(folder):
        name = parse_temporary(entry.name)
        if name is not None and is_wanted(name.stem) and not entry.is_symlink():
            found.append(Leftover(Path(entry.path), *name))
    return sorted(found)


def why_kept(leftover: Leftover, hours: float | None = None) -> str:
    """Why it must stay, as far as owners and times say; ``""`` if no living process has it.

    Args:
        leftover: What was found.
        hours: Since the last write, after which what another host has is taken for dead; by default the setting's.
    """
    owner = leftover.owner
    if leftover.is_garbage:
        return ""
    alive = None if owner is None else owner.is_alive()
    if owner is not None and alive:
        if owner == Owner.current() and leftover.stem and not is_claimed(leftover.path.name):
            return ""  # a call of this process has failed, and could not remove it
        return f"process {owner.pid} of this host is alive"
    if alive is False:
        return ""
    limit = settings.leftover_hours() if hours is None else hours
    age = (time.time() - _last_write(leftover)) / _HOUR
    if age >= limit:
        return ""
    whose = "an older release" if owner is None else "a process of another host, container or boot"
    return f"of {whose}, written to {max(age, 0):.1f} hours ago: it goes after {limit:g}"


def remove_leftover(leftover: Leftover) -> None:
    """Remove it, under a name that promises nothing; two processes may do it at a time.

    Raises:
        StorageError: it is still there, or some of it.
    """
    path = leftover.path
    with naming("remove", path):
        try:
            if leftover.stem and not leftover.is_garbage:
                path = path.with_name(discarded_name(path.name))
                os.rename(leftover.path, path)
        except FileNotFoundError:
            return  # another process was first
    if leftover.kind in (REPLACED, REMOVED):
        sync_directory(path.parent)  # else a power cut gives what was a checkpoint its name back, and not its files
    remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory, or a file; it is no error if it is gone.

    Raises:
        StorageError: it is still there; what could be removed of it is not.
    """
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as exc:
        shutil.rmtree(path, ignore_errors=True)  # what can be removed beside it
        if os.path.lexists(path):
            raise StorageError(f"cannot remove {path}, which is no longer needed: {exc}") from exc


def remove_free(
    leftovers: Iterable[Leftover], why_kept: Callable[[Leftover], str] = why_kept
) -> list[tuple[Leftover, str]]:
    """Remove those that need not stay; what cannot be removed is a warning.

    Args:
        leftovers: What was found.
        why_kept: Why one must stay; ``""`` if it need not.

    Returns:
        Those that stay, each with the reason.
    """
    kept = []
    for leftover in leftovers:
        try:
            reason = why_kept(leftover)
            if reason:
                kept.append((leftover, reason))
                continue
            remove_leftover(leftover)
            logger.info("removed %s, which an interrupted save or removal had left", leftover.path)
        except (StorageError, OSError) as exc:
            logger.warning("%s", exc)
    return kept


def create_spool() -> Path:
    """Make a directory for files on their way to a store; what killed processes have left there goes before."""
    folder = spool_folder()
    try:
        remove_free(find_spools(folder))
    except StorageError as exc:
        logger.warning("%s", exc)
    with naming("make a spool directory in", folder):
        return Path(tempfile.mkdtemp(prefix=f"{_SPOOL}{Owner.current().text}-", dir=folder))


def spool_folder() -> Path:
    """Where spool directories are made."""
    return Path(settings.spool_directory() or tempfile.gettempdir())


def find_spools(folder: Path) -> list[Leftover]:
    """This user's spool directories in a folder; none where there is no such folder."""
    found = []
    for entry in _entries(folder):
        name = _SPOOL_NAME.fullmatch(entry.name)
        if name and _is_own_directory(entry):
            owner = Owner.from_number(int(name[1], 16)) if name[1] else None
            found.append(Leftover(Path(entry.path), "", STAGING, owner))
    return sorted(found)


def freed_bytes(path: Path) -> int:
    """What a removal would free: the bytes of all files in it that have no other name."""
    return sum(info.st_size for _, info in _walk(path) if stat.S_ISREG(info.st_mode) and info.st_nlink == 1)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with naming("list", folder):
        try:
            with os.scandir(folder) as entries:
                return [entry for entry in entries if "shardckpt-" in entry.name]
        except FileNotFoundError:
            return []


def _is_own_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is this user's, who may share the folder with others, and no link."""
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _last_write(leftover: Leftover) -> float:
    """When something in it was written last. The files of a checkpoint are old; that it was moved is a change of it."""
    times = [max(info.st_mtime, info.st_ctime * leftover.is_replaced) for _, info in _walk(leftover.path)]
    return max(times, default=0.0)


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A file or directory, all that is in it, and what the system knows of each; what vanishes is left out."""
    try:
        yield path, path.lstat()
        below = [] if path.is_symlink() or not path.is_dir() else list(path.iterdir())
    except OSError:
        return
    for inner in below:
        yield from _walk(inner)


__all__ = [
    "Leftover",
    "create_spool",
    "find_leftovers",
    "find_spools",
    "freed_bytes",
    "remove_free",
    "remove_leftover",
    "remove_tree",
    "spool_folder",
    "why_kept",
]
