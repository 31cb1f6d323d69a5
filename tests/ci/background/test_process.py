from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.background.callers import PersistentAsyncCaller
from shardckpt.background.process import WorkerProcess, WorkerTraceback
from shardckpt.engine import long_phase
from shardckpt.errors import CheckpointingException, RankFailedError, StorageError
from tests.background import calls, jobs
from tests.background.process import run_program, worker
from tests.distributed.long_wait import nothing_said_before
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["nothing_said_before", "worker"]  # fixtures


@pytest.fixture(scope="module")
def forked_workers() -> None:
    """They are interpreters here, as trainers start them."""


def _outcome(worker: WorkerProcess, function: Any, *args: Any) -> BaseException | None:
    return worker.submit(AsyncRequest(function, args, [])).exception(30)


def test_a_process_that_is_killed_between_two_saves_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The next save works, and the log has the signal, the save, and that a new process writes it."""
    caller = PersistentAsyncCaller()
    requests = [AsyncRequest(os.getpid, (), [], name=f"runs/step-{step}") for step in (1, 2)]
    pid = caller.schedule_async_call(requests[0]).result(30)
    os.kill(pid, signal.SIGKILL)
    assert caller._worker is not None
    caller._worker._threads[0].join(30)  # which sees its end
    assert caller.schedule_async_call(requests[1]).result(30) != pid
    caller.close()
    (said,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert f"(process {pid}) was ended by signal 9 (Killed, as the kernel does where memory runs out" in said
    assert said.endswith("a new one is started for runs/step-2")


def test_an_error_without_a_text_is_an_error(worker: WorkerProcess) -> None:
    """A call that raises an exception with an empty message has not succeeded."""
    assert isinstance(_outcome(worker, calls.fail_without_a_word), CheckpointingException)


def test_an_error_keeps_its_class_and_its_causes(worker: WorkerProcess) -> None:
    """The trainer gets the error's class and text, and the process's traceback with all causes behind it."""
    error = _outcome(worker, calls.fail_with_a_cause)
    assert isinstance(error, StorageError)
    assert str(error) == f"in process {worker.pid}: __0_0.distcp cannot be written"
    assert isinstance(error.__cause__, WorkerTraceback)
    assert "OSError: disk on fire" in str(error.__cause__)


def test_an_error_of_a_plugin_keeps_its_class(worker: WorkerProcess) -> None:
    """A plugin's exception class arrives in the trainer as itself; one that only the process has is named."""
    error = _outcome(worker, calls.fail_like_a_plugin)
    assert isinstance(error, calls.BadCodeError)
    assert (error.code, str(error)) == (7, f"in process {worker.pid}: f: code 7")
    error = _outcome(worker, calls.fail_like_a_foreign_plugin)
    assert isinstance(error, calls.ForeignError)
    assert isinstance(error, CheckpointingException)
    assert str(error) == f"in process {worker.pid}: odd"
    error = _outcome(worker, calls.fail_like_nobody_else)
    assert isinstance(error, RankFailedError)
    assert str(error) == f"in process {worker.pid}: LocalError: odd"


def test_a_result_that_cannot_be_unpickled_ends_the_wait(worker: WorkerProcess) -> None:
    """A result that breaks in the trainer is that call's error; the next call works."""
    error = _outcome(worker, calls.give_what_nobody_can_take)
    assert isinstance(error, RankFailedError)
    assert "cannot be unpickled in the training process: TypeError: not here" in str(error)
    assert worker.submit(AsyncRequest(calls.wait, (0, 5), [])).result(30) == 5


def test_functions_of_the_program_itself_are_explained(worker: WorkerProcess) -> None:
    """What stands in __main__ is not there in the process: the error says where it must stand, and the other way."""
    program = """
        import sys
        from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
        def write(*args): pass
        with AsyncCallsQueue(persistent=True) as queue:
            queue.schedule_async_request(AsyncRequest(write, (), []))
            try:
                queue.maybe_finalize_async_calls(blocking=True)
            except Exception as exc:
                print(exc)
    """
    done = run_program(program)
    assert "not in __main__" in done.stdout
    assert "persistent=False" in done.stdout


def test_scheduling_does_not_wait_for_a_busy_process(worker: WorkerProcess, tmp_path: Path) -> None:
    """Calls larger than any pipe are taken at once, while the process works on another; all end in order."""
    busy = worker.submit(AsyncRequest(calls.wait_for, (str(tmp_path / "go on"),), []))
    large = [worker.submit(AsyncRequest(calls.length, (bytes(n << 20),), [])) for n in (8, 4)]
    assert not busy.done()
    (tmp_path / "go on").touch()
    assert [future.result(30) for future in large] == [8 << 20, 4 << 20]
    assert busy.done()


def test_threads_may_share_a_process(worker: WorkerProcess) -> None:
    """Calls from several threads at once do not mix."""
    results: dict[int, int] = {}

    def call(size: int) -> None:
        results[size] = worker.submit(AsyncRequest(calls.length, (bytes(size),), [])).result(30)

    threads = [threading.Thread(target=call, args=(1 << 20 | number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    assert all(size == result for size, result in results.items())


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, *in_proof(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)]
)
def test_signals_to_the_whole_job_do_not_end_a_save(worker: WorkerProcess, number: signal.Signals) -> None:
    """Ctrl-C, a scheduler's warning and its end of a job are for the training process, which may finish its saves."""
    future = worker.submit(AsyncRequest(calls.wait, (0.3, 7), []))
    os.kill(worker.pid, number)
    assert future.result(30) == 7


def test_modules_of_the_current_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process starts in a directory with a module that is called as one of Python's own, which training lacks."""
    for name in ("signal.py", "enum.py"):
        (tmp_path / name).write_text("raise SystemExit('it is imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path)])
    process = WorkerProcess()
    assert process.submit(AsyncRequest(calls.length, (b"four",), [])).result(30) == 4
    process.close(abort=False)


def test_queues_have_processes_of_their_own() -> None:
    """Closing one queue does not disturb what another has in flight."""
    with AsyncCallsQueue(persistent=True) as one, AsyncCallsQueue(persistent=True) as other:
        one.schedule_async_request(AsyncRequest(calls.wait, (0.5,), []))
        other.schedule_async_request(AsyncRequest(calls.wait, (0.0,), []))
        other.close(abort=True)
        assert one.maybe_finalize_async_calls(blocking=True) == [1]


def test_a_fork_has_a_process_of_its_own() -> None:
    """A child of the trainer that goes on with its queue does not talk into its parent's process."""
    program = """
        import os, sys
        from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
        from tests.background import calls
        queue = AsyncCallsQueue(persistent=True)
        def save():
            queue.schedule_async_request(AsyncRequest(calls.wait, (0, None), []))
            return queue.maybe_finalize_async_calls(blocking=True, timeout=20)
        assert save() == [1]
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if save() == [2] else 2
                queue.close()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert save() == [2]
        queue.close()
    """
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_a_process_that_hangs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the process that writes stands still, the training's log says in which phase the save is."""
    monkeypatch.setattr(long_phase, "NOTICE_AFTER", 0.5)
    monkeypatch.setattr(long_phase, "_ROUND", 0.1)
    with AsyncCallsQueue(persistent=True) as queue:
        queue.schedule_async_request(dc.save(jobs.state(1.0), tmp_path / "a", async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)
        process = queue._caller._worker.pid  # type: ignore[attr-defined]
        os.kill(process, signal.SIGSTOP)
        try:
            queue.schedule_async_request(dc.save(jobs.state(1.0), tmp_path / "b", async_sharded_save=True))
            while f"save of {tmp_path / 'b'} has been in 'writing'" not in caplog.text:
                time.sleep(0.01)
        finally:
            os.kill(process, signal.SIGCONT)
    jobs.check(str(tmp_path / "b"), 1.0)
