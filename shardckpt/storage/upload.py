"""Whole or absent on a store: a save's files are uploaded from a spool directory, and its marker is the last of them.

The steps: an object that says that a save is under way, put into a folder that has none; every rank's files; on the
main rank those that name them; a listing that has them all; then the marker, without which nothing is loaded.
"""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage.filesystem import naming
from shardckpt.storage.remote import RemotePath, attempt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.manifest import FileRecord
    from shardckpt.storage.remote import RemoteFolder

logger = logging.getLogger(__name__)

_UNDER_WAY = ".shardckpt-uploading-"


class Upload:
    """One rank's part of a save to a store.

    Args:
        folder: Where to.
        marker: Name of the file that makes a checkpoint of the others.
    """

    def __init__(self, folder: RemoteFolder, marker: str) -> None:
        self._folder = folder
        self._target = RemotePath(folder)
        self._marker = marker
        self._under_way = ""
        self._handed_over = False
        self._marking = False
        self._committed = False
        with naming("make a spool directory in", settings.spool_directory() or tempfile.gettempdir()):
            #: This rank's files are written here first.
            self.spool = Path(tempfile.mkdtemp(prefix="shardckpt-spool-", dir=settings.spool_directory()))

    def begin(self, save_id: str, *, overwrite: bool) -> None:
        """Take the folder for this save; the main rank does.

        Args:
            save_id: The save.
            overwrite: Whether what another save has left there, which never ended, may be deleted.

        Raises:
            StorageError: there are objects in it.
        """
        found = set(list_folder(self._folder))
        left = {name for name in found if name.startswith(_UNDER_WAY)}
        if self._marker in found or (found and not left):
            raise StorageError(
                f"{self._target} is not empty, and a store cannot exchange several objects in one step, with or "
                "without overwrite=True: give another URL, or delete the objects there first"
            )
        if found and not overwrite:
            raise StorageError(
                f"{self._target} has {len(found)} objects of a save that has not ended: if it is not still going on, "
                "overwrite=True deletes them; or give another URL"
            )
        self._delete(found - left)
        self._delete(left)
        self._under_way = f"{_UNDER_WAY}{save_id}"
        (self.spool / self._under_way).touch()
        upload_files(self._folder, self.spool, [self._under_way])

    def put(self, names: Iterable[str]) -> None:
        """Upload files of the spool directory."""
        upload_files(self._folder, self.spool, names)

    def hand_over(self) -> None:
        """From now on this rank's objects may be part of a checkpoint: only the main rank may delete them."""
        self._handed_over = True

    def commit(self, files: Iterable[FileRecord]) -> None:
        """Make the files a checkpoint if the store has all of them as they were written; the main rank does."""
        found = list_folder(self._folder)
        others = sorted(n for n in found if n.startswith(_UNDER_WAY) and n != self._under_way)
        if others or self._under_way not in found or self._marker in found:
            raise StorageError(f"{self._target}: another save writes there ({', '.join(others) or 'or has deleted'})")
        for file in files:
            if found.get(file.name) != file.size:
                has = f"has {found[file.name]}" if file.name in found else "does not have it"
                raise StorageError(
                    f"{self._target / file.name}: rank {file.rank} uploaded {file.size} bytes, the store {has}"
                )
        self._marking = True
        self.put([self._marker])
        self._committed = True
        self._delete_or_say([self._under_way])

    def close(self) -> None:
        """Remove the spool directory."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def abort(self, *, main: bool) -> None:
        """Delete this save's objects as far as that can be done, unless it is committed; never raises."""
        try:
            if not self._committed and (main or not self._handed_over):
                self._undo(main=main)
        except (CheckpointingException, OSError) as exc:
            logger.warning("objects of a failed save may remain at %s: %s", self._target, exc)
        finally:
            self.close()

    def _undo(self, *, main: bool) -> None:
        if self._marking:
            self._delete([self._marker])  # first: in no moment is there a checkpoint that lacks files
        mine = {path.name for path in self.spool.iterdir()} - {self._marker, self._under_way}
        if main and self._under_way:
            found = set(list_folder(self._folder))
            others = any(name.startswith(_UNDER_WAY) and name != self._under_way for name in found)
            if self._marker in found:
                return  # it is not this save's
            mine = mine & found if others else found - {self._under_way}
        self._delete(sorted(mine))
        if main and self._under_way:
            self._delete([self._under_way])

    def _delete_or_say(self, names: Iterable[str]) -> None:
        try:
            self._delete(names)
        except CheckpointingException as exc:
            logger.warning("%s, which is no longer needed", exc)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            attempt("delete", self._target / name, functools.partial(_deleted, self._folder, name))


def upload_files(folder: RemoteFolder, spool: Path, names: Iterable[str]) -> None:
    """Make files of a spool directory objects, one after the other."""
    target = RemotePath(folder)
    for name in names:
        attempt("upload", target / name, functools.partial(folder.upload, name, spool / name))


def list_folder(folder: RemoteFolder) -> dict[str, int]:
    """The folder's objects as the store has them now, with their sizes."""
    return attempt("list", RemotePath(folder), folder.files)


def is_under_way(directory: Path) -> bool:
    """Whether a save to the folder has begun and not ended, as the store says."""
    return isinstance(directory, RemotePath) and any(path.name.startswith(_UNDER_WAY) for path in directory.iterdir())


def _deleted(folder: RemoteFolder, name: str) -> None:
    with suppress(FileNotFoundError):
        folder.delete(name)


__all__ = ["Upload", "is_under_way", "list_folder", "upload_files"]
