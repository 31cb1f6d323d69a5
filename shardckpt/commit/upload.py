"""Complete or absent on an object store: files are uploaded from a spool directory, and the marker comes last.

A store has no rename, so the order of the objects protects the checkpoint:

1. The main rank uploads an in-progress object to an empty folder: another save then refuses the folder.
2. Every rank uploads its files.
3. The main rank uploads the files that name them.
4. The main rank lists the folder: every file must be there with its size.
5. The main rank uploads the marker (``metadata.json``), without which nothing is loaded, and deletes the in-progress
   object. A crash before the marker leaves no checkpoint; a crash after it leaves a complete one.
"""

from __future__ import annotations

import functools
import logging
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.commit.leftovers import create_spool
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest import list_parents
from shardckpt.storage import HasFolders, RemotePath, attempt, can_rename, list_objects, refuse_unrecorded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from shardckpt.manifest import FileRecord
    from shardckpt.storage import RemoteFolder

logger = logging.getLogger(__name__)

_UNDER_WAY = ".shardckpt-uploading-"
#: The in-progress object of a removal (:mod:`shardckpt.commit.removal`). It has the prefix of a save's: once the
#: marker is deleted, a later save may take the folder like that of a save that never ended.
REMOVAL_IN_PROGRESS = f"{_UNDER_WAY}removal"


class Upload:
    """One rank's part of a save to a store.

    Args:
        folder: The checkpoint's folder on the store.
        marker: Name of the file that is uploaded last, and makes the others a checkpoint.
    """

    def __init__(self, folder: RemoteFolder, marker: str) -> None:
        self._folder = folder
        self._target = RemotePath(folder)
        self._marker = marker
        #: The save's id, the same on all ranks; empty before the save has begun.
        self.save_id = ""
        self._handed_over = False
        self._marking = False
        self._committed = False
        #: The local directory to which this rank writes its files before they are uploaded.
        self.spool = create_spool()

    def begin(self, save_id: str, *, overwrite: bool) -> None:
        """Take the folder for this save; only the main rank calls it.

        Args:
            save_id: The save's id.
            overwrite: Whether the objects of a save that never ended may be deleted.

        Raises:
            StorageError: the folder has objects that may not be deleted.
        """
        found = set(list_objects(self._folder))
        left = {name for name in found if name.startswith(_UNDER_WAY)}
        if self._marker in found or (found and not left):
            raise StorageError(
                f"{self._target} is not empty, and a store cannot exchange several objects in one step, even to "
                "overwrite them: give another URL, or delete the objects there first"
            )
        if found and not overwrite:
            raise StorageError(
                f"{self._target} has {len(found)} objects of a save that has not ended: if it is not still going on, "
                "overwrite=True deletes them; or give another URL"
            )
        others = found - self._without_others(found)
        if others:
            raise StorageError(
                f"{self._target} has other saves in its folders, such as {min(others)}, and objects of a save that has "
                "not ended: give another URL, or delete the objects there first"
            )
        self._delete(found - left)
        self._delete(left)  # last: after a crash in between, the rest is still known as that of an unfinished save
        self.save_id = save_id
        # Two saves that begin at once may both have seen an empty folder. Each finds the other's in-progress object in
        # commit(), and then neither commits.
        (self.spool / _in_progress_name(save_id)).write_text("A save to this place has begun, and not ended.\n")
        _upload(self._folder, self.spool, [_in_progress_name(save_id)])

    def check(self, names: Iterable[str]) -> None:
        """Raise an error for files that cannot be uploaded.

        Raises:
            StorageError: the spool directory has other files than these, or the store cannot have one of the names.
        """
        names = set(names)
        refuse_unrecorded(self.spool, {*names, _in_progress_name(self.save_id)})
        refuse_folders(self._folder, names)

    def put(self, names: Iterable[str]) -> None:
        """Upload files of the spool directory."""
        upload_files(self._folder, self.spool, names, self.save_id)

    def hand_over(self) -> None:
        """Note that this rank's objects may be part of a checkpoint from now on: only the main rank may delete them."""
        self._handed_over = True

    def commit(self, files: Iterable[FileRecord]) -> None:
        """Upload the marker if the store has all files in their sizes; only the main rank calls it.

        Args:
            files: The records of the files of all ranks.

        Raises:
            StorageError: a file is missing or has another size, or another save has taken the folder.
        """
        found = list_objects(self._folder)
        if self._is_anothers(found) or _in_progress_name(self.save_id) not in found:
            raise _taken(self._target)
        uploaded = [(file.rank, name, size) for file in files for name, size in file.list_files().items()]
        for rank, name, size in uploaded:
            if found.get(name) != size:
                has = f"has {found[name]}" if name in found else "does not have it"
                raise StorageError(f"{self._target / name}: rank {rank} uploaded {size} bytes, the store {has}")
        self._marking = True  # before the upload: if it raises, the marker may exist all the same
        _upload(self._folder, self.spool, [self._marker])
        self._committed = True
        try:
            self._delete([_in_progress_name(self.save_id)])
        except CheckpointingException as exc:
            logger.warning("%s, which is no longer needed", exc)

    def close(self) -> None:
        """Remove the spool directory."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def abort(self, *, main: bool) -> None:
        """Delete this save's objects as far as possible, unless it is committed; raise nothing."""
        try:
            if self.save_id and not self._committed and (main or not self._handed_over):
                self._undo(main=main)
        except (CheckpointingException, OSError) as exc:
            logger.warning("objects of a failed save may remain at %s: %s", self._target, exc)
        finally:
            self.close()

    def _undo(self, *, main: bool) -> None:
        if self._marking:
            self._delete([self._marker])  # first: at no moment is there a marker with files missing
        found = set(list_objects(self._folder))
        # a rank knows of its own objects that no checkpoint needs them; only the main rank knows it of all
        own = {path.relative_to(self.spool).as_posix() for path in self.spool.rglob("*")}
        if not self._is_anothers(found):
            mine = self._without_others(found) | found & own if main else found & own
            self._delete(mine - {_in_progress_name(self.save_id)})
        if main:
            self._delete([_in_progress_name(self.save_id)])

    def _is_anothers(self, found: Collection[str]) -> bool:
        """Whether another save has taken the folder, judged by a listing; any object there may then be its own."""
        own = _in_progress_name(self.save_id)
        return self._marker in found or any(name.startswith(_UNDER_WAY) and name != own for name in found)

    def _without_others(self, found: set[str]) -> set[str]:
        """Return the objects that are not of another checkpoint, or another save, in a folder below."""
        marks = (name.rpartition("/") for name in found)
        others = {
            folder for folder, _, name in marks if folder and (name == self._marker or name.startswith(_UNDER_WAY))
        }
        return {name for name in found if others.isdisjoint(list_parents(name))}

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            delete_object(self._folder, name)


def upload_files(folder: RemoteFolder, spool: Path, names: Iterable[str], save_id: str) -> None:
    """Upload files of a spool directory, one after the other.

    Args:
        folder: The checkpoint's folder on the store.
        spool: The spool directory.
        names: Of the files.
        save_id: The save's id.

    Raises:
        StorageError: an upload failed, or the folder no longer belongs to the save.
    """
    names = list(names)
    refuse_folders(folder, names)
    if _in_progress_name(save_id) not in attempt("list", RemotePath(folder), folder.files):
        raise _taken(RemotePath(folder))
    _upload(folder, spool, names)


def _upload(folder: RemoteFolder, spool: Path, names: Iterable[str]) -> None:
    target = RemotePath(folder)
    for name in names:
        attempt("upload", target / name, functools.partial(folder.upload, name, spool / name))


def refuse_folders(folder: RemoteFolder, names: Iterable[str]) -> None:
    """Raise StorageError if a name has folders, and the store's plugin does not know them."""
    name = min((name for name in names if "/" in name), default="")
    if name and not isinstance(folder, HasFolders):
        raise StorageError(
            f"{RemotePath(folder)} cannot have {name!r}: the plugin that serves it knows no objects in folders "
            f"({type(folder).__name__} lacks the method of shardckpt.storage.HasFolders); save to a directory, to a "
            "URL that fsspec serves, or by a strategy whose files are not in folders"
        )


def is_under_way(directory: Path) -> bool:
    """Return whether a save to (or a removal of) the folder has begun and not ended; False for a local directory."""
    return not can_rename(directory) and any(path.name.startswith(_UNDER_WAY) for path in directory.iterdir())


def _in_progress_name(save_id: str) -> str:
    """Name of the in-progress object of a save."""
    return f"{_UNDER_WAY}{save_id}"


def _taken(target: RemotePath) -> StorageError:
    return StorageError(f"{target}: another save has begun there, or the objects of this one were deleted")


def delete_object(folder: RemoteFolder, name: str) -> None:
    """Delete an object from a store; it is no error if it is gone.

    Raises:
        StorageError: the store failed in every attempt.
    """

    def delete() -> None:
        with suppress(FileNotFoundError):
            folder.delete(name)

    attempt("delete", RemotePath(folder) / name, delete)
