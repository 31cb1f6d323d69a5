"""The CheckpointManager: what a training loop holds to save, to find what to load, and to keep what is worth it."""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.manager.casting import with_dtype
from shardckpt.manager.config import CheckpointConfig
from shardckpt.manager.initial import load_initial
from shardckpt.manager.metrics import as_numbers
from shardckpt.manager.parts import make_parts
from shardckpt.manager.reader import StepReader
from shardckpt.manager.rng import with_random_state
from shardckpt.manager.states import MODEL, TrainingStates
from shardckpt.manager.step_resolution import read_step
from shardckpt.manager.steps import CONTENT_KEY, StepFolder
from shardckpt.plugins import host

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from shardckpt.manager.part import ManagerPart
    from shardckpt.manager.replicas import FaultTolerance
    from shardckpt.manager.writer import StepWriter

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a training's states every so many steps, loads the newest, removes what is no longer to be kept.

    All ranks call its methods alike, with the same arguments: they are collective. A context manager: left without an
    error it closes; left by one it ends its background, and gives up what is not committed where other ranks would
    have to take part.

    Args:
        config: When, how and where.
        states: What, by name. Under ``model`` a module, or the list of those that this rank has (stages, chunks);
            under ``optimizer`` its optimizers. Under other names: modules; a :class:`PerRank`; anything with
            ``state_dict`` and ``load_state_dict`` that all ranks have alike; or with ``sharded_state_dict()``, which
            gives what :func:`shardckpt.dist_checkpointing.save` takes, and ``load_state_dict``. The states of the
            random generators are added as ``rng``.
        process_group: The ranks; by default all, or this process alone without torch.distributed.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save` and ``load``.
        fault_tolerance: Where these ranks are one of several replicas that torchft or its like manages: the one that
            is first among those that take part saves the steps' checkpoints, and each its own :class:`PerRank` states
            after every step. ``save`` is called after every step, and says whether this replica saves the step's.

    Raises:
        CheckpointingException: a state is none of these, or the folder's URL is one that no plugin serves.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        states: Mapping[str, Any],
        process_group: ProcessGroup | None = None,
        *,
        allow_globals: Iterable[Any] = (),
        fault_tolerance: FaultTolerance | None = None,
    ) -> None:
        self.config = config = CheckpointConfig.model_validate(config)
        self._group = process_group
        #: The step that was saved last, or is being written; None after an error: it may be saved again.
        self._last: int | None = None
        self._loaded: int | None = None
        self._preempted = False
        self._closed = False
        self._writer: StepWriter | None = None
        self._parts: list[ManagerPart] = []
        if not config.enable_checkpoint and fault_tolerance is None:
            return
        allow_globals = tuple(allow_globals)
        comm = Comm(process_group)
        self._world_size = comm.world_size
        with comm.collective_phase("looking at the states"):
            named = with_random_state(states) if config.save_rng else states
            self._states = TrainingStates(named, check_replicas=config.check_replicas)
            comm.agree(states=sorted(self._states.names), **config.stored())
        if config.enable_checkpoint:
            with comm.collective_phase("looking at the configuration"):
                self._folder = StepFolder(config.folder, host())
                config.check_names(self._states.names)
        self._writer, self._parts = make_parts(config, self._states, process_group, allow_globals, fault_tolerance)
        #: The states that are not in the steps' checkpoints.
        self._elsewhere = {name for part in self._parts for name in part.own_states}
        self._reader = StepReader(
            self._states, process_group, allow_globals, {*config.exclude_from_loading, *self._elsewhere}
        )

    def save(
        self,
        step: int,
        force: bool = False,
        *,
        last_step: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Collective: save if it is time; called after every step, it also commits what the background has written.

        With an async mode the tensors may change when this returns.

        Args:
            step: The number of steps made.
            force: Save whatever the interval.
            last_step: Save as the configuration says of the last step, and wait for it.
            metrics: By name, ``{"loss": 0.25}``; stored, and for the retention policies. The main rank's count.

        Returns:
            Whether this call saved, or began to; not where it is not time, or the step was saved by an earlier call.

        Raises:
            CheckpointingException: the same on every rank. This save, or one before it that went on in the background,
                failed and is absent; what was there before is there still.
        """
        for part in self._parts:
            part.on_step(step)
        if self._writer is None:
            return False
        self._check_open("save")
        self._advance(self._writer)
        forced = self._is_preempted() or force or last_step
        due = forced or self.config.is_due(step)
        # Lists, here and for preemption, and no `all(... for ...)`: the hooks are collective, so each is to be called.
        joined = [part.joins_step(step, due=due) for part in self._parts]
        if not (due and all(joined)) or (step == self._last and not last_step):
            return False
        if self._writer.busy and self.config.on_busy == "skip" and not forced:
            logger.warning("step %d is not saved: the checkpoint of step %s is still being written", step, self._last)
            return False
        self._advance(self._writer, blocking=True)
        self._save(self._writer, step, metrics or {}, last_step=last_step)
        for part in self._parts:
            part.after_save(step, last_step=last_step)
        return True

    def load(self, step: int = -1) -> bool:
        """Collective: load a checkpoint into the states.

        Args:
            step: Which; -1 for the configuration's ``load_step``, which is by default the newest that is whole. Where
                the newest turns out to be damaged, the one before it is taken, with a warning that names both.

        Returns:
            Whether there was one; else, the states are as they were.

        Raises:
            CheckpointingException: the same on every rank: the step is not there, or no checkpoint of several is
                whole, or what it has does not fit the states.
        """
        if not self.config.enable_checkpoint:
            return False
        self._check_open("load")
        self.wait()
        step = step if step >= 0 else self.config.load_step
        found = read_step(self._folder, self._reader, Comm(self._group), step)
        if found is not None:
            self._last, self._loaded = None, found  # the steps after it may be saved anew
        is_loaded = found is not None or load_initial(self.config, self._states, self._reader, self._group)
        for part in self._parts:
            part.after_load(found)
        return is_loaded

    @property
    def loaded_step(self) -> int | None:
        """The step that :meth:`load` has loaded; None if it has not, or began with ``initial_load_path``."""
        return self._loaded

    @property
    def preempted(self) -> bool:
        """Whether a SIGTERM was answered by a save (``save_on_sigterm``): the same on every rank; the loop can end."""
        return self._preempted

    def steps(self) -> list[int]:
        """Collective: the steps that have a whole checkpoint, in ascending order."""
        if not self.config.enable_checkpoint:
            return []
        find = self._folder.committed
        return Comm(self._group).main_runs("looking for checkpoints", lambda: [found.step for found in find()])

    def maybe_wait_for_staging(self) -> None:
        """Collective: commit what is written; what ``save`` was given is copied already when that returns.

        (A training loop of torchtitan's calls it before the optimizer's step.)

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed.
        """
        self._advance(*self._parts)

    def wait(self) -> None:
        """Collective: wait until all that was saved is durable, and what is no longer to be kept is removed.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed.
        """
        self._advance(*self._parts, blocking=True)

    def close(self) -> None:
        """Collective: wait as :meth:`wait` does, and end the background; a second call does nothing.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed; all else has ended.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # closes every part, whatever another raises; the last callback runs first
            for part in reversed(self._parts):
                stack.callback(part.close, error)

    def _advance(self, *parts: ManagerPart, blocking: bool = False) -> None:
        """Commit what all ranks have written; after an error the step that is absent can be saved again."""
        try:
            for part in parts:
                part.advance(blocking=blocking)
        except BaseException:
            self._last = None
            raise

    def _committed(self, step: int) -> None:
        for part in self._parts:
            part.after_commit(step)

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise CheckpointingException(f"{action}: the CheckpointManager is closed")
        if (now := Comm(self._group).world_size) != self._world_size:
            raise CheckpointingException(
                f"{action}: the CheckpointManager was made by {self._world_size} ranks, and now there are {now}: make "
                "it after torch.distributed.init_process_group"
            )

    def _is_preempted(self) -> bool:
        """Collective: whether this step is the first since the training is about to end."""
        if self._preempted:
            return False
        preempted = [part.is_preempted() for part in self._parts]
        self._preempted = any(preempted)
        return self._preempted

    def _has_model(self, wanted: bool) -> bool:
        """Whether the model alone is saved where that is wanted: it must be known which state it is."""
        if wanted and MODEL not in self._states.names:
            logger.warning("no state is named %r: all are saved, and not the model alone", MODEL)
            return False
        return wanted

    def _save(self, writer: StepWriter, step: int, metrics: Mapping[str, float], *, last_step: bool) -> None:
        config = self.config
        model_only = self._has_model((last_step and config.last_save_model_only) or config.is_seed(step))
        names = [MODEL] if model_only else [name for name in self._states.names if name not in self._elsewhere]
        comm = Comm(self._group)
        with comm.local_phase("describing the states"):
            state = self._states.describe(names, comm)
            if model_only:
                state = with_dtype(state, config.export_dtype)
            numbers = as_numbers(metrics)
            content = {
                "step": step,
                "states": names,
                "model_only": model_only,
                "metrics": numbers,
                "config": config.stored(),
            }
            for part in self._parts:
                part.before_save(step, numbers)
        last, self._last = self._last, step
        on_commit = functools.partial(self._committed, step)
        try:
            writer.write(
                state, self._folder.location(step), {CONTENT_KEY: content}, on_commit, background=not last_step
            )
        except BaseException:
            self._last = last
            raise


__all__ = ["CheckpointManager"]
