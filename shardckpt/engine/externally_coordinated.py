"""Saves and loads that another library runs: its own collectives bring the ranks together, ours are not called.

One process speaks for all: it begins a :class:`HostedSave`, hands every rank its :class:`HostedPart`, and commits what
their :func:`write_part` gave back. How these values travel is the other library's affair; all of them can be pickled.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.distributed import Comm
from shardckpt.engine.locations import locate, locate_local
from shardckpt.engine.operation import Operation
from shardckpt.engine.transaction import Identity, Transaction, Written
from shardckpt.plugins import choose_reader, hold_checkpoint, host
from shardckpt.storage import CRC32, CheckpointReader, CheckpointWriter, preferred

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from shardckpt.manifest import FileRecord
    from shardckpt.strategy import LoadStrategy, SaveStrategy


class HostedPart(NamedTuple):
    """What a rank is told of a save.

    Attributes:
        rank: Its number among the ranks that save.
        target: The checkpoint, for reports.
        staging: Where it writes its files.
        save_id: The save's own name.
        algorithm: Of the digests of all files.
    """

    rank: int
    target: Path
    staging: Path
    save_id: str
    algorithm: str


class HostedSave:
    """A save between its staging directory and its commit, on the process that speaks for all ranks.

    What is neither committed nor aborted is aborted when ``owner`` is no longer used, or the process ends.

    Args:
        path: The checkpoint's directory; no URL.
        strategy: Whose format the files will have.
        world_size: How many ranks write.
        owner: Who holds the save.
        overwrite: Whether an existing checkpoint, or other files, may stand at ``path``.
        algorithms: What ranks prefer for digests; :func:`shardckpt.storage.digest.preferred` there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        strategy: SaveStrategy,
        world_size: int,
        owner: object,
        *,
        overwrite: bool,
        algorithms: Collection[str] = (),
    ) -> None:
        target = locate_local(path, "let another library save to")
        self._operation = Operation("save", target, Comm(alone=True), host())
        self._operation.dispatched(strategy)
        identity = Identity(strategy.backend, strategy.version, strategy.reader)
        self._transaction = Transaction(self._operation, target, identity, overwrite=overwrite)
        self._transaction.world_size = world_size
        self._transaction.algorithm = CRC32 if CRC32 in algorithms else preferred()
        self._leftover = weakref.finalize(owner, _abort_here, self._transaction, os.getpid())

    def parts(self) -> list[HostedPart]:
        """What to tell every rank, in rank order."""
        begun = self._transaction
        staging = begun.staging or begun.target
        return [
            HostedPart(rank, begun.target, staging, begun.save_id, begun.algorithm) for rank in range(begun.world_size)
        ]

    def commit(self, files: Sequence[FileRecord], write: Callable[[CheckpointWriter], None]) -> None:
        """Make the files of all ranks the checkpoint; after an error nothing of the save remains.

        Args:
            files: What the ranks wrote.
            write: Writes what names it.
        """
        try:
            with self._transaction.writer() as writer:
                with self._operation.local_phase("writing the metadata"):
                    write(writer)
                self._transaction.commit(writer, Written(list(files), {}))
        except BaseException:
            self.abort()
            raise
        self._leftover.detach()

    def abort(self) -> None:
        """Give up: nothing of the save remains. After a commit there is nothing to give up."""
        self._leftover()


def write_part(part: HostedPart, write: Callable[[CheckpointWriter], None]) -> list[FileRecord]:
    """Write a rank's files; they are durable when this returns.

    Args:
        part: What the rank was told.
        write: Writes them.
    """
    operation = Operation("save", part.target, _alone(part.rank), host())
    with (
        operation.local_phase("writing"),
        CheckpointWriter(part.staging, part.rank, algorithm=part.algorithm) as writer,
    ):
        write(writer)
        files = writer.recorded_files()
        operation.wrote(sum(file.size for file in files))
        return files


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The directory or URL that a caller means."""
    return locate(path, host())


def open_reader(path: str | os.PathLike[str], strategy: LoadStrategy) -> CheckpointReader:
    """The files of a checkpoint, of one save.

    Args:
        path: A directory or URL.
        strategy: Who will read it.

    Raises:
        CannotLoadError: it is none that the strategy reads.
        CheckpointReplacedError: another save came in between.
    """
    directory = directory_of(path)
    place, manifest = hold_checkpoint(directory, host())
    choose_reader(directory, manifest, host(), wanted=strategy)
    return CheckpointReader(place, manifest)


@contextmanager
def reading(reader: CheckpointReader, rank: int, phase: str) -> Iterator[None]:
    """A step of a load, reported to ``shardckpt_event``."""
    with Operation("load", reader.directory, _alone(rank), host()).local_phase(phase):
        yield


def _alone(rank: int) -> Comm:
    """A rank whose fellows we do not talk to: its number is for reports."""
    comm = Comm(alone=True)
    comm.rank = rank
    return comm


def _abort_here(transaction: Transaction, process: int) -> None:
    """Abort, but not where a forked child ends with the memory of the process that saves."""
    if os.getpid() == process:
        transaction.abort()


__all__ = ["HostedPart", "HostedSave", "directory_of", "open_reader", "reading", "write_part"]
