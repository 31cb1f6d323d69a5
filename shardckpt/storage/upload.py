"""Whole or absent on a store: a save's files are uploaded from a spool directory, and its marker is the last of them.

The steps: an object that says that a save is under way, put into a folder that has none; every rank's files; on the
main rank those that name them; a listing that has them all; then the marker, without which nothing is loaded.
"""

from __future__ import annotations

import functools
import logging
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage.abilities import can_rename
from shardckpt.storage.leftovers import create_spool
from shardckpt.storage.remote import RemotePath, attempt
from shardckpt.storage.staged_files import refuse_unrecorded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from shardckpt.manifest import FileRecord
    from shardckpt.storage.remote import RemoteFolder

logger = logging.getLogger(__name__)

_UNDER_WAY = ".shardckpt-uploading-"
#: The object of a removal under way (:mod:`shardckpt.storage.removal`): without its marker, what is left is no more
#: than what a save leaves that never ended, and a later save may take the folder in the same way.
REMOVAL_MARK = f"{_UNDER_WAY}removal"


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
        #: The save, once there is one; the same on all ranks.
        self.save_id = ""
        self._handed_over = False
        self._marking = False
        self._committed = False
        #: This rank's files are written here first.
        self.spool = create_spool()

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
        self.save_id = save_id
        (self.spool / _mark(save_id)).write_text("A save to this place has begun, and not ended.\n")
        _upload(self._folder, self.spool, [_mark(save_id)])

    def check(self, names: Iterable[str]) -> None:
        """Refuse what lies in the spool directory and is not one of these files: it would not be uploaded."""
        refuse_unrecorded(self.spool, {*names, _mark(self.save_id)})

    def put(self, names: Iterable[str]) -> None:
        """Upload files of the spool directory."""
        upload_files(self._folder, self.spool, names, self.save_id)

    def hand_over(self) -> None:
        """From now on this rank's objects may be part of a checkpoint: only the main rank may delete them."""
        self._handed_over = True

    def commit(self, files: Iterable[FileRecord]) -> None:
        """Make the files a checkpoint if the store has all of them as they were written; the main rank does."""
        found = list_folder(self._folder)
        if self._is_anothers(found) or _mark(self.save_id) not in found:
            raise _taken(self._target)
        for file in files:
            if found.get(file.name) != file.size:
                has = f"has {found[file.name]}" if file.name in found else "does not have it"
                raise StorageError(
                    f"{self._target / file.name}: rank {file.rank} uploaded {file.size} bytes, the store {has}"
                )
        self._marking = True
        _upload(self._folder, self.spool, [self._marker])
        self._committed = True
        self._delete_or_say([_mark(self.save_id)])

    def close(self) -> None:
        """Remove the spool directory."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def abort(self, *, main: bool) -> None:
        """Delete this save's objects as far as that can be done, unless it is committed; never raises."""
        try:
            if self.save_id and not self._committed and (main or not self._handed_over):
                self._undo(main=main)
        except (CheckpointingException, OSError) as exc:
            logger.warning("objects of a failed save may remain at %s: %s", self._target, exc)
        finally:
            self.close()

    def _undo(self, *, main: bool) -> None:
        if self._marking:
            self._delete([self._marker])  # first: in no moment is there a checkpoint that lacks files
        found = set(list_folder(self._folder))
        own = {path.name for path in self.spool.iterdir()}
        if not self._is_anothers(found):
            self._delete((found if main else found & own) - {_mark(self.save_id)})
        if main:
            self._delete([_mark(self.save_id)])

    def _is_anothers(self, found: Collection[str]) -> bool:
        """Whether another save has taken the folder, from what is in it; then all there may be its own."""
        own = _mark(self.save_id)
        return self._marker in found or any(name.startswith(_UNDER_WAY) and name != own for name in found)

    def _delete_or_say(self, names: Iterable[str]) -> None:
        try:
            self._delete(names)
        except CheckpointingException as exc:
            logger.warning("%s, which is no longer needed", exc)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            attempt("delete", self._target / name, functools.partial(_deleted, self._folder, name))


def upload_files(folder: RemoteFolder, spool: Path, names: Iterable[str], save_id: str) -> None:
    """Make files of a spool directory objects, one after the other.

    Raises:
        StorageError: it has failed, or the folder is no longer the save's.
    """
    if _mark(save_id) not in list_folder(folder):
        raise _taken(RemotePath(folder))
    _upload(folder, spool, names)


def _upload(folder: RemoteFolder, spool: Path, names: Iterable[str]) -> None:
    target = RemotePath(folder)
    for name in names:
        attempt("upload", target / name, functools.partial(folder.upload, name, spool / name))


def list_folder(folder: RemoteFolder) -> dict[str, int]:
    """The folder's objects as the store has them now, with their sizes."""
    return attempt("list", RemotePath(folder), folder.files)


def is_under_way(directory: Path) -> bool:
    """Whether a save to the folder has begun and not ended, as the store says."""
    return not can_rename(directory) and any(path.name.startswith(_UNDER_WAY) for path in directory.iterdir())


def _mark(save_id: str) -> str:
    """Name of the object that says that a save is under way."""
    return f"{_UNDER_WAY}{save_id}"


def _taken(target: RemotePath) -> StorageError:
    return StorageError(f"{target}: another save has begun there, or the objects of this one were deleted")


def _deleted(folder: RemoteFolder, name: str) -> None:
    with suppress(FileNotFoundError):
        folder.delete(name)


__all__ = ["REMOVAL_MARK", "Upload", "is_under_way", "list_folder", "upload_files"]
