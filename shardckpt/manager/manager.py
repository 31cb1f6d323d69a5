"""The CheckpointManager: what a training loop holds to save, to find what to load, and to keep what is worth it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.engine import find_saver
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.huggingface import export_to_huggingface, find_mapping, parse_dtype
from shardckpt.manager.agreement import NEWEST, agreed_step
from shardckpt.manager.casting import with_dtype
from shardckpt.manager.config import CheckpointConfig
from shardckpt.manager.initial import load_initial
from shardckpt.manager.metrics import as_numbers
from shardckpt.manager.per_rank import PerRank
from shardckpt.manager.preemption import Preemption
from shardckpt.manager.purge import Purger
from shardckpt.manager.reader import RNG, StepReader
from shardckpt.manager.replicas import Replica
from shardckpt.manager.retention import Retention
from shardckpt.manager.rng import RandomState, own_or_none
from shardckpt.manager.states import MODEL, TrainingStates
from shardckpt.manager.steps import CONTENT_KEY, StepFolder
from shardckpt.manager.writer import StepWriter
from shardckpt.plugins import host

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from shardckpt.manager.replicas import FaultTolerance

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
        config = CheckpointConfig.model_validate(config)
        self.config = config
        self._group = process_group
        self._last: int | None = None
        #: The steps of this run, oldest first: what it began with, and what it saved. Others may lie ahead of them.
        self._own: list[int] = []
        self._closed = False
        self._purger: Purger | None = None
        self._preemption: Preemption | None = None
        self._writer: StepWriter | None = None
        self._replica: Replica | None = None
        self._preempted = False
        self._loaded: int | None = None
        self._warned: set[str] = set()
        if not config.enable_checkpoint and fault_tolerance is None:
            return
        allow_globals = tuple(allow_globals)
        built_in = {RNG: PerRank(RandomState(), own_or_none)} if config.save_rng and RNG not in states else {}
        comm = Comm(process_group)
        self._world_size = comm.world_size
        with comm.collective_phase("looking at the states"):
            self._states = TrainingStates({**states, **built_in}, check_replicas=config.check_replicas)
            comm.agree(states=sorted(self._states.names), **config.stored())
        if fault_tolerance is not None:
            self._replica = Replica(fault_tolerance, config, self._states, process_group, allow_globals)
        if not config.enable_checkpoint:
            return
        with comm.collective_phase("looking at the configuration"):
            self._folder = StepFolder(config.folder, host())
            find_mapping(config.hf_mapping)
            if not config.load_only:
                find_saver(config.strategy, host())
        self._reader = StepReader(self._states, process_group, allow_globals, (*self._excluded(), *self._elsewhere))
        if not config.load_only:
            self._begin_saving(allow_globals)

    def save(
        self,
        step: int,
        force: bool = False,
        *,
        last_step: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save if it is time; called after every step, it also commits what the background has written.

        With an async mode the tensors may change when this returns.

        Args:
            step: The number of steps made.
            force: Save whatever the interval.
            last_step: Save as the configuration says of the last step, and wait for it.
            metrics: By name, ``{"loss": 0.25}``; stored, and for ``keep_best_k``. The main rank's count.

        Returns:
            Whether this call saved, or began to; not where it is not time, or the step was saved by an earlier call.

        Raises:
            CheckpointingException: the same on every rank. This save, or one before it that went on in the background,
                failed and is absent; what was there before is there still.
        """
        if self._replica is not None:
            self._replica.step = step
        if self._writer is None:
            return False
        self._check_open("save")
        self._advance()
        force = self._is_preempted() or force
        due = self._is_due(step, force=force or last_step)
        is_ours = self._replica is None or self._replica.save(step, due=due)
        if not (due and is_ours) or (step == self._last and not last_step):
            return False
        if self._writer.busy and self.config.on_busy == "skip" and not (force or last_step):
            logger.warning("step %d is not saved: the checkpoint of step %s is still being written", step, self._last)
            return False
        self._advance(blocking=True)
        model_only = self._has_model((last_step and self.config.last_save_model_only) or self._is_seed(step))
        self._save(self._writer, step, metrics or {}, model_only=model_only, background=not last_step)
        if last_step and self.config.last_save_in_hf:
            self._export(step)
        return True

    def load(self, step: int = -1) -> bool:
        """Load a checkpoint into the states.

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
        self._advance(blocking=True)
        found = self._load_step(step if step >= 0 else self.config.load_step)
        is_loaded = found is not None or load_initial(self.config, self._states, self._reader, self._group)
        if self._replica is not None:
            self._replica.load(found)
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
        """The steps that have a whole checkpoint, in their order; all ranks call it."""
        if not self.config.enable_checkpoint:
            return []
        find = self._folder.committed
        return Comm(self._group).main_runs("looking for checkpoints", lambda: [found.step for found in find()])

    def maybe_wait_for_staging(self) -> None:
        """Commit what is written; what ``save`` was given is copied already when that returns.

        (A training loop of torchtitan's calls it before the optimizer's step.)

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed.
        """
        self._advance()
        if self._replica is not None:
            self._replica.advance()

    def wait(self) -> None:
        """Wait until all that was saved is durable, and what is no longer to be kept is removed.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed.
        """
        self._advance(blocking=True)
        if self._replica is not None:
            self._replica.wait()
        if self._purger is not None:
            self._purger.wait()

    def close(self) -> None:
        """Wait as :meth:`wait` does, and end the background; a second call does nothing.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed; all else has ended.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # what is last here is done first
            if self._replica is not None:
                stack.callback(self._replica.close)
            stack.callback(self._end)
            if self._writer is not None:
                stack.callback(self._writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            with ExitStack() as stack:
                if self._replica is not None:
                    stack.callback(self._replica.leave, kind, error, trace)
                stack.callback(self._end)
                if self._writer is not None:
                    stack.callback(self._writer.leave, kind, error, trace)

    def _begin_saving(self, allow_globals: tuple[Any, ...]) -> None:
        config = self.config
        comm = Comm(self._group)
        with comm.collective_phase("beginning to save checkpoints"):
            if comm.is_main:
                kept = (config.keep_latest_k, config.keep_every_n_steps, config.keep_best_k)
                self._purger = Purger(self._folder, Retention(*kept, config.best_metric, config.best_mode))
            if config.save_on_sigterm:
                self._preemption = Preemption()
            self._writer = StepWriter(config, self._group, allow_globals, self._committed)

    def _advance(self, *, blocking: bool = False) -> None:
        """Commit what all ranks have written; after an error the step that is absent can be saved again."""
        if self._writer is None:
            return
        try:
            self._writer.advance(blocking=blocking)
        except BaseException:
            self._last = None
            raise

    def _committed(self) -> None:
        """A checkpoint is durable: those that it makes superfluous may go."""
        if self._last is not None:
            own = [*(step for step in self._own if step != self._last), self._last]
            self._own = own[-max(1, self.config.keep_latest_k) :]
        if self._purger is not None:
            self._purger.submit(protected=self._own)

    def _end(self) -> None:
        if self._purger is not None:
            self._purger.close()
        if self._preemption is not None:
            self._preemption.close()

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise CheckpointingException(f"{action}: the CheckpointManager is closed")
        if (now := Comm(self._group).world_size) != self._world_size:
            raise CheckpointingException(
                f"{action}: the CheckpointManager was made by {self._world_size} ranks, and now there are {now}: make "
                "it after torch.distributed.init_process_group"
            )

    def _is_preempted(self) -> bool:
        """Whether any rank has had a SIGTERM that was not answered by a save yet."""
        if self._preemption is None or self._preempted:
            return False
        self._preempted = bool(Comm(self._group).largest(self._preemption.received)[0])
        return self._preempted

    def _is_due(self, step: int, *, force: bool) -> bool:
        if force or self._is_seed(step):
            return True
        first = step == 1 and self.config.enable_first_step_checkpoint
        return first or (step > 0 and step % self.config.interval == 0)

    def _is_seed(self, step: int) -> bool:
        return step == 0 and self.config.create_seed_checkpoint

    def _has_model(self, wanted: bool) -> bool:
        """Whether the model alone is saved where that is wanted: it must be known which state it is."""
        if wanted and MODEL not in self._states.names:
            logger.warning("no state is named %r: all are saved, and not the model alone", MODEL)
            return False
        return wanted

    @property
    def _elsewhere(self) -> tuple[str, ...]:
        """The states that each replica saves by itself."""
        return () if self._replica is None else self._replica.own

    def _excluded(self) -> tuple[str, ...]:
        unknown = set(self.config.exclude_from_loading) - set(self._states.names)
        if unknown:
            raise CheckpointingException(
                f"exclude_from_loading: {', '.join(sorted(map(repr, unknown)))} is no state; the states are "
                f"{', '.join(map(repr, self._states.names))}"
            )
        return self.config.exclude_from_loading

    def _save(
        self,
        writer: StepWriter,
        step: int,
        metrics: Mapping[str, float],
        *,
        model_only: bool,
        background: bool,
    ) -> None:
        names = [MODEL] if model_only else [name for name in self._states.names if name not in self._elsewhere]
        comm = Comm(self._group)
        with comm.local_phase("describing the states"):
            state = self._states.describe(names, comm)
            if model_only:
                state = with_dtype(state, parse_dtype(self.config.export_dtype))
            content = {
                "step": step,
                "states": names,
                "model_only": model_only,
                "metrics": as_numbers(metrics),
                "config": self.config.stored(),
            }
            if self._purger is not None:
                self._look_around(self._purger, step, metrics)
        last, self._last = self._last, step
        try:
            writer.write(state, self._folder.location(step), {CONTENT_KEY: content}, background=background)
        except BaseException:
            self._last = last
            raise

    def _look_around(self, purger: Purger, step: int, metrics: Mapping[str, Any]) -> None:
        """On the main rank, before a save: mind what stands in its place, and say what the user may not expect."""
        there = self._folder.steps()
        if step in there:
            purger.wait()  # it may have found that what was there before is to go
        if there and there[-1] > step:
            self._warn_once(
                f"{self._folder} has steps after {step}, the newest is {there[-1]}: a later load takes that one, "
                "unless they are moved away"
            )
        metric = self.config.best_metric
        if metric and metric not in metrics:
            given = ", ".join(map(repr, metrics)) or "none"
            self._warn_once(f"best_metric={metric!r} is not among the metrics that save was given ({given})")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _export(self, step: int) -> None:
        path = self._folder.location(step)
        export_to_huggingface(
            path,
            f"{path}-hf",
            prefix=f"{MODEL}." if self._states.has_modules else None,
            mapping=self.config.hf_mapping,
            dtype=self.config.export_dtype,
            assets=self.config.hf_assets_path,
            overwrite=True,
            process_group=self._group,
        )

    def _load_step(self, wanted: int) -> int | None:
        """Load a step, or the newest that is whole; the one that was loaded."""
        damaged: list[int] = []
        while (found := agreed_step(self._folder, Comm(self._group), wanted, without=damaged)) is not None:
            try:
                self._reader.read(self._folder.path(found))
            except CorruptCheckpointError as exc:
                if wanted != NEWEST:
                    raise
                if Comm(self._group).is_main:
                    logger.warning("step %d in %s is skipped, damaged: %s", found, self._folder, exc)
                damaged.append(found)
                continue
            self._own, self._last, self._loaded = [found], None, found  # what was saved after it may be saved anew
            logger.info("loaded step %d of %s", found, self._folder)
            return found
        return None


__all__ = ["CheckpointManager"]
