"""The checkpoint manager of a torchtitan Trainer: ``Trainer.Config(checkpoint=TitanCheckpointManager.Config(...))``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from torchtitan.components.checkpointer import BaseCheckpointManager  # type: ignore[import-not-found]

from shardckpt.errors import CheckpointingException
from shardckpt.manager.manager import CheckpointManager
from shardckpt.manager.per_rank import PerRank
from shardckpt.manager.replicas.fault_tolerance import FaultTolerance
from shardckpt.manager.titan import make_titan_config, merge_loader_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.retention import RetentionPolicy
    from shardckpt.manager.save_policies import SavePolicy

#: Options of torchtitan that are not passed on by their names.
_NOT_PASSED = (
    "enable",  # passed as enable_checkpoint
    "initial_load_in_hf_quantized",  # has no effect: a load recognizes quantized weights by their scales
)


class TitanCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint protocol (0.3), implemented by a :class:`shardckpt.manager.CheckpointManager`.

    Args:
        config: torchtitan's options, with shardckpt's.
        dataloader: This rank's loader. Each rank's state is saved. A load on another number of ranks gives every loader
            the states of all, by ``dp_rank_<n>``: the loader finds the state of its own rank, or raises.
        model_parts: The parts of the model on this rank.
        optimizers: torchtitan's container, or any optimizers of these parts.
        lr_schedulers: Schedulers with the same state on all ranks.
        states: Further states, the same on all ranks; torchtitan passes the Trainer's ``train_state``.
        sd_adapter: Ignored: ``config.hf_mapping`` converts names to Hugging Face's.
        base_folder: The folder that ``config.folder`` is relative to.
        ft_manager: torchtitan's wrapper of torchft (``enabled``, ``manager``, ``replica_id``), where this job is one of
            several replicas.

    Attributes:
        manager: The manager that saves and loads. Only an enabled one has it.

    Raises:
        CheckpointingException: the options contradict each other, or need ``hf_mapping``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options, and the options of :class:`shardckpt.manager.CheckpointConfig` that torchtitan lacks.

        Set ``retention`` and ``save_when`` in code: the command line cannot give policies. torchtitan's ``save`` has no
        metrics, so there is no ``keep_best_k``, and ``KeepBest`` keeps no step.

        As with torchtitan's own manager, a load of step 0 restores the model alone, and a last save of the model alone
        has keys without the ``model.`` prefix.

        ``initial_load_in_hf_quantized`` has no effect: a load dequantizes weights with block scales without being told.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        on_busy: Literal["wait", "skip"] = "wait"
        on_full: Literal["error", "prune"] = "error"
        on_other_job: Literal["warn", "error"] = "warn"
        max_failed_saves: int = 0
        quota: str | None = None
        keep_every_n_steps: int = 0
        retention: tuple[RetentionPolicy, ...] = ()
        save_when: tuple[SavePolicy, ...] = ()
        strategy: str | None = None
        hf_mapping: str | None = None
        hf_cut_vocabulary: bool = False
        hf_assets_path: str | None = None
        exclude_from_last_save: tuple[str, ...] = ()
        keep_options: tuple[str, ...] = ()
        rename: dict[str, str] = field(default_factory=dict)
        enable_ft_dataloader_checkpoints: bool = True
        check_replicas: bool = True
        save_rng: bool = True
        save_on_sigterm: bool = False
        save_on_signals: tuple[str, ...] | None = None
        steps_in_hf: bool = False
        latest_pointer: str | None = None
        links: bool = False
        fingerprints: bool = False
        fully_parallel_load: bool = False
        memory_budget: str | None = None
        allow_dtype_cast: bool = False
        dequantize: bool = False
        resize: tuple[str, ...] = ()
        accept: tuple[str, ...] | None = None
        on_unused: Literal["warn", "error", "ignore"] = "warn"
        show_progress: bool = False

    #: The protocol's Future of the last save. Always None: :meth:`maybe_wait_for_saving` asks the manager instead.
    save_future = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any = None,  # noqa: ARG002 - torchtitan gives it
        base_folder: str = "",
        ft_manager: Any = None,
    ) -> None:
        self.enable = False  # until the manager is made: the protocol's methods do nothing before
        if not config.enable:
            return
        if (config.last_save_in_hf or config.initial_load_in_hf) and config.hf_mapping is None:
            raise CheckpointingException(
                "last_save_in_hf and initial_load_in_hf need hf_mapping: the name of a key mapping from torchtitan's "
                "names to Hugging Face's, which a plugin's shardckpt_key_mapping returns; torchtitan's sd_adapter is "
                "not used"
            )
        all_states = {**states, "model": list(model_parts), "optimizer": optimizers, "lr_scheduler": lr_schedulers}
        if dataloader is not None:
            all_states["dataloader"] = PerRank(dataloader, merge_loader_states)
        options = make_checkpoint_config(config, base_folder)
        replica = None
        if ft_manager and ft_manager.enabled:
            replica = FaultTolerance(ft_manager.manager, ft_manager.replica_id)
        self.manager = CheckpointManager(options, all_states, fault_tolerance=replica)
        self.enable = True

    def maybe_wait_for_saving(self) -> None:
        """Collective: wait until all saves are durable."""
        if self.enable:
            self._wait_for_saving()

    def _wait_for_saving(self) -> None:
        self.manager.wait()

    def _load(self, step: int = -1) -> bool:
        return self.manager.load(step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.manager.save(curr_step, last_step=last_step)

    def _maybe_wait_for_staging(self) -> None:
        self.manager.maybe_wait_for_staging()

    def _close(self) -> None:
        self.manager.close()


def make_checkpoint_config(config: TitanCheckpointManager.Config, base_folder: str = "") -> CheckpointConfig:
    """Convert torchtitan's options to the options of a CheckpointManager.

    ``config.folder`` is relative to ``base_folder``, a folder or URL, unless it is a URL or an absolute path.
    """
    options = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _NOT_PASSED}
    return make_titan_config({"enable_checkpoint": config.enable, **options}, base_folder)


#: The earlier name.
checkpoint_config = make_checkpoint_config


__all__ = ["TitanCheckpointManager", "checkpoint_config", "make_checkpoint_config"]
