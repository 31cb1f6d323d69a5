"""torchtitan's CheckpointManager of spring 2025, by its constructor and names, on top of ``shardckpt.manager``.

``shardckpt.integrations.torchtitan`` has the manager of torchtitan 0.3's Trainer.
"""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from shardckpt import dist_checkpointing, manager
from shardckpt.adapters.state import to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.manager.config import AsyncMode, CheckpointConfig
from shardckpt.manager.per_rank import PerRank
from shardckpt.manager.replicas.fault_tolerance import FaultTolerance
from shardckpt.manager.states import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE
from shardckpt.manager.titan import make_titan_config, merge_loader_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module

logger = logging.getLogger(__name__)

#: How long a process of :func:`checkpoint_mp` waits for other ranks' processes, for the slowest to start or to write.
_TIMEOUT = timedelta(minutes=30)

#: torchtitan's methods that this manager does not have, and would not call in a subclass; and their replacements.
_HOOKS = {
    "_create_checkpoint_id": "the option folder; steps are step-<n>",
    "_find_load_step": "load(step), or the option load_step",
    "_states_to_load": "the options exclude_from_loading and initial_load_model_only",
    "_flattened_model_states_sd": "states: an entry with state_dict() and load_state_dict()",
    "_save_last_step": "the options last_save_model_only, export_dtype and exclude_from_last_save",
    "_purge_stale_checkpoints": "the option retention: shardckpt.manager's policies, or a function of yours",
    "_async_wait": "maybe_wait_for_staging(), and close()",
    "_async_with_pinned_memory": "the option async_mode",
    "_ft_save": "ft_manager, and the option enable_ft_dataloader_checkpoints",
    "_ft_load": "ft_manager, and the option enable_ft_dataloader_checkpoints",
    "_ft_folder": "ft_manager, and the option enable_ft_dataloader_checkpoints",
    "_ft_states_to_load": "ft_manager, and the option enable_ft_dataloader_checkpoints",
    "dcp_save": "the option strategy: a registered save strategy",
    "dcp_load": "the option strategy: a registered load strategy",
}


class ModelWrapper:
    """The parts of a model on this rank as one object with a state dict.

    Args:
        model: A module, or a list of modules (stages, chunks) without a common tensor name.
    """

    def __init__(self, model: Module | Sequence[Module]) -> None:
        self.model: list[Module] = list(model) if isinstance(model, (list, tuple)) else [model]  # type: ignore[list-item]

    @property
    def cache_state_dict(self) -> dict[str, Any]:
        """The tensors of all parts by full name, as they are now."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all parts by full name; they share the modules' memory."""
        return {name: value for part in self.model for name, value in get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set each part to its tensors; names of other parts are skipped."""
        for part in self.model:
            set_model_state_dict(part, state_dict, options=StateDictOptions(strict=False))


class _Manager(manager.CheckpointManager):
    """A manager whose steps are due as torchtitan's method says."""

    should_save: Callable[[int], bool]

    def is_due(self, step: int) -> bool:
        """Return whether a step is due."""
        return self.should_save(step)


class CheckpointManager:
    """torchtitan's manager: the steps are in ``<job.dump_folder>/<checkpoint.folder>/step-<n>``.

    Every rank makes one and calls each of its methods with the same arguments: all of them are collective. It has the
    original's defaults: step 1 is saved, of step 0 the model alone is loaded, and the last save has everything unless
    ``model_weights_only``; then ``freqs_cis`` is left out of it, unless ``checkpoint.exclude_from_last_save`` names
    something else, and its keys are the names of the model's tensors, without ``model.``.

    Args:
        dataloader: This rank's loader, or None; the state of each is saved. After a change of the number of ranks every
            rank gets the states of all, by their ``dp_rank_<n>``; the loader takes its own or raises.
        model_parts: The parts of the model on this rank, a single module, or a :class:`ModelWrapper`.
        optimizers: torchtitan's container, or the optimizers of the parts.
        lr_schedulers: torchtitan's container, a scheduler, or a list of schedulers with equal states.
        states: Further states, the same on all ranks: ``{"train_state": ...}``.
        job_config: An object with ``job.dump_folder`` and ``checkpoint``, whose attributes are options of
            :class:`shardckpt.manager.CheckpointConfig`.
        ft_manager: torchtitan's wrapper of torchft (``enabled``, ``manager``, ``replica_id``), for one of several
            replicas; its id may be ``job_config.fault_tolerance.replica_id``.

    Attributes:
        states: All states by name, as the original has them.
        ft_manager: As given.
        folder, interval, async_mode, keep_latest_k, export_dtype, exclude_from_loading, model_weights_only, ...: The
            options, as :class:`shardckpt.manager.CheckpointConfig` has them.
        manager: The :class:`shardckpt.manager.CheckpointManager` that does it.

    Raises:
        ConfigurationError: an option is unknown or wrong.
        CheckpointingException: as for :class:`shardckpt.manager.CheckpointManager`.
    """

    def __init__(
        self,
        dataloader: Any,
        model_parts: Module | Sequence[Module] | ModelWrapper,
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        job_config: Any,
        ft_manager: Any = None,
    ) -> None:
        model = model_parts if isinstance(model_parts, ModelWrapper) else ModelWrapper(model_parts)
        self.states = {**states, MODEL: model, OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers}
        # a container is an optimizer in some versions, and in others it only has them
        inner = getattr(optimizers, "optimizers", optimizers)
        named = {**self.states, MODEL: model.model, OPTIMIZER: inner}
        if dataloader is not None:
            self.states[DATALOADER] = dataloader
            named[DATALOADER] = PerRank(dataloader, merge_loader_states)
        self.ft_manager = ft_manager
        config = make_titan_config(_list_options(job_config), str(job_config.job.dump_folder))
        #: The manager that saves and loads.
        self.manager = _Manager(config, named, fault_tolerance=_make_fault_tolerance(ft_manager, job_config))
        self.manager.should_save = self._should_save

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _HOOKS.keys() & vars(cls).keys():
            raise CheckpointingException(
                f"{cls.__qualname__}.{name} would never be called: shardckpt has no such method. Instead use "
                f"{_HOOKS[name]}"
            )

    def __getattr__(self, name: str) -> Any:
        config = vars(self)["manager"].config if "manager" in vars(self) else None
        option = "last_save_model_only" if name == "model_weights_only" else name
        if option not in CheckpointConfig.model_fields or config is None:
            raise AttributeError(f"{type(self).__qualname__!r} object has no attribute {name!r}")
        return getattr(config, option)

    def _should_save(self, curr_step: int, force: bool = False) -> bool:
        """Return whether a step is due, the same on every rank; a subclass may decide otherwise."""
        return force or self.manager.config.is_due(curr_step)

    def save(self, curr_step: int, force: bool = False) -> bool:
        """Collective: save if this step is due.

        Args:
            curr_step: How many steps the training has made.
            force: Whether this is the last step: save it with the options for that, and wait until it is durable.

        Returns:
            Whether this call saved the step or began to.

        Raises:
            CheckpointingException: the same on every rank. This save, or an earlier one in the background, failed.
        """
        return self.manager.save(curr_step, last_step=force)

    def load(self, step: int = -1) -> bool:
        """Collective: load a step, -1 for the newest good one.

        Returns:
            Whether a checkpoint was loaded. If False, there was none, and the states are unchanged.

        Raises:
            CheckpointingException: the same on every rank. The step has no checkpoint (the original returned False),
                all checkpoints are damaged, or the checkpoint does not fit the states.
        """
        return self.manager.load(step)

    def maybe_wait_for_staging(self) -> None:
        """Collective: commit a background save that all ranks have written; ``save`` has copied the tensors already."""
        self.manager.maybe_wait_for_staging()

    def close(self) -> None:
        """Collective: wait until all saves are durable, and end the background threads and processes.

        Without it, ranks whose programs end together commit the last save then, or an error on stderr names it.
        """
        self.manager.close()


def _list_options(job_config: Any) -> dict[str, Any]:
    """Return the options of a job of spring 2025, with the defaults of that release."""
    given = job_config.checkpoint
    names = [field.name for field in fields(given)] if is_dataclass(given) else list(vars(given))
    options = {"enable_first_step_checkpoint": True, **{name: getattr(given, name) for name in names}}
    if "last_save_model_only" not in options:
        options.setdefault("model_weights_only", False)
    if options.get("last_save_model_only", options.get("model_weights_only")):
        options.setdefault("exclude_from_last_save", ("freqs_cis",))
    return options


def _make_fault_tolerance(ft_manager: Any, job_config: Any) -> FaultTolerance | None:
    if ft_manager is None or not ft_manager.enabled:
        return None
    replica_id = getattr(ft_manager, "replica_id", None)
    return FaultTolerance(
        ft_manager.manager, job_config.fault_tolerance.replica_id if replica_id is None else replica_id
    )


class Terminate:
    """The message that ends :func:`checkpoint_mp` and :func:`purge_thread`."""


class SaveDone:
    """The message of :func:`checkpoint_mp` that it is ready: once at the start, and after each save."""


def save_with_gc(state: dict[str, Any], checkpoint_id: str | os.PathLike[str]) -> None:
    """Collective: save a state dict, replacing an existing checkpoint, and collect garbage.

    The manager needs no call of it, and no collection.

    Args:
        state: Nested dicts and lists with tensors, DTensors and plain values, or with objects that have
            ``state_dict()``.
        checkpoint_id: The directory or URL.

    Raises:
        CheckpointingException: the same on every rank.
    """
    states = {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in state.items()}
    dist_checkpointing.save(to_sharded_state_dict(states), checkpoint_id, overwrite=True)
    gc.collect(1)


def checkpoint_mp(recv: Any, send: Any) -> None:
    """Save states from a queue, until it has a :class:`Terminate`: the main function of a process for each rank.

    The manager needs none: the option ``async_mode="async_with_pinned_mem"`` starts and watches one.

    With ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE`` in the environment, the processes make a gloo
    group, through a store at the port plus 2, if there is none; without ``MASTER_PORT``, this process saves alone.

    Args:
        recv: A queue: ``(state, checkpoint_id)``, as for :func:`save_with_gc`, or a :class:`Terminate`.
        send: A queue, which gets a :class:`SaveDone` at the start and after each save.

    Raises:
        CheckpointingException: a save failed; the process ends, as torchtitan's does.
    """
    made = _make_group()
    try:
        while True:
            send.put(SaveDone())
            message = recv.get()
            if isinstance(message, Terminate):
                return
            state, checkpoint_id = message
            save_with_gc(state, checkpoint_id)
    finally:
        if made:
            dist.destroy_process_group()


def purge_thread(purge_queue: Any) -> None:
    """Remove the steps whose paths come through a queue, until :class:`Terminate` does: the function of a thread.

    The manager needs none: see its options ``keep_latest_k`` and ``retention``. Unlike torchtitan's, this removes
    nothing but steps, and none that a load would take next, or that is pinned or leased; a warning says why one stays.

    Args:
        purge_queue: A queue: ``<folder>/step-<n>``, or a :class:`Terminate`.
    """
    while not isinstance(path := purge_queue.get(), Terminate):
        try:
            result = manager.remove_step(*manager.split_path(os.fspath(path)))
        except CheckpointingException as exc:
            logger.warning("%s", exc)
            continue
        if result.kept or result.error:
            logger.warning("%s stays: %s", path, result.kept or result.error)


def _make_group() -> bool:
    """Make the default group of the processes next to the training; return False if there is one, or no other rank."""
    if dist.is_initialized() or "MASTER_PORT" not in os.environ:
        return False
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # a store of its own: the training's, or torchrun's, has the keys of other groups
    port = int(os.environ["MASTER_PORT"]) + 2
    host = os.environ.get("MASTER_ADDR", "localhost")
    store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=_TIMEOUT)
    dist.init_process_group("gloo", timeout=_TIMEOUT, store=store, rank=rank, world_size=world_size)
    return True


__all__ = [
    "DATALOADER",
    "LR_SCHEDULER",
    "MODEL",
    "OPTIMIZER",
    "TRAIN_STATE",
    "AsyncMode",
    "CheckpointManager",
    "ModelWrapper",
    "SaveDone",
    "Terminate",
    "checkpoint_mp",
    "purge_thread",
    "save_with_gc",
]
