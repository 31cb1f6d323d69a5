"""Externally coordinated saves and loads: another library's collectives connect the ranks, ours are not called.

The other library's coordinator creates a :class:`ExternalSave`, sends every rank its :class:`ExternalSavePart`, and
commits the file records that each rank's :func:`write_part` returns. The other library moves these values; all can be
pickled.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate, locate_local
from shardckpt.engine.operation import Operation
from shardckpt.engine.transaction import CheckpointHeader, Transaction, WrittenFiles
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint
from shardckpt.storage.digest import digest_vote, negotiate_digest
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.writer import CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from shardckpt.manifest.models import FileRecord
    from shardckpt.strategy import LoadStrategy, SaveStrategy


class ExternalSavePart(NamedTuple):
    """The data of a save that a rank needs to write its files.

    Attributes:
        target: The checkpoint, for events.
        staging: The directory to which the rank writes its files.
        save_id: The save's id.
        algorithm: Digest algorithm of all files.
    """

    rank: int
    target: Path
    staging: Path
    save_id: str
    algorithm: str


class ExternalSave:
    """An externally coordinated save from staging to commit, in the process of the coordinator.

    If it is neither committed nor aborted, it is aborted when ``owner`` is garbage-collected, or the process ends. The
    path is a directory, not a URL; ``overwrite`` permits a checkpoint, or other files, to be there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        strategy: SaveStrategy,
        world_size: int,
        owner: object,
        *,
        overwrite: bool,
        digest_votes: Collection[int] = (),
    ) -> None:
        target = locate_local(path, "let another library save to")
        self._operation = Operation("save", target, Comm(alone=True), get_plugin_manager())
        self._operation.set_strategy(strategy)
        header = CheckpointHeader(strategy.backend, strategy.version, strategy.reader)
        self._transaction = Transaction(self._operation, target, header, overwrite=overwrite)
        self._transaction.world_size = world_size
        self._transaction.algorithm = negotiate_digest(digest_vote(), *digest_votes)
        # torch's DCP does not tell its writer of a save that failed on another rank: it only drops the writer.
        self._leftover = weakref.finalize(owner, _abort_here, self._transaction, os.getpid())

    def parts(self) -> list[ExternalSavePart]:
        """Return the message for each rank, in rank order."""
        save = self._transaction
        staging = save.staging or save.target
        return [
            ExternalSavePart(rank, save.target, staging, save.save_id, save.algorithm)
            for rank in range(save.world_size)
        ]

    def commit(self, files: Sequence[FileRecord], write: Callable[[CheckpointWriter], None]) -> None:
        """Write the metadata, and commit the files of all ranks; after an error nothing of the save remains."""
        try:
            with self._transaction.writer() as writer:
                with self._operation.local_phase("writing the metadata"):
                    write(writer)
                self._transaction.commit(writer, WrittenFiles(list(files), {}))
        except BaseException:
            self.abort()
            raise
        self._leftover.detach()  # committed: nothing is left that the end of the process should remove

    def abort(self) -> None:
        """Remove all that the save has written; after a commit, do nothing."""
        self._leftover()


def write_part(part: ExternalSavePart, write: Callable[[CheckpointWriter], None]) -> list[FileRecord]:
    """Write a rank's files, and return the records of them that :meth:`ExternalSave.commit` needs.

    The files are synced to disk when this returns.
    """
    operation = Operation("save", part.target, _alone(part.rank), get_plugin_manager())
    with (
        operation.local_phase("writing"),
        CheckpointWriter(part.staging, part.rank, algorithm=part.algorithm) as writer,
    ):
        write(writer)
        files = writer.recorded_files()
        operation.set_nbytes(sum(file.size for file in files))
        return files


def locate_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint's directory or URL, as :func:`shardckpt.engine.locate` does with the installed plugins."""
    return locate(path, get_plugin_manager())


def open_reader(path: str | os.PathLike[str], strategy: LoadStrategy) -> CheckpointReader:
    """Open a checkpoint for a strategy, and return a reader of its files; all that it reads is of one save.

    It is a CannotLoadError if there is no checkpoint, or the strategy does not read it, a CheckpointReplacedError if
    another save replaced it meanwhile.
    """
    directory = locate_checkpoint(path)
    place, manifest = hold_checkpoint(directory, get_plugin_manager())
    choose_reader(directory, manifest, get_plugin_manager(), wanted=strategy)
    return CheckpointReader(place, manifest)


@contextmanager
def report_read(reader: CheckpointReader, rank: int, phase: str) -> Iterator[None]:
    """Report the block to ``shardckpt_event`` as a phase of a load."""
    with Operation("load", reader.directory, _alone(rank), get_plugin_manager()).local_phase(phase):
        yield


def _alone(rank: int) -> Comm:
    """Return a Comm of this process alone; its rank, for events, is the rank in the other library's group."""
    comm = Comm(alone=True)
    comm.rank = rank
    return comm


def _abort_here(transaction: Transaction, process: int) -> None:
    """Abort, unless this is a forked child: it ends with a copy of the save, which is not its own to remove."""
    if os.getpid() == process:
        transaction.abort()
