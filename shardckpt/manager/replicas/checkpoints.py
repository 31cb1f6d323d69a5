"""Replica checkpoints: what a replica saves of its own, after every step: places in the data, random generators."""

from __future__ import annotations

import copy
import functools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manager.config import AsyncMode
from shardckpt.manager.garbage_collection import GarbageCollector, remove_steps
from shardckpt.manager.reader import StepReader
from shardckpt.manager.steps import CONTENT_KEY
from shardckpt.manager.writer import StepWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.reader import Fetched
    from shardckpt.manager.retention import StepMetrics
    from shardckpt.manager.states import TrainingStates
    from shardckpt.manager.steps import StepFolder

logger = logging.getLogger(__name__)

#: Saves between two garbage collections.
_COLLECTED_AFTER = 10
#: How many of the newest stay: one to fall back on.
NEWEST_KEPT = 2


class ReplicaCheckpoints:
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
        self._uncollected = 0
        #: Those of steps whose checkpoint another replica may be writing.
        self._due: deque[int] = deque(maxlen=2)
        self._loaded: dict[int, Fetched] = {}
        self._writer: StepWriter | None = None
        self._gc: GarbageCollector | None = None
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
        self._writer.write(
            state, self._folder.location(step), {CONTENT_KEY: content}, self._collect_sometimes, background=True
        )
        self._last = step

    def load(self, step: int | None) -> None:
        """Load what belongs to a step, or is next before it; it and the newest are held for :meth:`restore_up_to`.

        Args:
            step: The one that was loaded; None for none: then nothing is set.

        Raises:
            CheckpointingException: the same on every rank: what there is does not fit the states.
        """
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
            self.restore_up_to(step)

    def restore_up_to(self, step: int) -> None:
        """Set the states to the newest that :meth:`load` has found up to a step; not collective.

        They stay as they are where there is none, and where this replica has saved since.
        """
        found = max((each for each in self._loaded if each <= step), default=None)
        if found is not None:
            self._states.restore(*copy.deepcopy(self._loaded[found]))

    def advance(self, *, blocking: bool = False) -> None:
        """Commit what all ranks of the replica have written; ``blocking`` waits for that, and for removals."""
        if self._writer is not None:
            self._writer.advance(blocking=blocking)
        if self._gc is not None and blocking:
            self._gc.wait()

    def close(self, error: BaseException | None = None) -> None:
        """Commit what is on its way, unless the training ends by an error, and end the background."""
        try:
            if self._writer is not None:
                self._writer.close(error)
        finally:
            if self._gc is not None:
                if self._uncollected:
                    self._gc.submit(self._due)
                self._gc.close()

    def _begin_saving(self, config: CheckpointConfig, allow_globals: Iterable[Any]) -> None:
        if Comm(self._group).is_main:
            policy = functools.partial(keep_replica_steps, steps=self._steps, interval=config.interval)
            self._gc = GarbageCollector(self._folder, [policy])
        is_async = config.async_mode is not AsyncMode.DISABLED
        threaded = config.model_copy(update={"async_mode": AsyncMode.ASYNC}) if is_async else config
        self._writer = StepWriter(threaded, self._group, allow_globals)

    def _abandon(self, step: int, comm: Comm) -> None:
        """Remove what an earlier run has saved at this step and later: this one did not go on from it."""
        comm.main_runs(
            "removing what a run that was given up has left",
            lambda: remove_steps(self._folder, lambda own: find_abandoned_steps(own, self._steps, step)),
        )

    def _collect_sometimes(self) -> None:
        self._uncollected += 1
        if self._gc is not None and self._uncollected >= _COLLECTED_AFTER:
            self._uncollected = 0
            self._gc.submit(self._due)

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


def keep_replica_steps(own: StepMetrics, steps: StepFolder, interval: int) -> list[int]:
    """A retention policy: the newest, and each step that has a checkpoint, or may be getting one from another replica.

    Args:
        own: A replica's own checkpoints.
        steps: The folder of the steps' checkpoints.
        interval: Steps between these.
    """
    full = steps.steps()
    newest = max(full, default=-1)
    coming = [step for step in own if step >= newest and step % interval == 0]
    return [*sorted(own)[-NEWEST_KEPT:], *full, *coming]


def find_abandoned_steps(own: StepMetrics, steps: StepFolder, since: int) -> list[int]:
    """The replica's own steps that a run made which was given up at ``since``; not those that have a checkpoint."""
    full = set(steps.steps())
    return [step for step in own if step >= since and step not in full]


__all__ = ["NEWEST_KEPT", "ReplicaCheckpoints", "find_abandoned_steps", "keep_replica_steps"]
