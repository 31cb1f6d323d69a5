"""What a replica saves of its own, after every step: places in the data, random generators."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manager.config import AsyncMode
from shardckpt.manager.purge import Purger, purge
from shardckpt.manager.reader import StepReader
from shardckpt.manager.replicas.retention import NEWEST_KEPT, Abandoned, OwnRetention
from shardckpt.manager.steps import CONTENT_KEY
from shardckpt.manager.writer import StepWriter

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.reader import Fetched
    from shardckpt.manager.states import TrainingStates
    from shardckpt.manager.steps import StepFolder

logger = logging.getLogger(__name__)

#: Saves between two looks at what may go.
_PURGED_AFTER = 10


class OwnCheckpoints:
    """Saves and loads the states that each rank of one replica has its own of; collective in the replica.

    With an async mode a thread writes them; the writer is never that of the steps' checkpoints.

    Args:
        folder: Where they are: a ``step-<n>`` for each, of which few stay.
        steps: Where the steps' checkpoints are, to which these belong.
        states: The training's.
        config: The manager's.
        process_group: The replica's ranks.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save`.
    """

    def __init__(
        self,
        folder: StepFolder,
        steps: StepFolder,
        states: TrainingStates,
        config: CheckpointConfig,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
    ) -> None:
        self._folder, self._steps, self._states, self._group = folder, steps, states, process_group
        self._wanted = [name for name in states.per_rank if name not in config.exclude_from_loading]
        others = [name for name in states.names if name not in self._wanted]
        self._reader = StepReader(states, process_group, allow_globals, others)
        self._skips = config.on_busy == "skip"
        self._last: int | None = None
        self._unpurged = 0
        #: Those of steps whose checkpoint another replica may be writing.
        self._due: deque[int] = deque(maxlen=2)
        self._loaded: dict[int, Fetched] = {}
        self._writer: StepWriter | None = None
        self._purger: Purger | None = None
        if not config.load_only:
            self._begin_saving(config, allow_globals)

    def save(self, step: int, *, due: bool) -> None:
        """Save; what is saved belongs to this step.

        Args:
            step: Steps made.
            due: Whether the step's checkpoint is saved, too, by whatever replica: this one must not be left out.

        Raises:
            CheckpointingException: the same on every rank: it failed, or the one before it did, in the background.
        """
        if self._writer is None or step == self._last:
            return
        comm = Comm(self._group)
        if self._last is None:
            self._abandon(step, comm)
        if due:
            self._due.append(step)
        self._writer.advance(blocking=due or not self._skips)
        if self._writer.busy:
            return
        names = list(self._states.per_rank)
        with comm.local_phase("describing the states of the replica's own"):
            state = self._states.describe(names, comm)
        self._loaded = {}
        content = {"step": step, "states": names, "model_only": False, "metrics": {}}
        self._writer.write(state, self._folder.location(step), {CONTENT_KEY: content}, background=True)
        self._last = step

    def load(self, step: int | None) -> None:
        """Load what belongs to a step, or is next before it; it and the newest are held for :meth:`go_to`.

        Args:
            step: The one that was loaded; None for none: then nothing is set.

        Raises:
            CheckpointingException: the same on every rank: what there is does not fit the states.
        """
        self.advance(blocking=True)
        self._loaded = {}
        if not self._wanted:
            return
        comm = Comm(self._group)
        found = comm.main_runs(
            "looking for the replica's own", lambda: [each.step for each in self._folder.committed()]
        )
        for later in [each for each in found if step is None or each > step][-NEWEST_KEPT:]:
            self._fetch(later)
        if step is None:
            return
        base = next((each for each in reversed(found) if each <= step and self._fetch(each)), None)
        if comm.is_main and base != step and step:  # with step 0, a seed, nothing has been read yet
            self._warn(step, base)
        with comm.collective_phase("handing back the states of the replica's own"):
            self.go_to(step)

    def go_to(self, step: int) -> None:
        """Set the states to the newest that :meth:`load` has found up to a step; not collective.

        They stay as they are where there is none, and where this replica has saved since.
        """
        found = max((each for each in self._loaded if each <= step), default=None)
        if found is not None:
            self._states.restore(*copy.deepcopy(self._loaded[found]))

    def advance(self, *, blocking: bool = False) -> None:
        """Commit what all ranks of the replica have written."""
        if self._writer is not None:
            self._writer.advance(blocking=blocking)

    def wait(self) -> None:
        """Wait for what is written, and for what is removed."""
        self.advance(blocking=True)
        if self._purger is not None:
            self._purger.wait()

    def close(self) -> None:
        """Commit what is on its way, and end the background."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._end()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the background after an error of the training."""
        try:
            if self._writer is not None:
                self._writer.leave(kind, error, trace)
        finally:
            self._end()

    def _begin_saving(self, config: CheckpointConfig, allow_globals: Iterable[Any]) -> None:
        if Comm(self._group).is_main:
            self._purger = Purger(self._folder, OwnRetention(steps=self._steps, interval=config.interval))
        is_async = config.async_mode is not AsyncMode.DISABLED
        threaded = config.model_copy(update={"async_mode": AsyncMode.ASYNC}) if is_async else config
        self._writer = StepWriter(threaded, self._group, allow_globals, self._committed)

    def _abandon(self, step: int, comm: Comm) -> None:
        """Remove what an earlier run has saved at this step and later: this one did not go on from it."""
        comm.main_runs(
            "removing what a run that was given up has left",
            lambda: purge(self._folder, Abandoned(steps=self._steps, since=step)),
        )

    def _committed(self) -> None:
        self._unpurged += 1
        if self._purger is not None and self._unpurged >= _PURGED_AFTER:
            self._unpurged = 0
            self._purger.submit(self._due)

    def _fetch(self, step: int) -> bool:
        """Read one, without handing it back; whether it is whole."""
        try:
            self._loaded[step] = self._reader.fetch(self._folder.path(step))
        except CorruptCheckpointError as exc:
            logger.warning("step %d in %s is skipped, damaged: %s", step, self._folder, exc)
            return False
        return True

    def _warn(self, step: int, base: int | None) -> None:
        names = ", ".join(self._wanted)
        if base is None:
            logger.warning("%s has nothing of step %d or before: %s stay as they are", self._folder, step, names)
        else:
            logger.warning("%s has nothing of step %d: %s go on from step %d", self._folder, step, names, base)

    def _end(self) -> None:
        if self._purger is not None:
            if self._unpurged:
                self._purger.submit(self._due)
            self._purger.close()


__all__ = ["OwnCheckpoints"]
