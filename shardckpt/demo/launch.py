"""Run ``shardckpt demo``: start train.py, kill it, restart it with other numbers of ranks, and compare the losses.

This module does not import torch; each rank does.
"""

from __future__ import annotations

import errno
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Largest relative difference of two losses that count as equal. With another number of ranks float32 sums have another
#: order, and every step carries the difference on. With the same number it must be 0.
TOLERANCE = 1e-5

_LOST_STEPS = 8  # after the checkpoint, before the kill: at most, for there must be no other checkpoint
_TIME_LIMIT = 300.0  # seconds for all groups together
_LAST_WORDS = 2.0  # seconds that the other ranks have to report their errors after the first failure
_LOG_LINES = 4
_QUIET = "ignore:Failed to initialize NumPy"  # torch warns where numpy is not installed; nothing here needs it


@dataclass(frozen=True)
class Layout:
    """The number of ranks that train, and of ranks that split experts (0: a model without experts)."""

    ranks: int
    ep: int = 0

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 rank"
        return f"ep {self.ep} x efsdp {self.ranks // self.ep}" if self.ep else f"{self.ranks} ranks"


#: The groups of the demo: all but the last are killed.
DENSE = (Layout(4), Layout(4), Layout(2), Layout(1))
#: The same for a model with experts.
EXPERTS = (Layout(4, ep=2), Layout(4, ep=4), Layout(2, ep=1), Layout(1, ep=1))


@dataclass
class Run:
    """The reports of a group.

    Attributes:
        layout: The group's number of ranks.
        losses: The losses of its steps, by step.
        state: Digest of model and optimizer at the checkpoint, computed when the group saved or loaded it.
    """

    layout: Layout
    losses: dict[int, float] = field(default_factory=dict)
    state: str = ""


def run_demo(directory: str | None, steps: int, layouts: Sequence[Layout], say: Callable[[str], None]) -> list[Run]:
    """Train with one group of ranks, kill it after its checkpoint, continue with the next; let the last one end.

    Args:
        directory: For checkpoints and the ranks' logs: new or empty; by default a temporary one.
        steps: Training steps before the checkpoint; as many follow, 8 at most, which the kill loses.
        layouts: Of the groups, in order.

    Returns:
        The report of each group, for `check` and `differences`.

    Raises:
        CheckpointingException: a group failed.
    """
    start = time.monotonic()
    runs = []
    with _workplace(directory) as place:
        say(f"shardckpt {version('shardckpt')}, torch {version('torch')}, {os.cpu_count()} cores; work in {place}")
        for number, layout in enumerate(layouts):
            end = steps + min(_LOST_STEPS, steps)
            options = [f"--dir={place}", f"--steps={end}", f"--interval={steps}", f"--ep={layout.ep}"]
            # Another seed for each group: a fresh model of its own would have other values than the loaded one.
            options += [f"--seed={number}", f"--rendezvous=file://{place}/rendezvous-{number}"]

            def progress(text: str, layout: Layout = layout) -> None:
                say(f"{time.monotonic() - start:5.1f} s  {layout}: {text}")

            progress(f"starting ({'FSDP2, gloo' if layout.ranks > 1 else 'a plain model, no process group'})")
            kill_at = end if number + 1 < len(layouts) else None
            runs.append(Run(layout))
            _Group(runs[-1], options, place / f"group-{number}", kill_at).run(start + _TIME_LIMIT, progress)
            if kill_at:
                progress(f"killed after step {kill_at}: the steps after the checkpoint are lost")
    return runs


def differences(runs: Sequence[Run]) -> dict[int, list[float]]:
    """Compare the losses of the groups.

    Returns:
        For each step after the checkpoint, the relative differences of the later groups' losses from the first
        group's; infinite where a loss is not a number.
    """
    first, *others = (run.losses for run in runs)
    return {step: [_distance(first[step], losses[step]) for losses in others] for step in sorted(others[-1])}


def _distance(loss: float, other: float) -> float:
    distance = abs(other - loss) / abs(loss)
    return math.inf if math.isnan(distance) else distance


def check(runs: Sequence[Run]) -> None:
    """Check that each group has loaded the state that the first one saved, and continued with the same losses.

    Raises:
        CheckpointingException: they differ; names the groups.
    """
    first, *others = runs
    faults = [
        f"{run.layout} loaded a model and an optimizer that differ from those that {first.layout} saved"
        for run in others
        if run.state != first.state
    ]
    for run, found in zip(others, zip(*differences(runs).values(), strict=True), strict=True):
        tolerance = 0.0 if run.layout == first.layout else TOLERANCE
        if max(found) > tolerance:
            faults.append(f"losses of {run.layout} differ by {max(found):.1e}, more than the tolerance {tolerance:.0e}")
    if faults:
        raise CheckpointingException("\n".join(faults))


class _Group:
    """The processes of one group of ranks.

    Args:
        options: Command line of train.py.
        kill_at: The step after which they are killed; None to let them end.
    """

    def __init__(self, run: Run, options: list[str], logs: Path, kill_at: int | None) -> None:
        self._run = run
        self._kill_at = kill_at
        self._logs = [logs.with_name(f"{logs.name}-rank-{rank}.log") for rank in range(run.layout.ranks)]
        self._code = f"from shardckpt.demo.launch import run_rank; run_rank({options!r}, {kill_at})"
        self._lines: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()

    def run(self, limit: float, say: Callable[[str], None]) -> None:
        """Start the ranks, and read their reports until they end or are killed; no process survives this call.

        Args:
            limit: Time of :func:`time.monotonic` at which they are killed.

        Raises:
            CheckpointingException: a rank failed, or they took too long.
        """
        processes = []
        try:
            for rank in range(len(self._logs)):
                processes.append(self._start(rank))
                threading.Thread(target=self._pass_lines_on, args=(rank, processes[rank]), daemon=True).start()
            self._listen(limit, say)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(len(self._logs)), "OMP_NUM_THREADS": "1"}
        with self._logs[rank].open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own module with our own arguments
                [sys.executable, "-W", _QUIET, "-c", self._code],
                stdin=subprocess.PIPE,  # closes when this process ends, however it does: then the rank ends, too
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
            )

    def _pass_lines_on(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Queue the lines that a rank prints, and then its exit status."""
        for line in process.stdout or ():
            if line.startswith(b"{"):  # some releases of gloo print, too
                self._lines.put((rank, json.loads(line)))
        self._lines.put((rank, {"status": process.wait()}))

    def _listen(self, limit: float, say: Callable[[str], None]) -> None:
        running = set(range(len(self._logs)))
        reasons: dict[int, str] = {}
        while running:
            try:
                rank, fields = self._lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                reasons = reasons or dict.fromkeys(running, "did not end in time: ended by force")
                break
            if "status" in fields:
                running.discard(rank)
                if fields["status"]:
                    reasons.setdefault(rank, self._last_words(rank, fields["status"]))
                    limit = min(limit, time.monotonic() + _LAST_WORDS)  # for the others to say why they fail
            elif "error" in fields:
                reasons[rank] = fields["error"]
            elif self._take(fields, say):
                return
        if reasons:
            names = {
                why: [f"rank {r} of {len(self._logs)}" for r in sorted(reasons) if reasons[r] == why]
                for why in reasons.values()
            }
            raise CheckpointingException("\n".join(f"{', '.join(who)}: {why}" for why, who in names.items()))

    def _take(self, fields: dict[str, Any], say: Callable[[str], None]) -> bool:
        """Store a report of rank 0; return whether it is the step at which to kill the ranks."""
        if "loss" not in fields:
            # The first report is of the checkpoint; a later one is of the end.
            self._run.state = self._run.state or fields["state"]
            say(f"loaded step {fields['loaded']}" if "loaded" in fields else f"saved step {fields['saved']}")
            return False
        step, loss = fields["step"], fields["loss"]
        self._run.losses[step] = loss
        if step % 5 == 0 or len(self._run.losses) == 1:
            say(f"step {step}: loss {loss:.3f}")
        return bool(step == self._kill_at)

    def _last_words(self, rank: int, status: int) -> str:
        """Return why a rank ended without an error report: its status, and the end of its log."""
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        lines = self._logs[rank].read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
        return "\n".join([f"the process {how}", *lines])


def run_rank(options: list[str], kill_at: int | None) -> None:
    """Run train.py as one rank, which ends when the launcher does; after step ``kill_at`` wait to be killed."""
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    status = 0
    try:
        from shardckpt.demo import train

        def report(**fields: Any) -> None:
            train.print_line(**fields)
            if "loss" in fields and fields["step"] == kill_at:
                threading.Event().wait()  # until SIGKILL: other ranks may still need this one to end the step

        train.main(options, report)
    except Exception as exc:  # noqa: BLE001 - the launcher reports whatever it is
        traceback.print_exc()
        known = isinstance(exc, CheckpointingException)
        print(json.dumps({"error": str(exc) if known else f"{type(exc).__name__}: {exc}"}), flush=True)  # noqa: T201
        status = 1
    sys.stderr.flush()
    os._exit(status)  # torch's exit is slow, and gloo's threads may abort it


def _end_with_the_launcher() -> None:
    """End this process when the launcher closes its end of our standard input, or dies."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


@contextmanager
def _workplace(directory: str | None) -> Iterator[Path]:
    """Return a context manager that gives the working directory: the caller's, if it is empty, or a temporary one."""
    if directory is None:
        with TemporaryDirectory(prefix="shardckpt-demo-") as name:
            yield Path(name)
        return
    place = Path(directory).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        is_empty = not any(place.iterdir())
    except OSError as exc:
        code = errno.errorcode.get(exc.errno or 0, "unknown")
        raise StorageError(f"cannot create the directory {place}: {exc.strerror} ({code})") from exc
    if not is_empty:
        raise StorageError(f"{place} is not empty: give --dir a directory that is new or empty")
    yield place
