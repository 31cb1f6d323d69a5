from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.background.process import run_program, worker

__all__ = ["worker"]  # fixtures


def test_the_directory_of_the_job_hides_no_module(tmp_path: Path) -> None:
    """A file in the working directory that is named like a module of the library is not imported in its place."""
    (tmp_path / "socket.py").write_text("raise SystemExit('the wrong socket')")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(
        textwrap.dedent("""
        from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
        with AsyncCallsQueue(persistent=True) as queue:
            queue.schedule_async_request(AsyncRequest(None, (), []))
    """)
    )
    done = subprocess.run(
        [sys.executable, "scripts/train.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_ends_with_its_parent_although_a_fork_lives() -> None:
    """The process of a killed trainer ends, although a forked data loader holds its pipe open."""
    program = """
        import os, signal, time
        from shardckpt.background.process import WorkerProcess
        from shardckpt.async_save import AsyncRequest
        from tests.background import calls
        worker = WorkerProcess()
        worker.submit(AsyncRequest(calls.wait, (0, None), [])).result(30)
        loader = os.fork()
        if loader == 0:
            os.closerange(0, 3)
            time.sleep(60)
            os._exit(0)
        print(worker.pid, loader, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run_program(program)  # ends when nobody has its output open any more: neither trainer nor worker
    worker, loader = map(int, done.stdout.split())
    os.kill(loader, signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    _gone(worker)


def _gone(pid: int) -> None:
    """Wait until no such process runs; whoever adopted it may take its time to see that it has ended."""
    for _ in range(300):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return
        except FileNotFoundError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} still runs")
