"""The parts of a CheckpointManager, made as its configuration says."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardckpt.commit.owner import Owner
from shardckpt.distributed.comm import Comm
from shardckpt.engine.amounts import format_bytes
from shardckpt.engine.display import show_progress
from shardckpt.engine.locations import measure_freed
from shardckpt.errors import CheckpointingException, ask_nearest, escape_text
from shardckpt.huggingface.export import export_to_huggingface
from shardckpt.manager.garbage_collection import GarbageCollector, remove_steps
from shardckpt.manager.other_jobs import OtherJobs
from shardckpt.manager.part import ManagerPart
from shardckpt.manager.preemption import Preemption
from shardckpt.manager.replicas.replica import Replica
from shardckpt.manager.retention import KeepBest, KeepLatest, Metrics, find_needed_steps, steps_to_remove
from shardckpt.manager.states import MODEL
from shardckpt.manager.step_links import begin_links
from shardckpt.manager.step_pruning import prune_steps
from shardckpt.manager.steps import MODEL_PREFIX, StepFolder
from shardckpt.manager.writer import StepWriter, free_step
from shardckpt.storage.filesystem import put_file
from shardckpt.storage.places import get_url

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.replicas.fault_tolerance import FaultTolerance
    from shardckpt.manager.retention import RetentionPolicy, StepMetrics
    from shardckpt.manager.states import TrainingStates

logger = logging.getLogger(__name__)


def make_parts(
    config: CheckpointConfig,
    folder: StepFolder | None,
    states: TrainingStates,
    process_group: ProcessGroup | None,
    allow_globals: tuple[Any, ...],
    fault_tolerance: FaultTolerance | None,
) -> tuple[StepWriter | None, list[ManagerPart]]:
    """Collective: return the writer of a manager, None if no step is ever saved, and all its parts.

    The writer is the first part: it commits before the others react. ``folder`` is None if the manager does nothing.
    """
    comm = Comm(process_group)
    replica: list[ManagerPart] = []
    if fault_tolerance is not None:
        replica = [Replica(fault_tolerance, config, states, process_group, allow_globals)]
    if config.load_only or folder is None:
        return None, replica
    parts: list[ManagerPart] = []
    with comm.collective_phase("beginning to save checkpoints"):
        if comm.is_main:
            # first: a removal must not begin while the file still names a step that may be removed
            if config.latest_pointer:
                parts.append(LatestPointer(folder, config.latest_pointer))
            if config.links:
                begin_links(folder)
            others = None
            if fault_tolerance is None:  # replicas share a folder
                others = OtherJobs(folder, refuses=config.on_other_job == "error")
                others.look()  # before a load takes a step of theirs
                parts.append(others)
            parts.append(Retention(folder, config.retention_policies, others, links=config.links))
            if config.show_progress:
                parts.append(SaveProgress())
        if config.saves_on_request:
            parts.append(Preemption(process_group, config.signals))
        prefix, last = (MODEL_PREFIX, config.last_model_prefix) if MODEL in states.modules else (None, None)
        if config.last_save_in_hf and (not config.steps_in_hf or config.export_dtype):
            parts.append(HuggingFaceExport(config, folder, last, process_group))
        writer = StepWriter(config, process_group, allow_globals, config.make_saver(prefix))
    return writer, [writer, *parts, *replica]


class Retention(ManagerPart):
    """Removes the checkpoints that no policy keeps, and moves the folder's links; a part of the main rank alone."""

    def __init__(
        self, folder: StepFolder, policies: Collection[RetentionPolicy], others: OtherJobs | None, *, links: bool
    ) -> None:
        self._folder = folder
        self._policies = policies
        self._others = others
        self._gc = GarbageCollector(folder, policies, links=links)
        self._metrics = [policy.metric for policy in policies if isinstance(policy, KeepBest)]
        #: How many of this run's newest steps are kept whatever the policies return. After a load of an earlier step,
        #: the folder has higher steps than this run saves, and KeepLatest would keep only those.
        self._protected_count = max((policy.count for policy in policies if isinstance(policy, KeepLatest)), default=1)
        #: The protected steps, oldest first: the one that this run loaded, and those that it saved.
        self._protected: list[int] = []
        #: Missing metrics that were warned of, each with the metrics that were given.
        self._warned: set[tuple[str, str]] = set()
        self._has_warned_of_later = False

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Wait until the step is not being removed, and free its place; warn of later steps and of missing metrics."""
        existing = self._folder.steps()
        if self._others is not None:  # here, where the folder is listed
            self._others.warn_of_unknown_steps(step, existing)
        if step in existing:
            # A collection that is under way may have chosen to remove the old checkpoint of this step: it would remove
            # the new one.
            self._gc.wait()
            free_step(self._folder, step)
            self._folder.forget(step)
        later = next((each for each in reversed(existing) if each > step and self._folder.is_taken(each)), None)
        if later is not None and not self._has_warned_of_later:  # once: each save is another step
            self._has_warned_of_later = True
            self._warn_of_later(step, later)
        for metric in self._metrics:
            given = ", ".join(map(repr, metrics)) or "none"
            if metric not in metrics and (metric, given) not in self._warned:
                self._warned.add((metric, given))
                logger.warning(
                    "the best checkpoints are kept by the metric %r, which is not among those that save was given "
                    "(%sgiven: %s)",
                    metric,
                    ask_nearest(metric, metrics),
                    given,
                )

    def list_removable(self, step: int) -> list[str]:
        """Return the steps that the policies will not keep once this one is durable, and the bytes that they take."""
        try:
            found = [each for each in map(self._folder.inspect_step, self._folder.steps()) if each.is_loadable]
            chosen = self._choose({each.step: each.metrics for each in found}, step)
            held = self._folder.holds.find()
        except Exception:  # a user's policy may raise anything, and this is only advice
            logger.warning("cannot choose the steps of %s that could go", self._folder, exc_info=True)
            return []
        texts = []
        for each in chosen:
            hold = held.get(self._folder.names.name(each))
            why = f", {hold[0]} now" if hold else ""
            texts.append(f"step {each} ({format_bytes(measure_freed(self._folder.path(each)))}{why})")
        return texts

    def list_kept(self) -> list[str]:
        """Return the existing steps, the newest first, each with the reason that keeps it."""
        protected = dict.fromkeys({*self._protected} & {*self._folder.steps()}, "this job has loaded or saved it")
        try:
            found = prune_steps(get_url(self._folder.place), self._policies, protected, names="step-", dry_run=True)
            held = self._folder.holds.find()
        except Exception:  # as above
            logger.warning("cannot list the holds and policies that keep the steps of %s", self._folder, exc_info=True)
            return []
        texts = []
        for each in reversed(found):
            holds = [
                text for text in map(str, held.get(self._folder.names.name(each.step), ())) if text not in each.kept
            ]
            why = ", ".join((each.kept or "it could not be removed: the log says why", *holds))
            texts.append(f"step {each.step} ({format_bytes(each.nbytes)}: {why})")
        return texts

    def make_room(self, step: int) -> list[int]:
        """Remove the steps that the policies will not keep once this one is durable, but none that is needed now."""

        def choose(metrics: StepMetrics) -> list[int]:
            return [each for each in self._choose(metrics, step) if each not in find_needed_steps(metrics)]

        self._gc.wait()
        try:
            return remove_steps(self._folder, choose).removed
        except Exception:  # as above
            logger.warning("cannot remove steps of %s to make space", self._folder, exc_info=True)
            return []

    def _choose(self, metrics: StepMetrics, step: int) -> list[int]:
        """Return which steps the policies will not keep once another is durable, whose metrics they do not get."""
        return [*steps_to_remove(self._policies, {**metrics, step: Metrics({})}, self._protect(step))]

    def after_commit(self, step: int) -> None:
        """Submit a garbage collection that keeps the newest steps of this run."""
        self._folder.forget(step)  # a look at it meanwhile has found the old one
        self._protected = self._protect(step)
        self._gc.submit(protected=self._protected)

    def after_load(self, step: int | None) -> None:
        """Protect the loaded step."""
        if step is not None:
            self._protected = [step]

    def advance(self, *, blocking: bool = False) -> None:
        """If ``blocking``, wait for removals: they would race with a load."""
        if blocking:
            self._gc.wait()

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - every part has it
        """Finish the removals, and end the thread."""
        self._gc.close()

    def _protect(self, step: int) -> list[int]:
        """Return the protected steps once this one is durable."""
        return [*(each for each in self._protected if each != step), step][-self._protected_count :]

    def _warn_of_later(self, step: int, later: int) -> None:
        """Warn of steps after the one that is saved; steps of another job that still runs are not to be discarded."""
        jobs = self._folder.holds.find_jobs().values()
        others = [job.holder for job in jobs if job.is_current and Owner.from_text(job.owner) != Owner.current()]
        unless = f"unless they belong to another job that saves there ({escape_text(others[0])}), " if others else ""
        advice = f"{unless}manager.discard_after({step}) removes them"
        logger.warning(
            "%s has steps after %d, the newest is %d: a later load takes that one; %s",
            self._folder,
            step,
            later,
            advice,
        )


class LatestPointer(ManagerPart):
    """Keeps the name of the newest step's directory in a file, for tools that want one; a part of the main rank alone.

    A load does not read it: it looks at the directories.
    """

    def __init__(self, folder: StepFolder, name: str) -> None:
        self._folder, self._name = folder, name

    def after_commit(self, step: int) -> None:
        """Name the step that is durable now. A failure is a warning: the checkpoint is there without it."""
        data = f"{self._folder.names.name(step)}\n".encode()
        try:
            put_file(self._folder.find(self._name), data, f".{self._name}.shardckpt-tmp")
        except (CheckpointingException, OSError):
            logger.warning("cannot name step %d in %s/%s", step, self._folder, self._name, exc_info=True)

    def after_discard(self, newest: int) -> None:
        """Name the newest step that is left."""
        self.after_commit(newest)


class SaveProgress(ManagerPart):
    """Shows on standard error how far a save is; a part of the main rank alone."""

    def __init__(self) -> None:
        self._shown = ExitStack()

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:  # noqa: ARG002 - every part has it
        """Begin to show."""
        self._shown.close()  # a save that failed had no commit
        self._shown.enter_context(show_progress("save"))

    def after_commit(self, step: int) -> None:  # noqa: ARG002 - every part has it
        """End it."""
        self._shown.close()

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - every part has it
        """End it, also after a save that failed."""
        self._shown.close()


class HuggingFaceExport(ManagerPart):
    """Exports the last step to ``step-<n>-hf``."""

    def __init__(
        self, config: CheckpointConfig, folder: StepFolder, prefix: str | None, process_group: ProcessGroup | None
    ) -> None:
        self._config, self._folder, self._prefix, self._group = config, folder, prefix, process_group

    def after_save(self, step: int, *, last_step: bool) -> None:
        """Collective: export the model, if the step is the last."""
        if not last_step:
            return
        path = self._folder.location(step)
        export_to_huggingface(
            path,
            f"{path}-hf",
            prefix=self._prefix,
            mapping=self._config.hf_mapping,
            cut_vocabulary=self._config.hf_cut_vocabulary,
            dtype=self._config.export_dtype,
            assets=self._config.hf_assets_path,
            overwrite=True,
            process_group=self._group,
            memory_budget=self._config.memory_budget,
        )
