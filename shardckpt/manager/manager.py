"""The CheckpointManager: saves the checkpoints of a training loop, finds the one to load, and removes old ones."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from shardckpt import settings
from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import replace_text
from shardckpt.engine.gc_pause import pause_gc
from shardckpt.engine.locations import measure
from shardckpt.engine.operation import note_failure, report_event, report_failure
from shardckpt.engine.space import UNLIMITED, Room, explain_full, is_of_write
from shardckpt.errors import (
    CheckpointingException,
    NotEnoughSpaceError,
    StorageError,
    format_many,
    listed,
    parse_globals,
    refuse_copy,
    show_given,
)
from shardckpt.manager.casting import cast_shards
from shardckpt.manager.config import AsyncMode, CheckpointConfig, parse_config
from shardckpt.manager.exclusion import leave_out, warn_of_absent
from shardckpt.manager.garbage_collection import discard_steps_after
from shardckpt.manager.initial import load_initial
from shardckpt.manager.metrics import parse_metrics
from shardckpt.manager.parts import make_parts
from shardckpt.manager.per_rank import ADVICE
from shardckpt.manager.preemption import Preemption
from shardckpt.manager.reader import StepReader
from shardckpt.manager.retention import KeepBest
from shardckpt.manager.rng import add_random_state
from shardckpt.manager.save_policies import SaveClock
from shardckpt.manager.setting_checks import check_folder
from shardckpt.manager.states import MODEL, TrainingStates, check_named, name_state
from shardckpt.manager.step_names import parse_number
from shardckpt.manager.step_resolution import NEWEST, check_step, find_best, read_step, resolve_step, warn_of_others
from shardckpt.manager.step_sizes import StepSizes
from shardckpt.manager.steps import MODEL_PREFIX, PER_RANK_KEY, PREFIX_KEY, StepFolder
from shardckpt.manifest.names import CONTENT_KEY, Lineage
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.memory_budget import parse_size
from shardckpt.storage.remote import limit_attempts
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from shardckpt.engine.operation import Operation
    from shardckpt.manager.part import ManagerPart
    from shardckpt.manager.replicas.fault_tolerance import FaultTolerance
    from shardckpt.manager.writer import StepWriter

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves the states of a training at intervals, loads the newest checkpoint, and removes old checkpoints.

    Every rank makes one and calls each of its methods with the same arguments: all of them are collective, and a rank
    that waits long for the others says so. It is a context manager, and closes at the end of the block. If the block
    raises, other ranks may not get there: it then waits for none of them, and discards an uncommitted save that needs
    them.

    Example::

        config = CheckpointConfig(folder="checkpoints", interval=100)
        with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
            manager.load()
            for step in range((manager.loaded_step or 0) + 1, 1001):
                train(model, optimizer)
                manager.save(step, last_step=step == 1000)

    Args:
        config: When, how and where to save.
        states: What to save, by name. Under ``model`` a module, or a list of those that this rank has (stages,
            chunks); under ``optimizer`` its optimizers. Under other names: modules; a :class:`PerRank`; an object with
            ``state_dict`` and ``load_state_dict`` whose state is the same on all ranks, or a list of such objects with
            equal states (schedulers); or an object with ``load_state_dict`` and ``sharded_state_dict()``, which returns
            what :func:`shardckpt.dist_checkpointing.save` takes. The states of the random generators are added as
            ``rng``.
        process_group: The ranks; by default all of them, or this process alone without torch.distributed.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save` and ``load``.
        fault_tolerance: Given if these ranks are one of several replicas that torchft or a similar library manages.
            The first replica that takes part in a step saves its checkpoint, and each replica saves its own
            :class:`PerRank` states after every step. Call ``save`` after every step.

    Raises:
        CheckpointingException: the same on every rank. A state is none of these, ranks differ in the states or the
            configuration, or no plugin serves the URL of the folder.
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
        self.config = config = parse_config(config)
        self._group = process_group
        #: The step of the last save, finished or not; None after an error, so that the step can be saved a second time.
        self._last: int | None = None
        self._loaded: int | None = None
        #: How many saves have failed since the last that became durable.
        self._failed = 0
        self._preempted = False
        self._closed = False
        #: The folder, for events and logs, and the rank that has them.
        self._place = config.folder if "://" in config.folder else str(Path(config.folder).absolute())
        self._rank = 0
        self._writer: StepWriter | None = None
        self._parts: list[ManagerPart] = []
        if not config.enable_checkpoint and fault_tolerance is None:
            return
        comm = Comm(process_group)
        self._rank, self._world_size = comm.rank, comm.world_size
        with report_failure("setup", self._place, self._rank):
            self._begin(config, states, comm, parse_globals(allow_globals), fault_tolerance)

    def _begin(
        self,
        config: CheckpointConfig,
        states: Mapping[str, Any],
        comm: Comm,
        allow_globals: tuple[Any, ...],
        fault_tolerance: FaultTolerance | None,
    ) -> None:
        """Collective: check the states and the folder, and make the objects that save and load."""
        with comm.collective_phase("checking the states"):
            check_named(states)
            named = add_random_state(states) if config.save_rng else states
            self._states = TrainingStates(named, check_replicas=config.check_replicas, keep_options=config.keep_options)
            comm.agree(
                states=sorted(self._states.names), fault_tolerance=fault_tolerance is not None, **config.describe()
            )
        if config.enable_checkpoint:
            with comm.collective_phase("checking the configuration"):
                settings.check_variables()
                check_folder(config.folder)
                self._folder = StepFolder(config.folder, get_plugin_manager())
                self._place = str(self._folder)
                self._sizes = StepSizes(self._folder)
                config.check_names(self._states.names)
                if comm.is_main:
                    config.check_assets()
                    self._warn_of_ranks()
        folder = self._folder if config.enable_checkpoint else None
        self._writer, self._parts = make_parts(
            config, folder, self._states, self._group, allow_globals, fault_tolerance
        )
        #: Names of the states that parts save and load themselves.
        self._part_states = {name for part in self._parts for name in part.own_states}
        self._clock = SaveClock(config.save_when)
        excluded = {*config.exclude_from_loading, *self._part_states}
        self._reader = StepReader(config, self._states, self._group, allow_globals, excluded)

    def _warn_of_ranks(self) -> None:
        """Warn of states that only as many ranks can load as save them, before a resume with others fails."""
        per_rank, excluded = self._states.per_rank, self.config.exclude_from_loading
        fixed = [name for name, state in per_rank.items() if state.reshard is None and name not in excluded]
        if fixed and not self.config.load_only:
            logger.warning(
                "only a job of %s can load %s from the steps of this one: for others, give the PerRank %s",
                format_many(self._world_size, "rank"),
                listed([f"the state {name!r}" for name in fixed]),
                ADVICE,
            )

    def is_due(self, step: int) -> bool:
        """Return whether ``save(step)`` saves without ``force``, whatever the policies of ``save_when`` say.

        A subclass may decide, the same on all ranks.
        """
        return self.config.is_due(step)

    def save(
        self,
        step: int,
        force: bool = False,
        *,
        last_step: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Collective: save if this step is due; also commit finished background saves. Call it after every step.

        The caller may change the tensors as soon as this returns, also with an async mode.

        Args:
            step: How many steps the training has made.
            force: Save whatever the interval is.
            last_step: Save with the options for the last step, and wait until it is durable.
            metrics: Numbers by name, ``{"loss": 0.25}``. The main rank's are stored and given to the retention
                policies.

        Returns:
            Whether this call saved the step or began to. False if the step is not due or was saved before, if
            ``on_busy="skip"`` skipped it, if another replica saves it, or if it failed and ``max_failed_saves`` allows
            that.

        Raises:
            CheckpointingException: the same on every rank. This save, or an earlier one in the background, failed. The
                step that failed has no checkpoint; older checkpoints are unchanged.
        """
        with report_failure("save", self._place, self._rank):
            step = parse_number(step, "save", "how many steps the training has made, as manager.save(100)")
            after_step: Any = force
            if isinstance(after_step, Mapping):
                raise CheckpointingException(
                    f"save: force={show_given(force)}: expected True or False; the states are those that the manager "
                    f"was made with: manager.save({step}), or manager.save({step}, force=True) whatever the interval is"
                )
            # ranks may have other metrics: those are checked where all ranks raise one rank's error
            check_annotated(CheckpointManager.save, {"force": force, "last_step": last_step})
            for part in self._parts:
                part.on_step(step)
            if self._writer is None:
                return False
            self._check_open("save")
            in_background = self.config.async_mode is not AsyncMode.DISABLED and not last_step
            with limit_attempts() if in_background else nullcontext():  # also what commits the save before this one
                # other ranks may give False: rank == 0 and {"loss": loss}
                given = metrics or {}
                return self._save_if_due(self._writer, step, force, last_step=last_step, metrics=given)

    def _save_if_due(
        self, writer: StepWriter, step: int, force: bool, *, last_step: bool, metrics: Mapping[str, float]
    ) -> bool:
        """Collective: commit the written saves, and save the step if it is due; return whether it was saved."""
        started = time.perf_counter()
        self._advance(writer)
        forced = self._is_preempted() or force or last_step
        due = forced or self.is_due(step) or self._clock.is_due(step, metrics, Comm(self._group))
        # Lists, here and in `_is_preempted`, not `all(... for ...)`, which stops at the first False: the hooks are
        # collective, and a rank that skips one hangs the others.
        joined = [part.joins_step(step, due=due) for part in self._parts]
        if not (due and all(joined)) or (step == self._last and not last_step):
            return False
        if writer.busy and self.config.on_busy == "skip" and not forced:
            logger.warning("step %d is skipped: the checkpoint of step %s is still being written", step, self._last)
            report_event("save", "skipped", self._folder.path(step), self._rank)
            return False
        self._advance(writer, blocking=True)
        in_background = self.config.async_mode is not AsyncMode.DISABLED and not last_step
        try:
            # most objects made until the tensors are copied are gone then: the collector would visit them before
            with pause_gc() if in_background else nullcontext():
                self._save(writer, step, metrics, last_step=last_step)
        except Exception as error:  # noqa: BLE001 - each is reported with its step
            self._tolerate(error, step, started, is_final=last_step or self._preempted)
            return False
        finally:
            self._states.release()  # the tensors are copied, or written
            self._clock.note_save()  # of one that failed, too: the next attempt is the next step that is due
        for part in self._parts:
            part.after_save(step, last_step=last_step)
        return True

    def load(self, step: int | Literal["latest", "best"] = -1) -> bool:
        """Collective: load a checkpoint into the states.

        Args:
            step: The step to load; ``"latest"`` for the newest complete checkpoint, ``"best"`` for that of
                :meth:`best_step`; -1 for the configuration's ``load_step``, whose default is the newest. If the newest
                proves damaged, it is skipped with a warning, and the one before it is loaded.

        Returns:
            Whether a checkpoint was loaded. If False, there was none, and the states are unchanged.

        Raises:
            CheckpointingException: the same on every rank. The step has no checkpoint, all checkpoints are damaged, or
                the checkpoint does not fit the states.
        """
        if not self.config.enable_checkpoint:
            return False
        with report_failure("load", self._place, self._rank):
            return self._load(step)

    def _load(self, step: int | Literal["latest", "best"]) -> bool:
        """Collective: do as :meth:`load`."""
        self._check_open("load")
        self.wait()  # for removals, too: a step that is being removed must not be chosen
        step = self._parse_step(step)
        comm, is_seed = Comm(self._group), self.config.step_0_model_only
        self._states.find_kept_options(comm)
        found = read_step(self._folder, self._reader, comm, step, step_0_model_only=is_seed)
        if found is not None:
            self._last, self._loaded = None, found  # a step that was saved before the load may be saved a second time
        is_loaded = found is not None or load_initial(self.config, self._states, self._reader, self._group)
        if not is_loaded and comm.is_main:
            warn_of_others(self._folder)
        for part in self._parts:
            part.after_load(found)
        return is_loaded

    def _parse_step(self, step: Any) -> int:
        """Collective: return the step that :meth:`load` is given as a number, or -1 for the newest."""
        is_number = hasattr(step, "__index__") and not isinstance(step, bool)
        Comm(self._group).agree(step=int(step) if is_number else step)  # only "best" asks the other ranks
        if step == "latest":
            return NEWEST
        if step == "best":
            best = self.best_step()
            return NEWEST if best is None else best
        if is_number and step == NEWEST:
            return self.config.load_step
        what = "its number, 'latest', 'best', or -1 for what load_step says; the manager has the states"
        return parse_number(step, "load", what)

    def discard_after(self, step: int) -> list[int]:
        """Collective: remove the checkpoints of all later steps, after a training went back to this one.

        Else a restart would load the newest, which the training has left.

        Args:
            step: The last step that stays.

        Returns:
            The steps that were removed, in ascending order.

        Raises:
            CheckpointingException: the same on every rank, and nothing is removed. No complete checkpoint up to this
                step would be left, or a later one is leased or pinned.
        """
        if not self.config.enable_checkpoint or self.config.load_only:
            raise CheckpointingException("discard_after: this CheckpointManager saves nothing, and removes nothing")
        self._check_open("discard_after")
        self.wait()
        Comm(self._group).agree(step=step)
        step = parse_number(step, "discard_after", "the last step that stays, a whole number")
        removed = Comm(self._group).main_runs(
            f"discarding the steps after {step}", lambda: discard_steps_after(self._folder, step)
        )
        if self._last is not None and self._last > step:
            self._last = None  # it may be saved a second time
        if removed:
            newest = self.steps()[-1]
            for part in self._parts:
                part.after_discard(newest)
        return removed

    @property
    def loaded_step(self) -> int | None:
        """The step that :meth:`load` loaded; None if it loaded none, or loaded ``initial_load_path``."""
        return self._loaded

    @property
    def preempted(self) -> bool:
        """Whether ``save`` has seen that a rank got a signal or :meth:`request_save`; the same on every rank.

        If True, the step was saved, and the training loop can end.
        """
        return self._preempted

    def request_save(self) -> None:
        """Let the next ``save`` save its step on all ranks, as a signal would; :attr:`preempted` is then True.

        One rank is enough. A signal handler, a watchdog or another thread may call it. Once the manager is preempted,
        a request changes nothing.

        Raises:
            CheckpointingException: the manager is closed, or saves nothing; or the configuration has neither
                ``save_on_sigterm`` nor ``save_on_signals``, so that ranks do not tell each other.
        """
        if self._closed:
            raise CheckpointingException("request_save: the CheckpointManager is closed")
        found = [part for part in self._parts if isinstance(part, Preemption)]
        if not found:
            why = "has load_only or no enable_checkpoint" if self.config.saves_on_request else "lacks it"
            raise CheckpointingException(
                "request_save needs a manager that saves, with CheckpointConfig(save_on_signals=()), or with names of "
                f"signals, so that each step asks all ranks for requests; this configuration {why}"
            )
        for part in found:
            part.request()

    def steps(self) -> list[int]:
        """Collective: find the steps that have a complete checkpoint that can be loaded here.

        The main rank alone looks: on shared file systems others may see less, and ranks must not choose other steps.

        Returns:
            Their numbers, in ascending order.
        """
        if not self.config.enable_checkpoint:
            return []
        find = self._folder.committed
        return Comm(self._group).main_runs("looking for checkpoints", lambda: [found.step for found in find()])

    def latest_step(self, without: Collection[int] = ()) -> int | None:
        """Collective: find the step that ``load("latest")`` begins with; nothing is loaded.

        Args:
            without: Steps that proved damaged when they were read, the same on all ranks; they are skipped.

        Returns:
            Its number; None where there is no checkpoint.

        Raises:
            CheckpointingException: the same on every rank, as from :meth:`load`: all checkpoints are damaged, or no
                installed strategy can read the newest.
        """
        if not self.config.enable_checkpoint:
            return None
        return resolve_step(self._folder, Comm(self._group), without=without)

    def find_newest(self, without: Collection[int] = ()) -> int | None:
        """Collective: the earlier name of :meth:`latest_step`."""
        warnings.warn("CheckpointManager.find_newest is latest_step now", DeprecationWarning, stacklevel=2)
        return self.latest_step(without)

    def best_step(self, metric: str = "", mode: Literal["min", "max", ""] = "") -> int | None:
        """Collective: find the step with the best value of a metric, among those that :meth:`steps` returns.

        Args:
            metric: A name among the ``metrics`` that :meth:`save` was given; by default that by which the configuration
                keeps the best steps (``best_metric``, or the first :class:`KeepBest` of ``retention``).
            mode: Whether the smallest (``"min"``) or the largest (``"max"``) value is the best; by default as the
                configuration says, else ``"min"``.

        Returns:
            Its number, of equal values the newer one; None where there is no checkpoint. Steps that a verification has
            marked as failed, and those without a finite value, do not count.

        Raises:
            CheckpointingException: the same on every rank. Neither the call nor the configuration names a metric, or no
                step has it: the error lists those there are.
        """
        if not self.config.enable_checkpoint:
            return None
        kept = next((policy for policy in self.config.retention_policies if isinstance(policy, KeepBest)), None)

        def find() -> int | None:
            check_annotated(CheckpointManager.best_step, {"metric": metric})
            name = metric or (self.config.best_metric if kept is None else kept.metric)
            return find_best(self._folder, name, mode or (self.config.best_mode if kept is None else kept.mode))

        return Comm(self._group).main_runs("looking for the best step", find)

    def metrics(self, step: int) -> dict[str, float | None]:
        """Collective: return the metrics that :meth:`save` was given for a step, by name; None for NaN and infinity.

        Args:
            step: A step with a complete checkpoint.

        Returns:
            The metrics; empty if there were none.

        Raises:
            CannotLoadError: the same on every rank: the step has no complete checkpoint.
            CheckpointingException: the manager has no folder, by ``enable_checkpoint=False``.
        """
        if not self.config.enable_checkpoint:
            raise CheckpointingException(f"metrics: no step {step}: this CheckpointManager saves and loads nothing")

        def read() -> dict[str, float | None]:
            number = parse_number(step, "metrics", "the number of a step that has a checkpoint")
            return dict(self._folder.inspect_step(check_step(self._folder, number)).metrics)

        return Comm(self._group).main_runs("reading metrics", read)

    def maybe_wait_for_staging(self) -> None:
        """Collective: commit a background save that all ranks have written; do not wait for one that they have not.

        torchtitan's training loop calls this before the optimizer's step. It has nothing to wait for: the tensors are
        copied before ``save`` returns.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed.
        """
        with limit_attempts():
            self._advance(*self._parts)

    def wait(self) -> None:
        """Collective: wait until every save is durable and old checkpoints are removed.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed.
        """
        self._advance(*self._parts, blocking=True)

    def close(self) -> None:
        """Collective: wait as :meth:`wait` does, and end the background threads and processes. May be called twice.

        Raises:
            CheckpointingException: the same on every rank: a save in the background failed. Everything is closed.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def __reduce__(self) -> NoReturn:
        refuse_copy(
            self,
            "threads, signal handlers and files",
            "from its `config`, with the states that it is to save",
        )

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        # The stack closes every part, even if another raises. It runs the last callback first, so that the writer, the
        # first part, is closed before those that react to its commits.
        with ExitStack() as stack:
            for part in reversed(self._parts):
                stack.callback(part.close, error)

    def _advance(self, *parts: ManagerPart, blocking: bool = False) -> None:
        """Collective: commit fully written saves; after an error let the failed step be saved a second time."""
        started = time.perf_counter()
        for part in parts:
            try:
                part.advance(blocking=blocking)
            except BaseException as error:  # noqa: PERF203 - parts are few
                failed, self._last = self._last, None
                if not isinstance(error, Exception):
                    raise
                self._tolerate(error, failed, started)

    def _tolerate(self, error: Exception, step: int | None, started: float, *, is_final: bool = False) -> None:
        """Collective: report a save that failed; raise its error if no later one makes up for it, or too many failed.

        Every rank has the same error, and so decides in the same way.
        """
        was_logged = getattr(error, "is_logged", False)  # that of a save in the background, with what could go
        explained = error if was_logged else self._explain_full(error, step)
        most, place = self.config.max_failed_saves, self._place if step is None else self._folder.path(step)
        note_failure("save", place, self._rank, explained, started)
        if is_final or not most or not isinstance(error, StorageError) or error.shared_by is None:
            raise explained
        self._failed += 1
        if self._rank == 0:
            then = "the training goes on" if self._failed <= most else "the error is raised"
            logger.warning(
                "step %s has no checkpoint, and %s: failed save %d in a row (max_failed_saves=%d); "
                "older checkpoints stay",
                *(step, then, self._failed, most),
            )
        if self._failed > most:
            raise explained

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise CheckpointingException(f"{action}: the CheckpointManager is closed")
        if (now := Comm(self._group).world_size) != self._world_size:
            raise CheckpointingException(
                f"{action}: the CheckpointManager was made by {self._world_size} ranks, and now there are {now}: make "
                "it after torch.distributed.init_process_group"
            )

    def _is_preempted(self) -> bool:
        """Collective: return whether a rank got a signal or a request; True once, for the step that is saved then."""
        if self._preempted:
            return False
        preempted = [part.is_preempted() for part in self._parts]
        self._preempted = any(preempted)
        return self._preempted

    def _save(self, writer: StepWriter, step: int, metrics: Mapping[str, float], *, last_step: bool) -> None:
        config = self.config
        model_only = (last_step and config.last_save_model_only) or config.is_seed(step)
        if model_only and MODEL not in self._states.names:
            logger.warning("no state is named %r: all states are saved, not the model alone", MODEL)
            model_only = False
        names = [MODEL] if model_only else [name for name in self._states.names if name not in self._part_states]
        prefix = config.last_model_prefix if model_only and last_step else MODEL_PREFIX
        dequantize = config.stores_values(last_step=last_step, model_only=model_only)
        comm = Comm(self._group)
        comm.describe_origin = name_state
        with comm.local_phase("describing the states"), pause_gc():
            state = self._states.describe_for_save(names, comm, model_prefix=prefix, dequantize=dequantize)
        if model_only and last_step and config.exclude_from_last_save:
            warn_of_absent(state, config.exclude_from_last_save, comm)
            state, _ = leave_out(state, config.exclude_from_last_save)
        if model_only:
            state = cast_shards(state, config.export_dtype, comm)
        with comm.local_phase("describing the states"):
            check_annotated(CheckpointManager.save, {"metrics": metrics})
            numbers = parse_metrics(metrics)
            content = {
                "step": step,
                "states": names,
                PER_RANK_KEY: [name for name in names if name in self._states.per_rank],
                "model_only": model_only,
                PREFIX_KEY: prefix,
                "metrics": numbers,
                "saved_at": time.time(),
                "config": config.describe(),
            }

        def look(operation: Operation) -> None:
            with operation.local_phase("reading the folder"):
                for part in self._parts:
                    part.before_save(step, numbers)

        def on_commit() -> None:
            self._failed = 0
            for part in self._parts:
                part.after_commit(step)

        target, lineage = self._folder.location(step), Lineage(self._reader.restored_id, step)

        def make_room(limit: str) -> bool:
            # the main rank may be removing old steps: then the save may fit
            self.wait()
            return bool(self._make_room(step, limit, "before it"))

        quota = 0 if config.quota is None else parse_size(config.quota, "quota")
        # a whole step has much besides its tensors that the model alone has not
        find_earlier = UNLIMITED.find_earlier if model_only else self._sizes.find_earlier
        explain = partial(self._explain_full, step=step)
        room = Room(make_room, quota, lambda: measure(self._folder.place), find_earlier, explain)
        writer.write(
            state,
            target,
            {CONTENT_KEY: content},
            lineage,
            on_commit,
            background=not last_step,
            before=look,
            room=room,
        )
        self._last = step

    def _make_room(self, step: int, limit: str, when: str) -> list[str]:
        """Collective: remove steps that may go already, if on_full says so; log and return them."""
        if self.config.on_full != "prune":
            return []
        comm = Comm(self._group)
        removed = comm.main_runs(
            "removing old steps", lambda: [f"step {each}" for part in self._parts for each in part.make_room(step)]
        )
        if removed and comm.is_main:
            logger.warning(
                "%s no space for step %d: removed %s, as on_full='prune' says: %s",
                *(limit, step, when, listed(removed)),
            )
        return removed

    def _explain_full(self, error: Exception, step: int | None) -> Exception:
        """Collective: return the error of a step without space with the steps that could go; others as they are.

        Where a write found none, on_full="prune" makes it for the next save.
        """
        if not isinstance(error, NotEnoughSpaceError) or error.shared_by is None or step is None:
            return error
        is_late = is_of_write(error, self._folder.place)
        limit = UNLIMITED.name_limit(self._folder.path(step), 0)
        removed = self._make_room(step, limit, "for the next save") if is_late else []
        advise = partial(self._advise_of_space, error, step, removed)
        text, advice = Comm(self._group).main_runs("choosing removable steps", advise)
        advised = replace_text(error, text)
        vars(advised)["advice"] = advice
        advised.shared_by = error.shared_by  # every rank has given its copy the same text
        advised.__cause__ = error.__cause__
        return advised

    def _advise_of_space(self, error: NotEnoughSpaceError, step: int, removed: list[str]) -> tuple[str, str]:
        """Return an error's text with the steps that the retention would free, or cannot, and this advice alone.

        ``removed`` is what was removed for the next save.
        """
        explained = explain_full(error, self._folder.path(step))
        if not explained.advice:  # a quota below one step; the folder of temporary files before a store is full
            return str(error), ""
        prunes = self.config.on_full == "prune"
        lists = [part.list_kept if prunes else partial(part.list_removable, step) for part in self._parts]
        found = removed or [text for each in lists for text in each()]
        if not found:
            return str(explained), explained.advice
        if removed:
            advice = f"on_full='prune' has removed {listed(removed)} for the next save"
        elif prunes:
            advice = (
                f"on_full='prune' was tried, and may remove none of these: {listed(found, limit=6)}. Let the "
                "retention keep fewer, end pins and leases, or give it more space"
            )
        else:
            advice = (
                f"remove {listed(found)}, which the retention policies will no longer keep once step {step} is complete"
                "; on_full='prune' removes all such but the newest"
            )
        if explained.leftover:
            advice = f"{explained.advice}; {advice}"
        return str(explained).replace(explained.advice, advice), advice
