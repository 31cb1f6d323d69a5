"""The transaction of a save: from staging to commit. The target changes in one step, or not at all."""

from __future__ import annotations

import json
import logging
import re
import struct
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import TypeAdapter

from shardckpt import __version__
from shardckpt.commit.owner import Owner
from shardckpt.distributed.routing import find_owner
from shardckpt.engine.committers import Begun, make_committer
from shardckpt.engine.space import NO_FORECAST, UNLIMITED, refuse_full
from shardckpt.engine.timeline import Timeline, gather_timings
from shardckpt.errors import PluginError, StorageError, listed
from shardckpt.manifest.models import Integrity, Marker, Record
from shardckpt.manifest.names import FINGERPRINTS_NAME, INTEGRITY_NAME, MARKER_NAME, RECORD_NAME, Lineage, find_folders
from shardckpt.manifest.strict_json import parse_json
from shardckpt.planning.shard_copies import assign_holders
from shardckpt.storage.digest import digest_vote, negotiate_digest
from shardckpt.storage.memory_budget import check_memory_budget
from shardckpt.storage.resumable import ResumableWriter
from shardckpt.storage.sums import add_sums, pack_fingerprints, split_sums
from shardckpt.storage.writer import CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardckpt.engine.operation import Operation
    from shardckpt.engine.space import Forecast, Room
    from shardckpt.manifest.models import FileRecord, SaveTimings
    from shardckpt.storage.journal import Journal
    from shardckpt.storage.staged_files import FilePart

logger = logging.getLogger(__name__)

_ANY = TypeAdapter[Any](Any)

#: A save's name and owner, 128 bits each, travel as four int64 numbers, since ranks add int64.
_NAME = struct.Struct("<4q")
_ID_DIGITS = 32
#: Bytes of file records with tables of digests that all ranks send to the main rank, at most. Where they would be more,
#: each table goes to a file of its own, and records are gathered without: at 16,384 ranks, of 512 bytes each.
INLINE_TABLES = 8 << 20
_DIGEST = re.compile("[0-9a-f]{64}")


class CheckpointHeader(NamedTuple):
    """The header of a checkpoint: backend, version, the oldest release that reads it, and its parent and step."""

    backend: str
    version: int
    reader: str
    lineage: Lineage = Lineage()


class WrittenFiles(NamedTuple):
    """The files that a rank has written.

    Attributes:
        files: Their records.
        sha256: Their SHA-256 by name, if the save asks for it.
        parts: Its parts of files that other ranks write, too.
        sums: Sums of the bits of its boxes, if the save asks for fingerprints.
        timeline: When its phases began and ended, as :meth:`Timeline.pack` returns it.
        streamed: Names of those that were streamed to a store.
    """

    files: list[FileRecord]
    sha256: dict[str, str]
    parts: tuple[FilePart, ...] = ()
    sums: tuple[bytes, ...] = ()
    timeline: bytes = b""
    streamed: tuple[str, ...] = ()


class Transaction:
    """A save from staging to commit. Collective: all ranks make one together.

    If the target is a directory, all ranks write to one staging directory next to it. If it is a URL, each rank streams
    its files to the store; where the store cannot do that, it writes to a local directory of its own, and uploads them.

    Args:
        overwrite: Whether ``target`` may have a checkpoint, or other files; at a URL, a checkpoint or what an
            interrupted save has left.
        journal: The journal of what one process writes, if another may go on with it after a kill.
        check: Called on the main rank when all is written and nothing is committed: with a directory that has the
            record and ``metadata.json``, and the place of all other files, which is the same directory or the target's
            URL. If it raises, nothing is committed.
        forecast: What this rank will store. A save to a directory is refused, before it writes a file, if that of all
            ranks is more than its file system has free.
        room: The limits of its space.
        memory_budget: Bytes that this rank may hold at a time besides the tensors; None: as many as are fast.
        given: Whether this rank gives the strategy shards or common values: if any rank does, a save without a file is
            refused.
    """

    def __init__(
        self,
        operation: Operation,
        target: Path,
        header: CheckpointHeader,
        *,
        overwrite: bool,
        sha256: bool = False,
        fingerprints: bool = False,
        journal: Journal | None = None,
        check: Callable[[Path, Path], None] | None = None,
        forecast: Forecast = NO_FORECAST,
        room: Room = UNLIMITED,
        memory_budget: int | None = None,
        given: bool = False,
    ) -> None:
        self.operation = operation
        self._given = given
        #: The strategy, if any rank gives it something; else ``""``.
        self._author = ""
        self.memory_budget = memory_budget
        #: The least bytes that writing takes besides the tensors.
        self.memory_least = 0
        self.target = target
        self._header = header
        self.sha256 = sha256
        self.fingerprints = fingerprints
        self.save_id = ""
        #: Digest algorithm of the files of every rank.
        self.algorithm = ""
        #: Number of ranks that write, for the record.
        self.world_size = operation.comm.world_size
        #: When this rank's phases began and ended; of a save only: a conversion or migration is not the save.
        self.timeline = Timeline(operation.created)
        self._journal = journal
        self._check = check
        self.room = room
        self._writer: CheckpointWriter | None = None
        self._committer = make_committer(
            target,
            operation.plugins,
            overwrite=overwrite,
            journal=journal,
            memory_budget=memory_budget,
        )
        begun, free, rest = Begun(), 0, 0
        try:
            with operation.local_phase("staging"):
                self.memory_least = self._committer.prepare(forecast.nbytes)
                check_memory_budget(memory_budget, self.memory_least, f"a save to {target} takes")
                # no message between the ranks here: _announce is the next one, and raises the main rank's error on all
                if operation.comm.is_main:
                    begun, free = self._committer.begin(), self._find_free()
                    rest = room.find_rest(free, forecast)
            self._announce(begun, forecast, free, rest)
            self.timeline.align()
        except BaseException:
            self.abort()
            raise

    @property
    def staging(self) -> Path | None:
        """The local directory to which this rank writes its files."""
        return self._committer.staging

    @property
    def url(self) -> str:
        """URL to which files are uploaded after they are written; ``""`` if they are not uploaded."""
        return self._committer.url

    @property
    def is_streamed(self) -> bool:
        """Whether files go to a store while they are written."""
        return self._committer.is_streamed

    def writer(self) -> CheckpointWriter:
        """Return a new writer of this rank's files; it may fail on one rank, as in :meth:`Comm.local_phase`."""
        comm = self.operation.comm
        with comm.local_phase("starting the file threads"):
            kind = CheckpointWriter if self._journal is None else partial(ResumableWriter, self._journal)
            writer = self._writer = kind(
                self.staging or Path(),
                comm.rank,
                sha256=self.sha256,
                algorithm=self.algorithm,
                author=self.operation.strategy,
                fingerprints=self.fingerprints,
                count=self.operation.count,
                store=self._committer.open_stream(),
                memory_budget=self.memory_budget,
            )
        return writer

    def run(self, write: Callable[[CheckpointWriter, str], None], content: Any = None) -> None:
        """Collective: write files on all ranks, and commit them if every rank has succeeded; else all ranks raise.

        The target is unchanged then. ``write`` gets the writer and the save's id, and writes this rank's files, and
        their fingerprints.
        """
        try:
            with self.writer() as writer:
                self.operation.comm.sync_errors()  # the strategy may use smaller groups, and write for hours
                with self.operation.local_phase("writing"):
                    write(writer, self.save_id)
                    self.operation.set_nbytes(sum(file.size for file in writer.files))
                self.timeline.add_writing(writer.times)
                self.commit(writer, content=content)
        except BaseException:  # Ctrl-C, too: nothing of the save may stay
            self.abort()
            raise

    def commit(self, writer: CheckpointWriter, before: WrittenFiles | None = None, content: Any = None) -> None:
        """Collective: commit the files of all ranks; other ranks know that it succeeded after the next sync of errors.

        If any rank failed, all raise, and the target is unchanged. The writer has written this rank's files; on the
        main rank it writes the record and ``metadata.json``. ``before`` are files of this rank that another writer has
        written.
        """
        comm = self.operation.comm
        ready = time.perf_counter()
        with comm.local_phase("checking the files of this rank"):
            added = writer.recorded_files()
        files = added if before is None else before.files + added
        parts = (*writer.parts, *(() if before is None else before.parts))
        if self.sha256:
            self._hash_shared(writer, parts)
        sha256 = writer.sha256 if before is None else {**before.sha256, **writer.sha256}
        sums = (*writer.sums, *(() if before is None else before.sums))
        streamed = writer.streamed if before is None else {*writer.streamed, *before.streamed}
        uploading = partial(self.operation.local_phase, "uploading")
        self._committer.send([file.name for file in files], [file.name for file in added], streamed, uploading)
        # before the gather: once the main rank has all records it may commit, and the files must stay
        self._committer.hand_over()
        nbytes = sum(file.size for file in files) + sum(sum(part.lengths) for part in parts)
        timeline = self.timeline.pack(ready, nbytes) if self.operation.kind == "save" else b""
        everyone = comm.gather_up_to(INLINE_TABLES, WrittenFiles(files, sha256, parts, sums, timeline))
        fingerprints: dict[str, str] = {}
        if everyone is None and self.fingerprints:
            fingerprints = self._add_by_owners(sums)
            everyone = comm.gather_up_to(INLINE_TABLES, WrittenFiles(files, sha256, parts, timeline=timeline))
        has_tables = everyone is None
        if everyone is None:
            with self.operation.local_phase("writing the tables of digests"):
                files = writer.move_tables(files)
                self._committer.send_more([file.table_name for file in files if file.table_name], writer.streamed)
            sha256 = {**sha256, **writer.sha256}
            everyone = comm.gather(WrittenFiles(files, sha256, parts, timeline=timeline))
        self.operation.set_nbytes(nbytes)
        with self.operation.local_phase("committing"):
            if comm.is_main:
                shared = writer.complete_parts(part for rank in everyone for part in rank.parts)
                if has_tables:
                    shared = writer.move_tables(shared)
                hashes = {name: digest for part in everyone for name, digest in part.sha256.items()} | writer.sha256
                written = WrittenFiles([*shared, *(file for part in everyone for file in part.files)], hashes)
                check_records(written.files, self._author)
                fingerprints |= add_sums(data for part in everyone for data in part.sums)
                fingerprints |= writer.known_fingerprints
                timings = gather_timings([part.timeline for part in everyone], self.timeline)
                self._write_markers(writer, written, content, fingerprints, timings)
                self._committer.publish(writer, written.files, self._check)
        self._committer.close()

    def _add_by_owners(self, sums: Iterable[bytes]) -> dict[str, str]:
        """Collective: return the fingerprints on the main rank where one rank must not receive the sums of all."""
        comm = self.operation.comm
        arrived = comm.all_to_all(split_sums(sums, lambda key: find_owner(key, comm.world_size)))
        with comm.local_phase("adding up fingerprints"):
            owned = add_sums(arrived.values())
        return dict(sorted(item for part in comm.gather(owned) for item in part.items()))

    def _hash_shared(self, writer: CheckpointWriter, parts: Sequence[FilePart]) -> None:
        """Collective: compute the SHA-256 of the files that several ranks have written, each file on one rank."""
        comm = self.operation.comm
        # all parts are durable, and their files closed, once every rank has come here
        everyone = comm.all_gather([(part.name, part.size) for part in parts])
        files = sorted({file for theirs in everyone for file in theirs})
        ranks = assign_holders([tuple(range(comm.world_size))] * len(files), [size for _, size in files])
        with self.operation.local_phase("hashing the files that several ranks have written"):
            writer.hash_files(name for (name, _), rank in zip(files, ranks, strict=True) if rank == comm.rank)

    def abort(self, streamed: Iterable[str] = ()) -> None:
        """Remove all that the save has written.

        ``streamed`` has the names of objects that this rank has streamed to a store by other writers than
        :meth:`writer`'s.
        """
        written = () if self._writer is None else self._writer.streamed
        self._committer.abort({*streamed, *written}, is_main=self.operation.comm.is_main)

    def _find_free(self) -> int:
        return self.room.limit(self._committer.find_free())

    def _announce(self, begun: Begun, forecast: Forecast, free: int, rest: int) -> None:
        """Collective: announce the save's name, negotiate the digest, and refuse a save that cannot fit.

        All ranks raise the same NotEnoughSpaceError.
        """
        own = bytes(_NAME.size)  # of the other ranks: the sum is what the main rank gives
        if begun.save_id:
            own = bytes.fromhex(begun.save_id + (begun.owner or Owner.current()).text)
        # two in one number: comm.total sends few numbers in one message
        flags = int(begun.is_replacing) + 2 * self._given
        bits = self.operation.comm.world_size.bit_length()  # the votes for each digest are counted in bits of their own
        votes, lacking, flags, *name = self.operation.comm.total(
            1 << bits * digest_vote(), forecast.nbytes + rest - free, flags, *_NAME.unpack(own)
        )
        replacing, givers = flags & 1, flags >> 1
        self._author = self.operation.strategy if givers else ""
        self.algorithm = negotiate_digest((votes.bit_length() - 1) // bits)
        text = _NAME.pack(*name).hex()
        self.save_id = text[:_ID_DIGITS]
        self._committer.join(self.save_id, Owner.from_text(text[_ID_DIGITS:]), is_replacing=bool(replacing))
        if lacking > 0:  # the same number on every rank
            self._check_space(forecast, free, rest)

    def _check_space(self, forecast: Forecast, free: int, rest: int) -> None:
        """Collective: refuse the save if it does not fit with tied tensors counted once, nor once room was made."""
        comm = self.operation.comm
        with comm.local_phase("counting tied tensors once"):
            least = forecast.count_least()
        needed, free, rest = comm.total(least, free, rest)  # only the main rank knows what is free, and the rest
        if needed + rest > free and self.room.make is not None and not self.room.never_fits(needed + rest):
            self.room.make(self.room.name_limit(self.target, free))
            free = self._find_free() if comm.is_main else 0
        with self.operation.local_phase("forecasting the space"):
            if comm.is_main:
                refuse_full(self.target, needed, f"{self.operation.kind} to", free, self.room, rest)
        comm.sync_errors()

    def _write_markers(
        self,
        writer: CheckpointWriter,
        written: WrittenFiles,
        content: Any,
        fingerprints: dict[str, str],
        timings: SaveTimings | None,
    ) -> None:
        files = written.files
        if self.fingerprints or fingerprints:
            files = [*files, writer.write(FINGERPRINTS_NAME, pack_fingerprints(fingerprints), keys=0)]
        backend, version, reader, lineage = self._header
        record = Record(
            save_id=self.save_id,
            backend=backend,
            version=version,
            reader=reader,
            writer={"shardckpt": __version__, "torch": torch.__version__},
            world_size=self.world_size,
            digest_algorithm=self.algorithm,
            files=tuple(sorted(files, key=lambda file: file.name)),
            parent=lineage.parent,
            step=lineage.step,
            content_metadata=as_json(content),
            timings=timings,
        )
        marker = Marker(sharded_backend=backend, sharded_backend_version=version)
        contents = {RECORD_NAME: record.dump(), MARKER_NAME: marker.dump()}
        # both are begun before the first is finished: one commit of the file system's journal then serves both
        for file in [writer.begin(name, content, keys=0) for name, content in contents.items()]:
            writer.finish(file)
        # after the markers: integrity.json lists them, too
        if self.sha256:
            hashes = {**written.sha256, **writer.sha256}
            writer.write(INTEGRITY_NAME, Integrity(files=hashes).dump(), keys=0)


def as_json(content: Any) -> Any:
    """Return the value as JSON would read it back, if that equals it; else None."""
    # None: the record must not say something else than the caller, a tuple as a list for example
    try:
        stored = {"content_metadata": content}
        _ANY.dump_json(stored)  # as the record is dumped, whose writer takes some 250 levels
        # as a reader of the record does, which refuses NaN and infinity
        copy = parse_json(json.dumps(stored).encode())["content_metadata"]
    except (TypeError, ValueError, RecursionError):
        return None
    return copy if copy == content else None


def check_records(files: list[FileRecord], author: str = "") -> None:
    """Raise unless every file of all ranks has one record, with digests; if an author is named, there must be some."""
    if author and not files:
        raise PluginError(
            f"{author} has written no file on any rank for the given state: write by context.writer.write or "
            "create; or let a library write in context.writer.directory, and call context.writer.adopt(name) for each "
            "file"
        )
    counts = Counter(name for file in files for name in file.list_files())
    twice = [f"{name!r} by rank {file.rank}" for file in files for name in file.list_files() if counts[name] > 1]
    if twice:
        raise StorageError(f"files were recorded twice: {listed(twice)}; put the rank's number into their names")
    # of a save to a directory only one could be created; ranks that save to a URL do not see each other's files
    folders = find_folders(counts)
    both = [f"{file.name!r} by rank {file.rank}" for file in files if file.name in folders]
    if both:
        raise StorageError(f"files have the names of folders that other files are in: {listed(both)}; rename one")
    bare = [repr(file.name) for file in files if not (_DIGEST.fullmatch(file.digest) and file.segments)]
    if bare:
        raise StorageError(
            f"files were recorded without digests: {listed(bare)}; write them by the checkpoint's writer, or adopt them"
        )
