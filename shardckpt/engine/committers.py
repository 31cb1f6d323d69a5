"""Turn the files of a save into a checkpoint: in a directory by one rename, at a URL by a marker that comes last.

A transaction has the committer of its place, and never asks which kind of place that is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from shardckpt.commit.commit import check_target, commit_staging, discard_staging, staging_path
from shardckpt.commit.owner import Owner
from shardckpt.commit.staging_names import new_save_id, parse_temporary
from shardckpt.commit.upload import Upload, open_stream
from shardckpt.engine.pruning import make_superseded_check, open_staging, owned_files
from shardckpt.engine.space import UNKNOWN, find_free_bytes
from shardckpt.manifest.names import MARKER_NAME, RECORD_LIMIT, RECORD_NAME, list_files
from shardckpt.plugins.stores import open_folder
from shardckpt.storage.abilities import on_store
from shardckpt.storage.input_file import read_file
from shardckpt.storage.memory_budget import LEAST_WRITING, find_least_upload, limit_uploads
from shardckpt.storage.staged_files import refuse_unrecorded
from shardckpt.storage.store_abilities import StreamsWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.remote import RemoteFolder, RemotePath
    from shardckpt.storage.writer import CheckpointWriter


class Begun(NamedTuple):
    """The main rank's record of the target that it has claimed; the other ranks have these defaults.

    The owner is the process that commits the save. ``is_replacing``: it overwrites a checkpoint on a store.
    """

    save_id: str = ""
    owner: Owner | None = None
    is_replacing: bool = False


class Committer(ABC):
    """One rank's part of a commit. The main rank also calls :meth:`begin` and :meth:`publish`.

    Steps that only a store needs do nothing here: in a directory, files are written where they stay. ``staging`` is the
    local directory to which the rank writes its files; None before :meth:`join`.
    """

    def __init__(self) -> None:
        self.staging: Path | None = None

    @property
    def url(self) -> str:
        """The URL to which files are uploaded, or streamed; ``""`` if the checkpoint is a directory."""
        return ""

    @property
    def is_streamed(self) -> bool:
        """Whether files go to a store while they are written."""
        return False

    @abstractmethod
    def prepare(self, nbytes: int) -> int:
        """Make ready to write so many bytes; return the least memory in bytes that it takes besides the tensors."""

    @abstractmethod
    def begin(self) -> Begun:
        """Take the target for the save, after a check that it may be saved to and the removal of leftovers."""

    @abstractmethod
    def join(self, save_id: str, owner: Owner, *, is_replacing: bool) -> None:
        """Take part in the save that the main rank has begun."""

    def find_free(self) -> int:
        """Return the bytes that the place has free; only the main rank asks."""
        return UNKNOWN

    def open_stream(self) -> StreamsWrites | None:
        """Return where files are streamed to; None if they are written to :attr:`staging` first."""
        return None

    def send(  # noqa: B027 - a directory needs none of it
        self,
        files: Sequence[str],
        added: Iterable[str],
        streamed: Collection[str],
        phase: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Bring files to the place, where that is not the staging directory.

        ``files`` are all files of this rank so far; a file of another name in its directory is refused.
        """

    def send_more(self, names: Iterable[str], streamed: Collection[str]) -> None:  # noqa: B027
        """Bring files of the library's own to the place, as :meth:`send` does, in the phase that there is."""

    def hand_over(self) -> None:  # noqa: B027
        """Note that the main rank may commit from now on: this rank's files must stay."""

    @abstractmethod
    def publish(
        self, writer: CheckpointWriter, files: list[FileRecord], check: Callable[[Path, Path], None] | None
    ) -> None:
        """Make the files the checkpoint at the target."""

    def close(self) -> None:  # noqa: B027
        """Remove the files that only this rank has used."""

    @abstractmethod
    def abort(self, streamed: Iterable[str], *, is_main: bool) -> None:
        """Remove all that the save has written, unless it is committed; raise nothing."""


def make_committer(
    target: Path,
    plugins: PluginManager,
    *,
    overwrite: bool,
    journal: Journal | None,
    memory_budget: int | None,
) -> Committer:
    """Return the committer of a target; nothing is opened or written yet."""
    if (remote := on_store(target)) is None:
        return DirectoryCommitter(target, plugins, overwrite=overwrite, journal=journal)
    return StoreCommitter(remote, plugins, overwrite=overwrite, journal=journal, memory_budget=memory_budget)


class DirectoryCommitter(Committer):
    """All ranks write to one staging directory next to the target, which takes the target's name at last.

    ``overwrite`` permits it to replace an existing target. There is a journal of the written bytes if another process
    may continue the write after a kill.
    """

    def __init__(self, target: Path, plugins: PluginManager, *, overwrite: bool, journal: Journal | None) -> None:
        super().__init__()
        self._target = target
        self._plugins = plugins
        self._overwrite = overwrite
        self._journal = journal

    def prepare(self, nbytes: int) -> int:  # noqa: ARG002 - as the interface
        """Return the memory that files take."""
        return LEAST_WRITING

    def begin(self) -> Begun:
        """Create the staging directory."""
        check_target(self._target, overwrite=self._overwrite)
        # restored only if this save may overwrite: without that, a checkpoint at the target would make it fail
        self.staging, save_id = open_staging(
            self._target, make_superseded_check(self._plugins), restore=self._overwrite, journal=self._journal
        )
        # the owner as the directory's name records it: the system may tell less of a process than it did a moment ago
        made = parse_temporary(self.staging)
        # not on each rank: all write to one directory, which other hosts may know less well
        return Begun(save_id, made.owner if made is not None else None)

    def find_free(self) -> int:
        """Return the free bytes plus the bytes that a killed process has already written of this save; see the base."""
        written = 0 if self._journal is None else self._journal.nbytes
        return find_free_bytes(self._target.parent) + written

    def join(self, save_id: str, owner: Owner, *, is_replacing: bool) -> None:  # noqa: ARG002 - as the interface
        """Write to the main rank's staging directory."""
        self.staging = staging_path(self._target, save_id, owner)

    def publish(
        self, writer: CheckpointWriter, files: list[FileRecord], check: Callable[[Path, Path], None] | None
    ) -> None:
        """Rename the staging directory, or exchange it with the target."""
        staging = cast("Path", self.staging)  # since begin()
        if check is not None:  # before the journal's end: after a kill in the check another process continues
            check(staging, staging)
        if self._journal is not None:
            self._journal.end()
        # a file that no writer recorded has no digest: it would be in the checkpoint without ever being checked
        refuse_unrecorded(staging, {*list_files(files), *(file.name for file in writer.files)})
        owned = partial(owned_files, self._target, self._plugins, staging)
        commit_staging(staging, self._target, owned, overwrite=self._overwrite)

    def abort(self, streamed: Iterable[str], *, is_main: bool) -> None:  # noqa: ARG002 - as the interface
        """Discard the staging directory."""
        if self._journal is not None:
            self._journal.close()
        # not after a look whether it exists, which a file server that has failed answers with an error
        if is_main and self.staging is not None:
            discard_staging(self.staging)


class StoreCommitter(Committer):
    """Each rank streams its files to a store, or uploads them from a directory of its own; the marker comes last.

    ``overwrite`` permits it to replace a checkpoint there, or the leftovers of an interrupted save. The journal is as
    for :class:`DirectoryCommitter`. ``memory_budget``: bytes that this rank may hold at a time in addition to the
    tensors; None: as many as are fast.
    """

    def __init__(
        self,
        target: RemotePath,
        plugins: PluginManager,
        *,
        overwrite: bool,
        journal: Journal | None,
        memory_budget: int | None,
    ) -> None:
        super().__init__()
        self._journal = journal
        self._folder = target.folder
        self._upload = Upload(target.folder, self._open_folder)
        self._plugins = plugins
        self._overwrite = overwrite
        self._memory_budget = memory_budget

    @property
    def url(self) -> str:
        """The URL of the files: a folder below the checkpoint's URL if the save replaces a checkpoint."""
        return self._upload.target.url

    @property
    def is_streamed(self) -> bool:
        """Whether the store takes streams."""
        return isinstance(self._upload.target.folder, StreamsWrites)

    def prepare(self, nbytes: int) -> int:
        """Keep uploads within the memory budget, and create the spool directory."""
        limit_uploads(self._folder, self._memory_budget)
        self.staging = self._upload.spool
        return find_least_upload(nbytes if self.is_streamed else 0)

    def begin(self) -> Begun:
        """Take the URL."""
        self._upload.begin(new_save_id(), overwrite=self._overwrite, journal=self._journal)
        return Begun(self._upload.save_id, Owner.current(), self._upload.is_replacing)

    def join(self, save_id: str, owner: Owner, *, is_replacing: bool) -> None:  # noqa: ARG002 - as the interface
        """Save to the URL, or to the generation below it."""
        self._upload.join(save_id, is_replacing=is_replacing)

    def open_stream(self) -> StreamsWrites | None:
        """Return the store, if files are streamed."""
        return open_stream(self._upload.target.folder, self._upload.save_id)

    def send(
        self,
        files: Sequence[str],
        added: Iterable[str],
        streamed: Collection[str],
        phase: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Upload the files in the spool directory."""
        self._upload.streamed |= {*streamed}  # first: if a name is refused below, its object is deleted then
        with phase():
            self._upload.check(files)
            self._upload.put(added)

    def send_more(self, names: Iterable[str], streamed: Collection[str]) -> None:
        """Upload files of the spool directory that were not streamed."""
        self._upload.streamed |= {*streamed}
        self._upload.put(names)

    def hand_over(self) -> None:
        """Leave this rank's objects to the main rank."""
        self._upload.hand_over()

    def publish(
        self, writer: CheckpointWriter, files: list[FileRecord], check: Callable[[Path, Path], None] | None
    ) -> None:
        """Upload the record and, once the store has all files, write the marker."""
        added = [file for file in writer.files if file.name not in {*list_files(files), MARKER_NAME}]
        self.send_more([file.name for file in added], writer.streamed)
        if check is not None:
            self._fetch_record(writer)
            check(self._upload.spool, self._upload.target)
        self._upload.commit(files + added, writer.marker)

    def close(self) -> None:
        """Remove the spool directory."""
        self._upload.close()

    def abort(self, streamed: Iterable[str], *, is_main: bool) -> None:
        """Delete this rank's objects; on the main rank, the objects of all."""
        self._upload.streamed |= {*streamed}
        self._upload.abort(main=is_main)

    def _fetch_record(self, writer: CheckpointWriter) -> None:
        """Put the record and the marker into the spool directory, for a check: the store has no marker yet."""
        if writer.marker is not None:  # else both were written there
            record = read_file(self._upload.target / RECORD_NAME, RECORD_LIMIT)
            for name, content in ((RECORD_NAME, record), (MARKER_NAME, writer.marker)):
                (self._upload.spool / name).write_bytes(content)

    def _open_folder(self, url: str) -> RemoteFolder:
        folder = open_folder(url, self._plugins)
        limit_uploads(folder, self._memory_budget)
        return folder
