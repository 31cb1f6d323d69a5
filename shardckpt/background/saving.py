"""A background save: all ranks plan it together, each writes its files alone, and all commit it together."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.background import staging
from shardckpt.background.request import AsyncRequest
from shardckpt.background.staging import StagedWork, count_staged_bytes, stage
from shardckpt.commit.upload import delete_if_failed, open_stream, upload_files
from shardckpt.engine.operation import Operation
from shardckpt.engine.plan_cache import saved_plans
from shardckpt.engine.progress import Progress, wants_progress
from shardckpt.engine.saving import check_state
from shardckpt.engine.transaction import Transaction, WrittenFiles, as_json
from shardckpt.errors import CheckpointingException, NotEnoughSpaceError
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.origin import name_origin
from shardckpt.plugins.stores import open_folder
from shardckpt.storage.memory_budget import check_memory_budget, limit_uploads
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.storage.writer import CheckpointWriter, WriteTimes
from shardckpt.strategy import AsyncSaveStrategy, PlanContext, SaveContext

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from shardckpt.distributed.comm import Comm
    from shardckpt.engine.long_phase import LongPhase
    from shardckpt.engine.plan_cache import CachedPlan
    from shardckpt.engine.saving import SaveOptions
    from shardckpt.mapping.base import ShardedBase, ShardedStateDict
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.strategy import PreparedSave
    from shardckpt.validation.completeness import GivenShards


class _Job(NamedTuple):
    """A rank's input for a write, pickled for the worker process.

    Attributes:
        url: ``""`` for a local checkpoint.
        total: Bytes to write, if a plugin asks for the progress; else 0.
        memory_budget: In bytes, without the copy.
    """

    staging: Path
    rank: int
    save_id: str
    sha256: bool
    algorithm: str
    url: str
    strategy: str
    fingerprints: bool
    directory: str
    total: int
    memory_budget: int | None


class _Result(NamedTuple):
    """A rank's result of a write, pickled on the way back from the worker process."""

    save_id: str
    written: WrittenFiles
    shards: list[ShardedBase | PackedShards]
    result: Any
    times: WriteTimes


@dataclass
class _BackgroundSave:
    """A save in flight, on this rank."""

    transaction: Transaction
    given: GivenShards
    prepared: PreparedSave
    context: PlanContext
    content: Any
    cached: CachedPlan | None
    total: int = 0
    memory_budget: int | None = None
    staged: StagedWork | None = None
    result: _Result | None = None
    #: The phase of the writing, which begins after the copy.
    writing: LongPhase | None = None

    def __post_init__(self) -> None:
        #: Ends the save if its request is dropped, or the program ends, before it is finalized.
        self._unfinished = weakref.finalize(self, _end_dropped, self.transaction, os.getpid())

    def request(self) -> AsyncRequest:
        """Return the save as a request for an AsyncCallsQueue."""
        transaction = self.transaction
        rank = transaction.operation.comm.rank
        job = _Job(
            transaction.staging,  # type: ignore[arg-type]
            rank,
            transaction.save_id,
            transaction.sha256,
            transaction.algorithm,
            transaction.url,
            transaction.operation.strategy,
            transaction.fingerprints,
            str(transaction.target),
            self.total,
            transaction.memory_budget,
        )
        return AsyncRequest(
            _write,
            (job, None),
            [self.finish],
            preload_fn=self.stage,
            written_fn=self.written,
            failed_fn=self.failed,
            name=str(transaction.target),
        )

    def stage(self) -> StagedWork:
        """Copy the tensors to a staging buffer, and return the work with the copies."""
        if self.staged is not None:
            raise CheckpointingException(f"the request to save {self.transaction.target} has been scheduled before")
        cached, operation = self.cached, self.transaction.operation
        with operation.blocking("copying the tensors"):
            with self.transaction.timeline.staging(), _name_phase("copying the tensors"):
                self.staged = stage(self.prepared.work, None if cached is None else cached.layout, self.memory_budget)
            if cached is not None:
                cached.layout = self.staged.layout
            self.writing = operation.start_phase("writing")
        return self.staged

    def written(self, future: Future[_Result]) -> None:
        """Release the staging buffer and keep the result; called when this rank's writing has ended."""
        if self.staged is not None:
            self.staged.release()
        error = future.exception()
        if error is None:
            self.result = future.result()
        nbytes = 0 if self.result is None else sum(file.size for file in self.result.written.files)
        if self.writing is not None:
            self.transaction.operation.end_phase(self.writing, error, nbytes=nbytes)

    def finish(self) -> None:
        """Collective: write the files that name the files of all ranks, and commit."""
        transaction, operation = self.transaction, self.transaction.operation
        comm = operation.comm
        with operation.blocking(), comm.collective_phase("finishing a background save"):
            comm.agree(save_in_this_place_of_the_queue=transaction.save_id)
            with operation.local_phase("finishing a background save"):
                if self.result is None or self.result.save_id != transaction.save_id:
                    raise CheckpointingException(f"rank {comm.rank} has not written its part of {transaction.target}")
            with transaction.writer() as writer:
                if self.prepared.finish is not None:
                    context = SaveContext(**vars(self.context), writer=writer)
                    self.prepared.finish(comm.gather(self.result.result), context)
                self.given.compare([*self.result.shards, *writer.shards], comm)
                transaction.timeline.add_writing(self.result.times)
                transaction.commit(writer, self.result.written, self.content)
        operation.close_span()
        self._unfinished.detach()

    def failed(self, error: BaseException) -> BaseException:
        """Remove the save's files, unless it has ended and only a later finalize function failed."""
        if self._unfinished.detach() is None:
            return error
        self.transaction.abort(() if self.result is None else self.result.written.streamed)
        if isinstance(error, NotEnoughSpaceError):  # a finalization has raised it: all ranks are here
            error = self.transaction.room.explain(error)
        self.transaction.operation.close_span(error)
        self.transaction.operation.log_failure(error)
        return error


#: Threads that end dropped saves; the garbage collector may run within a put, which a SimpleQueue allows.
_ending: SimpleQueue[threading.Thread] = SimpleQueue()


def _end_dropped(transaction: Transaction, process: int) -> None:
    """End a save that is not finalized, unless this is a forked child, which ends with a copy of it."""
    if os.getpid() != process:
        return
    thread = threading.Thread(target=_abort_dropped, args=(transaction,), name="shardckpt-dropped-save")
    if threading.main_thread().is_alive():
        # The collector runs this in any thread, which may have a lock that a listener, a log or a store needs here.
        thread.start()
        _ending.put(thread)
    else:  # the program ends: no thread can start, and no other code has a lock
        thread.run()


def _abort_dropped(transaction: Transaction) -> None:
    """Remove a dropped save's files and report its failure; no collective is called."""
    transaction.abort()
    error = CheckpointingException(f"the save to {transaction.target}: its request was dropped before it was finalized")
    transaction.operation.close_span(error)
    transaction.operation.log_failure(error)


def wait_for_dropped() -> None:
    """Wait until the saves that were dropped so far have ended: the next may go to the same place."""
    with suppress(Empty):
        while True:
            _ending.get_nowait().join()


def request_save(
    sharded_state_dict: ShardedStateDict,
    target: Path,
    strategy: Any,
    comm: Comm,
    plugins: PluginManager,
    options: SaveOptions,
) -> AsyncRequest:
    """Collective: plan a background save, and return the request to schedule on an AsyncCallsQueue.

    The arguments are as for :func:`shardckpt.engine.save_checkpoint`.
    """
    wait_for_dropped()
    operation = Operation("save", target, comm, plugins)
    with operation.open_span():
        state = check_state(sharded_state_dict, strategy, operation, options, background=True)
        saver = state.saver
        with operation.local_phase("looking for background saves"):
            if not isinstance(saver, AsyncSaveStrategy):
                raise CheckpointingException(
                    f"{type(saver).__qualname__} saves in the foreground only: "
                    "dist_checkpointing.save(async_sharded_save=False), CheckpointConfig(async_mode='disabled'), or a "
                    "strategy that is a shardckpt.strategy.AsyncSaveStrategy"
                )
        transaction = state.begin(operation, target, options)
        try:
            context = PlanContext(
                comm=comm,
                save_id=transaction.save_id,
                allow_globals=options.allow_globals,
                staging=transaction.staging,
                lineage=options.lineage,
                is_streamed=transaction.is_streamed,
            )
            with operation.local_phase("planning"):
                prepared = saver.prepare(state.shards, state.common, context)
                transaction.memory_budget = _leave_for_writing(
                    options.memory_budget, prepared, transaction.memory_least
                )
            comm.sync_errors()
            transaction.timeline.end_planning()
        except BaseException:
            transaction.abort()
            raise
    content = as_json(options.content_metadata)
    total = state.nbytes if wants_progress(plugins) else 0
    copies = None if options.memory_budget is None else options.memory_budget - transaction.memory_least
    save = _BackgroundSave(transaction, state.given, prepared, context, content, state.lookup.cached, total, copies)
    return save.request()


def _leave_for_writing(budget: int | None, prepared: PreparedSave, least: int) -> int | None:
    """Return the bytes of a memory budget for writing next to the copy of this rank's tensors; None for no budget.

    A budget that is too small for the copy is an error.
    """
    if budget is None:
        return None
    copy = count_staged_bytes(prepared.work)
    check_memory_budget(
        budget,
        copy + least,
        f"a background save copies the tensors of this rank first, {copy:,} bytes, and takes",
        "; or save in the foreground, which copies none: async_sharded_save=False, "
        "CheckpointConfig(async_mode='disabled')",
    )
    return budget - copy


def release_memory() -> None:
    """Return unused staging memory to the system, and clear the plan cache: the next save is as slow as the first."""
    staging.release_memory()
    saved_plans.clear()


@contextmanager
def _name_phase(name: str) -> Iterator[None]:
    """Note the phase in an error of this rank: behind the training no Comm does."""
    try:
        yield
    except Exception as exc:
        vars(exc).setdefault("phase", name)
        raise


@_name_phase("writing shards")
def _write(job: _Job, staged: StagedWork) -> _Result:
    """Write a rank's files; runs in a background thread or the worker process."""
    plugins = get_plugin_manager()  # the worker process's manager has a plugin that reports to the trainer's
    is_asked = job.total and wants_progress(plugins)
    progress = Progress("save", job.directory, job.total, plugins, job.rank) if is_asked else None
    folder = open_folder(job.url, plugins) if job.url else None
    if folder is not None:
        limit_uploads(folder, job.memory_budget)
    with (
        delete_if_failed(folder, job.save_id) as streamed,
        staged.open() as work,  # the outer context: the writer's threads end before the copies are released
        CheckpointWriter(
            job.staging,
            job.rank,
            sha256=job.sha256,
            algorithm=job.algorithm,
            author=job.strategy,
            fingerprints=job.fingerprints,
            count=progress.add if progress else None,
            store=None if folder is None else open_stream(folder, job.save_id),
            streamed=streamed,
            memory_budget=job.memory_budget,
        ) as writer,
    ):
        with name_origin(get_plugin_manager(), work):
            result = work.write(writer)
        files = writer.recorded_files()
        if folder is not None:
            unsent = [file.name for file in files if file.name not in streamed]
            with _name_phase("uploading"):
                upload_files(folder, job.staging, unsent, job.save_id)
        shards = [shard if isinstance(shard, PackedShards) else shard.without_data() for shard in writer.shards]
        written = WrittenFiles(
            files, writer.sha256, tuple(writer.parts), tuple(writer.sums), streamed=tuple(writer.streamed)
        )
        return _Result(job.save_id, written, shards, result, writer.times)
