from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from tests import backends
from tests.background import jobs
from tests.background.exit import end_together, start_script, write_script
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends import Backend

THREAD_FIRST = pytest.mark.parametrize("persistent", [False, *in_proof(True)], ids=["thread", "process"])

ALONE = """
    import sys, torch
    from shardckpt import dist_checkpointing as dc
    from shardckpt.async_save import AsyncCallsQueue
    from shardckpt.mapping import ShardedTensor

    def save():
        queue = AsyncCallsQueue(persistent={persistent})
        state = {{"w": ShardedTensor.from_rank_offsets("w", torch.ones(1 << 20)), "iteration": 3}}
        queue.schedule_async_request(dc.save(state, sys.argv[1], {backend!r}, async_sharded_save=True))
        state["w"].data.zero_()

    save()
"""


@backends.both_in_proof
@THREAD_FIRST
def test_a_save_in_flight_at_the_end_of_one_process_is_finished(
    tmp_path: Path, backend: Backend, persistent: bool
) -> None:
    """A program that ends right after scheduling leaves a whole checkpoint; it needs no __main__ guard."""
    script = write_script(ALONE.format(persistent=persistent, backend=backend.name), tmp_path)
    command = [sys.executable, "-W", "error", script, str(tmp_path / "c")]  # no fork: as users have it
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    loaded = dc.load_plain_tensors(tmp_path / "c")
    assert loaded["w"].min() == 1
    assert dc.load_common_state_dict(tmp_path / "c")["iteration"] == 3
    assert (tmp_path / "c" / backend.index).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "train.py"]


@backends.both_in_proof
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["thread", "process"])
def test_a_large_save_in_flight_at_the_end_of_one_process_is_finished(
    tmp_path: Path, backend: Backend, persistent: bool
) -> None:
    """Writing and its metadata need threads that the ending interpreter no longer gives: the save ends before that."""
    program = f"""
        import sys, torch
        from shardckpt import dist_checkpointing as dc
        from shardckpt.async_save import AsyncCallsQueue
        from shardckpt.mapping import ShardedTensor
        small, large = torch.ones(2), torch.ones(1 << 20)
        shard = ShardedTensor.from_rank_offsets
        state = {{f"{{n}}": shard(f"{{n}}", small if n % 400 else large) for n in range(4000)}}
        state["text"] = "x" * (1 << 19)
        queue = AsyncCallsQueue(persistent={persistent})
        queue.schedule_async_request(dc.save(state, sys.argv[1], async_sharded_save=True, verify_integrity=True))
        sys.exit(3)
    """
    process = start_script(program, tmp_path, str(tmp_path / "c"))
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (3, "")
    for name in (backend.common, *backend.for_others):
        assert (tmp_path / "c" / name).stat().st_size > 256 << 10  # more than the calling thread writes itself
    assert len(dc.load_plain_tensors(tmp_path / "c")) == 4000


@backends.both_in_proof
def test_a_save_that_fails_at_the_end_is_told(tmp_path: Path) -> None:
    """A failure in one queue at the end of the program is in its output, and the other queue's save is finished."""
    program = """
        import sys, torch
        from shardckpt import dist_checkpointing as dc
        from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
        from shardckpt.mapping import ShardedTensor
        def fail(): raise OSError("disk on fire")
        bad, good = AsyncCallsQueue(), AsyncCallsQueue()
        bad.schedule_async_request(AsyncRequest(fail, (), []))
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(5))}
        good.schedule_async_request(dc.save(state, sys.argv[1], async_sharded_save=True))
    """
    process = start_script(program, tmp_path, str(tmp_path / "c"))
    output, _ = process.communicate(timeout=60)
    assert "a background save failed at the end of the program" in output
    assert "disk on fire" in output
    assert dc.load_plain_tensors(tmp_path / "c")["w"].eq(1).all()


@backends.both_in_proof
@THREAD_FIRST
def test_a_save_in_flight_at_the_end_of_a_job_is_finished(tmp_path: Path, persistent: bool) -> None:
    """Ranks that end together without finalizing, however they end, leave a whole checkpoint and say nothing."""
    codes, outputs = end_together(tmp_path, persistent=persistent, end="time.sleep(rank); sys.exit(3 * rank)")
    assert codes == [0, 3], outputs
    assert outputs == ["", ""]
    assert dc.load_plain_tensors(tmp_path / "c")["w"].min() == 1
    assert not list(tmp_path.glob(".*"))


@backends.both_in_proof
@THREAD_FIRST
def test_a_save_in_flight_when_the_group_is_destroyed_is_absent(tmp_path: Path, persistent: bool) -> None:
    """Ranks that cannot finalize any more say what is lost and what to do, and leave nothing of it."""
    codes, outputs = end_together(tmp_path, persistent=persistent, end="dist.destroy_process_group()")
    assert codes == [0, 0], outputs
    for output in outputs:
        assert f"a background save was not finalized: {tmp_path}/c is absent" in output
        assert "the process group was destroyed before" in output
        assert "Call close() of its CheckpointManager or AsyncCallsQueue" in output
    assert outputs[0].startswith("shardckpt: the program ends")
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.glob(".*"))


@backends.both_in_proof
def test_a_synchronous_save_starts_no_process(tmp_path: Path) -> None:
    """A plain save needs no __main__ guard, no manager process, no psutil and no multiprocessing child."""
    program = """
        import subprocess, sys, os, torch
        def refuse(*args, **kwargs): raise RuntimeError("a process was started")
        subprocess.Popen.__init__ = refuse
        os.fork = refuse
        sys.modules["psutil"] = None
        from shardckpt import dist_checkpointing as dc
        from shardckpt.mapping import ShardedTensor
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(5))}, sys.argv[1])
    """
    process = start_script(program, tmp_path, str(tmp_path / "c"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@backends.both_in_proof
def test_a_killed_training_leaves_no_worker_and_no_checkpoint(tmp_path: Path) -> None:
    """When the training process is killed, its worker ends by itself, and what was in flight is absent."""
    program = """
        import os, signal, sys, time, torch
        from shardckpt import dist_checkpointing as dc
        from shardckpt.async_save import AsyncCallsQueue
        from shardckpt.mapping import ShardedTensor
        queue = AsyncCallsQueue(persistent=True)
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1 << 20))}
        queue.schedule_async_request(dc.save(state, sys.argv[1], async_sharded_save=True))
        print(queue._caller._worker.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start_script(program, tmp_path, str(tmp_path / "c"))
    output, _ = process.communicate(timeout=60)  # ends when the worker, which has the same stdout, has ended too
    assert process.returncode == -9, output
    assert output.split()[0].isdecimal()
    assert not (tmp_path / "c").exists()
    jobs_state = jobs.state(1.0)
    dc.save(jobs_state, tmp_path / "c")
    jobs.check(str(tmp_path / "c"), 1.0)
