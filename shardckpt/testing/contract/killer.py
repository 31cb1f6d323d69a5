"""Program: kill saves at their steps, and print the result of the next load as JSON.

``python -m shardckpt.testing.contract.killer FOLDER COUNT`` reads the subject from ``FOLDER/subject``. torch is
imported once; each save is a forked child that kills itself at the n-th call that opens, writes, syncs, renames or
removes a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.distributed.pickling import unpickle_trusted
from shardckpt.errors import CheckpointingException, IncompleteCheckpointError, NotACheckpointError
from shardckpt.testing.contract import jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.testing.contract.subject import Subject

#: Functions of ``os`` that are a step each, besides the functions that Python audits.
_CALLS = ("write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "posix_fallocate", "ftruncate", "close")
_AUDITED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class _Steps:
    """Counts the steps of this process from now on, and kills it at one of them."""

    def __init__(self, folder: str, last: int) -> None:
        self._folder = folder
        self._last = last
        self.count = 0

    def start(self) -> None:
        """Count from now on."""
        for name in _CALLS:
            if hasattr(os, name):
                setattr(os, name, self._counted(getattr(os, name)))
        sys.addaudithook(self._audit)

    def _counted(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._step()
            return real(*args, **kwargs)

        return call

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _AUDITED and any(self._folder in str(arg) for arg in args):
            self._step()

    def _step(self) -> None:
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def _save(subject: Subject, path: str, value: int, overwrite: bool, last: int) -> int | None:
    """Save in a child that is killed at its n-th step; return how many steps there were, or None if it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            steps = _Steps(str(Path(path).parent), last)
            real_write = os.write
            steps.start()
            jobs.save_version(subject, path, value, overwrite=overwrite)
            real_write(write, str(steps.count).encode())
            status = 0
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as report:
        said = report.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    if not said:
        raise SystemExit("a save in a child failed without being killed")
    return int(said)


def _state(subject: Subject, path: str) -> str:
    """Return the result of a load: absent, old, new, or the fault."""
    try:
        loaded = jobs.load_version(subject, path)
    except CheckpointingException as exc:
        absent = isinstance(exc, (NotACheckpointError, IncompleteCheckpointError))
        return "absent" if absent else f"{type(exc).__name__}: {exc}"
    for name, value in (("old", 1), ("new", 2)):
        with contextlib.suppress(AssertionError):
            jobs.check_version(loaded, value)
            return name
    return "a mixture of two saves"


def _kill(subject: Subject, folder: Path, case: str, count: int) -> Iterator[list[Any]]:
    """Kill a first save or an overwrite at so many steps, and yield the results of loads."""
    run, pristine = folder / "run", folder / "pristine"
    pristine.mkdir()
    if case == "overwrite":
        jobs.save_version(subject, str(pristine / "checkpoint"), 1)
    path = str(run / "checkpoint")

    def attempt(last: int) -> int | None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(pristine, run)
        return _save(subject, path, 2, case == "overwrite", last)

    steps = attempt(0) or 0
    for number in range(count):
        step = 1 + number * steps // count
        killed = attempt(step) is None
        state = _state(subject, path)
        jobs.save_version(subject, path, 2, overwrite=True)
        later = _state(subject, path)
        left = sorted(entry.name for entry in run.iterdir() if entry.name != "checkpoint")
        yield [case, step, steps, killed, state, later, left]
    shutil.rmtree(pristine)


def main() -> None:
    """Print the outcome of each kill."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    subject = unpickle_trusted((folder / "subject").read_bytes())
    outcomes: list[list[Any]] = []
    with subject.registered():
        warm = str(folder / "warm" / "checkpoint")
        Path(warm).parent.mkdir()
        for value in (1, 2):  # twice, since a first save and load do more
            jobs.save_version(subject, warm, value, overwrite=True)
            jobs.load_and_check(subject, warm, value)
        for case in ("fresh", "overwrite"):
            outcomes.extend(_kill(subject, folder, case, count))
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
