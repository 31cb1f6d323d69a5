"""Replica checkpoints: a replica's own states (data loaders, random generators), saved after every step."""

from __future__ import annotations

import copy
import functools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manager.config import AsyncMode
from shardckpt.manager.garbage_collection import GarbageCollector, remove_steps
from shardckpt.manager.reader import StepReader
from shardckpt.manager.writer import StepWriter
from shardckpt.manifest.names import CONTENT_KEY, Lineage

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
#: How many of the newest are kept: two, so that one remains if the newest is damaged.
_NEWEST_KEPT = 2


class ReplicaCheckpoints:
    """Saves and loads the :class:`PerRank` states of one replica. Collective means: on all ranks of this replica.

    With an async mode a thread writes them, with a writer of their own: a small save must not wait for the large one of
    a step's checkpoint.

    Args:
        folder: The folder of these checkpoints, with a ``step-<n>`` for each.
        steps: The folder of the steps' checkpoints, to which these belong.
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
        self._names = [name for name in states.per_rank if name not in config.exclude_from_loading]
        others = [name for name in states.names if name not in self._names]
        self._reader = StepReader(config, states, process_group, allow_globals, others)
        self._skips = config.on_busy == "skip"
        self._last: int | None = None
        self._uncollected = 0
        #: The last steps that were due. Another replica may still be writing their checkpoints, so ours must be kept.
        self._due: deque[int] = deque(maxlen=2)
        self._loaded: dict[int, Fetched] = {}
        self._writer: StepWriter | None = None
        self._gc: GarbageCollector | None = None
        if not config.load_only:
            if Comm(process_group).is_main:
                # Not a method: the collector's thread would keep this object, and so its writer, alive.
                policy = functools.partial(keep_replica_steps, steps=steps, interval=config.interval)
                self._gc = GarbageCollector(folder, [policy])
            if config.async_mode is not AsyncMode.DISABLED:
                config = config.model_copy(update={"async_mode": AsyncMode.ASYNC})
            self._writer = StepWriter(config, process_group, allow_globals, config.strategy)

    def save(self, step: int, *, due: bool) -> None:
        """Collective: save the replica's own states of a step; an error may be of an earlier save in the background.

        If a replica saves the checkpoint of this step (``due``), this save must not be skipped.
        """
        if self._writer is None or step == self._last:
            return
        comm = Comm(self._group)
        if self._last is None:  # checkpoints of an earlier run from here on: this run did not continue from it
            comm.main_runs(
                "removing checkpoints of an abandoned run",
                lambda: remove_steps(self._folder, lambda own: find_abandoned_steps(own, self._steps, step)),
            )
        if due:
            self._due.append(step)
        self._writer.advance(blocking=due or not self._skips)
        if self._writer.busy:
            return
        names = list(self._states.per_rank)
        with comm.local_phase("describing the replica's own states"):
            state = self._states.describe(names, comm)
        self._loaded = {}  # the live states are newer than the loaded ones
        content = {"step": step, "states": names, "model_only": False, "metrics": {}}
        target, lineage = self._folder.location(step), Lineage(step=step)
        self._writer.write(
            state, target, {CONTENT_KEY: content}, lineage, functools.partial(self._count_commit, step), background=True
        )
        self._last = step

    def load(self, step: int | None) -> None:
        """Collective: load the replica's own states of a step, else of the newest step before it.

        If no step was loaded (None), no state is set. The newest ones after it are read, too, and kept in memory for
        :meth:`restore_up_to`: a replica that joins gets the states of a later step than it loaded.
        """
        self._loaded = {}
        if not self._names:
            return
        comm = Comm(self._group)
        found = comm.main_runs(
            "finding the replica's own checkpoints", lambda: [each.step for each in self._folder.committed()]
        )
        for later in [each for each in found if step is None or each > step][-_NEWEST_KEPT:]:
            self._fetch(later)
        if step is None:
            return
        base = next((each for each in reversed(found) if each <= step and self._fetch(each)), None)
        if comm.is_main and base != step and step:  # before step 0, a seed, a replica has read no data
            names = ", ".join(self._names)
            what = f" or before: {names} are not loaded" if base is None else f": {names} are those of step {base}"
            logger.warning("%s has no checkpoint of step %d%s", self._folder, step, what)
        with comm.collective_phase("restoring the replica's own states"):
            self.restore_up_to(step)

    def restore_up_to(self, step: int) -> None:
        """Set the states to the newest that :meth:`load` read, up to a step. Not collective.

        They are not changed if there is none, or if this replica has saved since the load.
        """
        found = max((each for each in self._loaded if each <= step), default=None)
        if found is not None:  # a copy: a loader may keep its state and change it, and this may be called twice
            copy.deepcopy(self._loaded[found]).restore(self._states)

    def advance(self, *, blocking: bool = False) -> None:
        """Collective: commit saves that the whole replica has written; if ``blocking``, wait for all and removals."""
        if self._writer is not None:
            self._writer.advance(blocking=blocking)
        if self._gc is not None and blocking:
            self._gc.wait()

    def close(self, error: BaseException | None = None) -> None:
        """Collective: commit the saves under way, unless the training ended by an error, and end the threads."""
        try:
            if self._writer is not None:
                self._writer.close(error)
        finally:
            if self._gc is not None:
                if self._uncollected:
                    self._gc.submit(self._due)
                self._gc.close()

    def _count_commit(self, step: int) -> None:
        self._folder.forget(step)
        self._uncollected += 1
        if self._gc is not None and self._uncollected >= _COLLECTED_AFTER:
            self._uncollected = 0
            self._gc.submit(self._due)

    def _fetch(self, step: int) -> bool:
        """Collective: read the checkpoint of a step into memory; return whether it is not damaged."""
        try:
            self._loaded[step] = self._reader.fetch(self._folder.path(step))
        except CorruptCheckpointError as exc:
            logger.warning("step %d in %s is skipped, damaged: %s", step, self._folder, exc)
            return False
        return True


def keep_replica_steps(own: StepMetrics, steps: StepFolder, interval: int) -> list[int]:
    """Return the steps to keep: of the newest replica checkpoints, and of checkpoints that exist or are yet to come."""
    full = steps.steps()
    newest = max(full, default=-1)
    # Another replica may still be writing the checkpoints of these.
    coming = [step for step in own if step >= newest and step % interval == 0]
    return [*sorted(own)[-_NEWEST_KEPT:], *full, *coming]


def find_abandoned_steps(own: StepMetrics, steps: StepFolder, since: int) -> list[int]:
    """Return the replica checkpoints of an abandoned run: from step ``since`` on, without a checkpoint of the step."""
    full = set(steps.steps())
    return [step for step in own if step >= since and step not in full]
