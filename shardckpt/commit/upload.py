"""Complete or absent on an object store: the marker comes last.

A store has no rename, so the order of the objects protects the checkpoint:

1. The main rank claims an empty folder: it creates the claim, an object that only one save can create where the store
   has conditional writes, and then an in-progress object with the save's id. Another save then refuses the folder. It
   lists the folder once more: another save may have begun, and even ended, since it was found empty.
2. Every rank streams its files to the store, or uploads them from a spool directory where the store cannot do that.
3. The main rank writes the files that name them.
4. The main rank lists the folder: every file must be there with its size.
5. The main rank creates the marker (``metadata.json``), without which nothing is loaded, and deletes the claim and the
   in-progress object. A crash before the marker leaves no checkpoint; a crash after it leaves a complete one.

The overwrite of a checkpoint does the same in a folder of its own, which the marker at the URL then names
(:mod:`shardckpt.commit.replacement`).
"""

from __future__ import annotations

import functools
import logging
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardckpt.commit.claim import (
    CLAIM,
    Claim,
    in_progress_name,
    is_mark,
    list_marks,
    make_taken_error,
    read_save_id,
    without_others,
)
from shardckpt.commit.holds import hold_place
from shardckpt.commit.leftovers import create_spool
from shardckpt.commit.replacement import Replacement
from shardckpt.commit.resume import adopt_upload
from shardckpt.errors import CheckpointingException, StorageError, format_many
from shardckpt.manifest.names import MARKER_NAME, generation_name
from shardckpt.storage.places import list_names
from shardckpt.storage.remote import HasFolders, RemotePath, attempt, list_objects
from shardckpt.storage.staged_files import refuse_unrecorded
from shardckpt.storage.store_abilities import CreatesObjects, StreamsWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.remote import RemoteFolder
    from shardckpt.storage.store_abilities import ObjectWriter

logger = logging.getLogger(__name__)


class Upload:
    """One rank's part of a save to a store."""

    def __init__(self, folder: RemoteFolder, open_folder: Callable[[str], RemoteFolder] | None = None) -> None:
        self._folder = folder
        #: The URL that is saved to, also if the files go to a generation.
        self._checkpoint = RemotePath(folder)
        self._open_folder = open_folder
        #: The overwrite of the checkpoint at the URL, on the main rank.
        self._replacement: Replacement | None = None
        #: Whether the save overwrites a checkpoint, so that its files go to a generation below the URL.
        self.is_replacing = False
        #: The save's id, the same on all ranks; empty before the save has begun.
        self.save_id = ""
        #: Names of this rank's objects that were streamed, and so are not in the spool directory.
        self.streamed: set[str] = set()
        #: The journal of the sent objects, if another process may continue the save.
        self._journal: Journal | None = None
        self._handed_over = False
        self._marking = False
        self._committed = False

    @functools.cached_property
    def spool(self) -> Path:
        """The local directory to which this rank writes its files before they are uploaded; made when first needed."""
        return create_spool()

    def begin(self, save_id: str, *, overwrite: bool, journal: Journal | None = None) -> None:
        """Take the folder for this save; only the main rank calls it.

        ``overwrite`` permits it to delete the objects of a save that never ended. Objects that may not be deleted are a
        StorageError, a lease or a pin of the checkpoint there is a CheckpointingException. With a journal it continues
        the save of a killed process, under that save's id, if the sent objects are for the same save.
        """
        adopted = "" if journal is None else self._adopt(journal, overwrite=overwrite)
        self._begin(adopted or save_id, overwrite=overwrite, is_adopted=bool(adopted))
        self._journal = journal
        if journal is not None and not adopted:
            journal.begin(self.target)

    def _adopt(self, journal: Journal, *, overwrite: bool) -> str:
        found = list_objects(self._folder)
        if self._open_folder is None or (MARKER_NAME in found and not overwrite):
            return ""
        return adopt_upload(self._checkpoint, found, journal, self._open_folder)

    def _begin(self, save_id: str, *, overwrite: bool, is_adopted: bool) -> None:
        found = set(list_objects(self._folder))
        if overwrite and MARKER_NAME in found and self._open_folder is not None:
            # removals look for the in-progress object under a mark of theirs, which this one sees
            with self._hold_place() as waited:
                if waited:
                    found = set(list_objects(self._folder))
                if MARKER_NAME in found:
                    self._replacement = Replacement(self._checkpoint, save_id)
                    self._replacement.begin(found)
                    self.join(save_id, is_replacing=True)
                    # no claim: no other save has a folder with the save's id in its name
                    self._claim.announce()
                    return
        claim = Claim(self.target, save_id)
        if is_adopted:
            self._delete([CLAIM])  # of the process that died
        else:
            self._clear(found, claim, overwrite=overwrite)
        claim.take()
        self.save_id, self._claim = save_id, claim
        # Two saves that begin at once may both have seen an empty folder. Each finds the other's in-progress object in
        # commit(), and then neither commits.
        claim.announce()
        # the first listing may be older than a save that began and ended since: its files have the names of this one's,
        # which would replace them. Whoever begins from here on finds the in-progress object
        found = set(list_objects(self._folder))
        if self._is_anothers(found):
            raise claim.make_error(found)

    def _clear(self, found: set[str], claim: Claim, *, overwrite: bool) -> None:
        """Delete the objects of a save that never ended, if that is permitted, or raise."""
        left = set(filter(is_mark, found))
        if overwrite and found and not left:
            raise StorageError(
                f"{self.target} is not empty, and has no checkpoint, but objects such as {min(found)}: give "
                "another URL, or delete the objects there first"
            )
        if MARKER_NAME in found or (found and not left):
            raise StorageError(
                f"{self.target} is not empty: give another URL, or pass overwrite=True (the command: --overwrite) to "
                "replace a checkpoint that is there; delete other objects first"
            )
        if found and not overwrite:
            many, other = format_many(len(found), "object"), claim.describe_other(found)
            raise StorageError(
                f"{self.target} has {many} of a save that has not ended{other}: if it is not running any more, "
                "overwrite=True deletes its objects; or give another URL"
            )
        others = found - without_others(found)
        if others:
            raise StorageError(
                f"{self.target} has other saves in its folders, such as {min(others)}, and objects of a save that has "
                "not ended: give another URL, or delete the objects there first"
            )
        self._delete(found - left)
        self._delete(left)  # last: after a crash in between, the rest is still known as an unfinished save's

    def join(self, save_id: str, *, is_replacing: bool) -> None:
        """Take part in a save that the main rank has begun."""
        self.save_id = save_id
        if is_replacing and not self.is_replacing and self._open_folder is not None:
            self.is_replacing = True
            self._folder = self._open_folder(f"{self._folder.url}/{generation_name(save_id)}")

    @property
    def target(self) -> RemotePath:
        """The location of the save's files: the URL, or the generation below it if it replaces a checkpoint."""
        return RemotePath(self._folder)

    def check(self, names: Iterable[str]) -> None:
        """Raise StorageError for files that cannot be uploaded.

        Either the spool directory has other files than these, or the store cannot have one of the names.
        """
        names = set(names)
        refuse_unrecorded(self.spool, names)
        refuse_folders(self._folder, names)

    def put(self, names: Iterable[str]) -> None:
        """Upload files of the spool directory; streamed files are there already."""
        upload_files(self._folder, self.spool, [name for name in names if name not in self.streamed], self.save_id)

    def hand_over(self) -> None:
        """Note that this rank's objects may be part of a checkpoint from now on: only the main rank may delete them."""
        self._handed_over = True

    def commit(self, files: Iterable[FileRecord], marker: bytes | None = None) -> None:
        """Write the marker if the store has all files in their sizes; only the main rank calls it.

        Without ``marker`` its bytes are in the spool directory. It is a StorageError if a file is missing or has
        another size, or another save has taken the folder, and a CheckpointingException if a lease or a pin holds the
        checkpoint that this one would replace.
        """
        found = list_objects(self._folder)
        if self._is_anothers(found) or self._claim.in_progress not in found:
            raise self._claim.make_error(found)
        uploaded = [(file.rank, name, size) for file in files for name, size in file.list_files().items()]
        for rank, name, size in uploaded:
            if found.get(name) != size:
                has = f"has {found[name]}" if name in found else "does not have it"
                raise StorageError(f"{self.target / name}: rank {rank} uploaded {size} bytes, the store {has}")
        self._marking = True  # before the upload: if it raises, the marker may exist all the same
        content = (self.spool / MARKER_NAME).read_bytes() if marker is None else marker
        self._put_marker(content)
        if self._replacement is not None:
            with self._hold_place():  # a lease or a pin may have come since
                sizes = {name: size for _, name, size in uploaded} | {MARKER_NAME: len(content)}
                self._replacement.switch(content, sizes)
        self._committed = True
        try:
            if self._replacement is not None:
                self._replacement.finish(self._list_marks())
            else:
                self._delete(self._list_marks())
        except CheckpointingException as exc:
            logger.warning("%s, which is no longer needed", exc)

    def release(self) -> None:
        """Release the folder, if it was taken: its files are complete without a marker."""
        if self.save_id:
            self._delete(self._list_marks())
        self._committed = True
        self.close()

    def close(self) -> None:
        """Remove the spool directory."""
        if "spool" in vars(self):
            shutil.rmtree(self.spool, ignore_errors=True)

    def abort(self, *, main: bool) -> None:
        """Delete this save's objects as far as possible, unless it is committed; raise nothing."""
        try:
            if self._replacement is not None and self._replacement.may_be_switched and not self._committed:
                logger.warning(
                    "%s may be the new checkpoint or the old one: a prune removes any leftovers", self.target
                )
            elif self.save_id and not self._committed and (main or not self._handed_over):
                self._undo(main=main)
            if self._replacement is not None and not self._committed:
                self._replacement.abort()
        except (CheckpointingException, OSError) as exc:
            logger.warning("objects of a failed save may remain at %s: %s", self.target, exc)
        finally:
            self.close()

    def _undo(self, *, main: bool) -> None:
        if self._marking:
            self._delete([MARKER_NAME])  # first: at no moment is there a marker with files missing
        found = set(list_objects(self._folder))
        # a rank knows of its own objects that no checkpoint needs them; only the main rank knows it of all
        spooled = self.spool.rglob("*") if "spool" in vars(self) else ()
        own = {path.relative_to(self.spool).as_posix() for path in spooled} | self.streamed
        if not self._is_anothers(found):
            mine = without_others(found) | found & own if main else found & own
            self._delete(mine - {self._claim.in_progress, CLAIM})
        if main:
            for name in self._claim.list_own(found):
                self._delete([name])

    def _list_marks(self) -> list[str]:
        """Return the journal's and the claim's objects, which a finished save deletes; the in-progress object last."""
        return [*(() if self._journal is None else self._journal.names), *self._claim.names]

    @functools.cached_property
    def _claim(self) -> Claim:
        return Claim(self.target, self.save_id)

    def _put_marker(self, content: bytes) -> None:
        """Write the marker; where the store can, only if there is none."""
        target = self.target / MARKER_NAME
        if not isinstance(self._folder, CreatesObjects):
            target.write(content)
        elif not target.create(content):
            self._marking = False  # not to delete the other's
            if read_save_id(self.target) != self.save_id:  # else an attempt of ours had created it
                raise self._claim.make_error([MARKER_NAME])
            self._marking = True  # if a replacement is refused after this, the generation is to be deleted

    def _is_anothers(self, found: Collection[str]) -> bool:
        """Whether another save has taken the folder, judged by a listing; any object there may then be its own."""
        return MARKER_NAME in found or self._claim.is_anothers(found)

    def _hold_place(self) -> AbstractContextManager[bool]:
        return hold_place(self._checkpoint, self._open_folder)

    def _delete(self, names: Collection[str]) -> None:
        self.target.delete_all(names)


def upload_files(folder: RemoteFolder, spool: Path, names: Iterable[str], save_id: str) -> None:
    """Upload files of a spool directory, one after the other.

    If the folder no longer belongs to the save, it is a StorageError.
    """
    names = list(names)
    if names:
        _check_own(folder, save_id, names)
    for name in names:
        (RemotePath(folder) / name).upload(spool / name)


def open_stream(folder: RemoteFolder, save_id: str) -> StreamsWrites | None:
    """Return a stream of a save's files, which refuses them once another save has the folder; None if it has none."""
    return _OwnedStream(folder, save_id) if isinstance(folder, StreamsWrites) else None


class _OwnedStream:
    """Begins objects of a save, which appear only while the folder is the save's."""

    def __init__(self, folder: Any, save_id: str) -> None:
        self._folder, self._save_id = folder, save_id
        self.url = folder.url

    def open_write(self, name: str, part_bytes: int) -> ObjectWriter:
        """Begin an object."""
        check = functools.partial(_check_own, self._folder, self._save_id, [name])
        begin = functools.partial(self._folder.open_write, name, part_bytes)
        return _OwnedObject(attempt("begin", RemotePath(self._folder) / name, begin), check)


class _OwnedObject:
    def __init__(self, writer: ObjectWriter, check: Callable[[], None]) -> None:
        self._check = check
        self.write = writer.write
        self.abort = writer.abort
        self._close = writer.close

    def close(self) -> None:
        """Let the object appear, unless it would replace another save's."""
        self._check()
        self._close()


def _check_own(folder: RemoteFolder, save_id: str, names: Iterable[str]) -> None:
    refuse_folders(folder, names)
    if not _is_own(folder, save_id):
        raise make_taken_error(RemotePath(folder))


def _is_own(folder: RemoteFolder, save_id: str) -> bool:
    """Return whether the folder is still the save's: by one small read, whatever the number of objects there."""
    name = in_progress_name(save_id)
    try:
        return bool((RemotePath(folder) / name).read_range(0, 1))
    except StorageError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            return False
        # some servers do not answer ranges, and a load there will say so
        return name in list_names(RemotePath(folder))


@contextmanager
def delete_if_failed(folder: RemoteFolder | None, save_id: str) -> Iterator[set[str]]:
    """Return a context manager that gives a set for names of streamed objects, and deletes these after an error.

    It is for a process that writes a rank's files, and knows no more of the save.
    """
    names: set[str] = set()
    try:
        yield names
    except BaseException:
        if folder is not None:
            try:
                if names and _is_own(folder, save_id):
                    RemotePath(folder).delete_all(names)
            except CheckpointingException as exc:
                logger.warning("objects of a failed save may remain at %s: %s", RemotePath(folder), exc)
        raise


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
    return bool(list_marks(directory))
