"""Accelerate: models and optimizers of ``accelerator.save_state`` and ``load_state``, saved and read by shardckpt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate import DistributedType  # type: ignore[import-untyped]

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from accelerate import Accelerator

    from shardckpt.mapping import ShardedStateDict

#: The checkpoint's name in the folder of a ``save_state``.
FOLDER = "shardckpt"

_WRITES_ITSELF = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_MARK = "stored by shardckpt, in the folder beside this file"


def register_sharded_state(
    accelerator: Accelerator,
    strategy: str | tuple[str, int] | None = None,
    *,
    check_replicas: bool = True,
) -> ShardedState:
    """Let ``accelerator.save_state(folder)`` keep models and optimizers in ``folder/shardckpt``, for ``load_state``.

    Each piece is written once, by one of the ranks that have it, whole or not at all, and any number of ranks loads it.
    DDP, plain models, and modules that were sharded before they were prepared
    (``accelerator.prepare_model(model, evaluation_mode=True)`` leaves them as they are: FSDP2, tensor parallel) are
    taken. What Accelerate still writes itself: ``optimizer.bin`` with a note in the place of the optimizer's state, and
    schedulers, samplers, the GradScaler, random states and registered objects, which it lets nobody else write.

    Args:
        accelerator: Any, before or after ``prepare``.
        strategy: Backend or (backend, version); by default the registry's default.
        check_replicas: As for :func:`shardckpt.adapters.to_sharded_state_dict`.

    Returns:
        What undoes it.

    Raises:
        CheckpointingException: Accelerate itself saves what is sharded, before it asks any hook: its FSDP plugin,
            DeepSpeed, Megatron-LM.
    """
    if accelerator.distributed_type in _WRITES_ITSELF:
        raise CheckpointingException(
            f"under {accelerator.distributed_type.value} Accelerate saves models and optimizers itself, before it "
            "calls the hooks of save_state: they would be stored twice. Use a shardckpt.manager.CheckpointManager with "
            "the prepared model and optimizer in the place of save_state and load_state"
        )
    return ShardedState(accelerator, strategy, check_replicas=check_replicas)


class ShardedState:
    """The hooks that :func:`register_sharded_state` has registered."""

    def __init__(
        self, accelerator: Accelerator, strategy: str | tuple[str, int] | None, *, check_replicas: bool
    ) -> None:
        self._accelerator = accelerator
        self._strategy = strategy
        self._check_replicas = check_replicas
        self._withheld: WeakKeyDictionary[torch.optim.Optimizer, _WithheldState] = WeakKeyDictionary()
        self._handles = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    def remove(self) -> None:
        """Let Accelerate save and load everything itself again."""
        for handle in [*self._handles, *self._withheld.values()]:
            handle.remove()
        self._withheld.clear()

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        """Save, and leave Accelerate nothing of it: the list of weights is emptied, as its documentation asks."""
        with Comm().local_phase("describing the accelerator's models"):
            state = self._describe(models)
        dist_checkpointing.save(state, Path(output_dir, FOLDER), self._strategy, overwrite=True)
        weights.clear()
        for each in self._withhold():
            each.armed = True

    def _load(self, models: list[torch.nn.Module], input_dir: str) -> None:
        """Load, and leave Accelerate nothing to load."""
        comm = Comm()
        with comm.local_phase("describing the accelerator's models"):
            state = self._describe(models)
        loaded = dist_checkpointing.load(state, Path(input_dir, FOLDER))
        with comm.collective_phase("handing back the accelerator's models"):
            load_into(loaded, _as_one(models), *self._optimizers())
        models.clear()
        self._withhold()

    def _describe(self, models: list[torch.nn.Module]) -> ShardedStateDict:
        optimizers = self._optimizers()
        prefix = "" if optimizers else "model."  # the keys of the model are the same with and without optimizers
        return to_sharded_state_dict(_as_one(models), *optimizers, prefix=prefix, check_replicas=self._check_replicas)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that Accelerate would save: it hands hooks the models only."""
        return [getattr(each, "optimizer", each) for each in self._accelerator._optimizers]  # noqa: SLF001

    def _withhold(self) -> list[_WithheldState]:
        for each in self._optimizers():
            if each not in self._withheld:
                self._withheld[each] = _WithheldState(each)
        return [self._withheld[each] for each in self._optimizers()]


class _WithheldState:
    """Hooks of an optimizer: for Accelerate's next save it has a note for its state, which loads as no change.

    Args:
        optimizer: Torch's own, not Accelerate's wrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.armed = False
        self._handles = [
            optimizer.register_state_dict_post_hook(self._state_dict),
            optimizer.register_load_state_dict_pre_hook(self._load_state_dict),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _state_dict(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if not self.armed:
            return state_dict
        self.armed = False
        return {"state": {}, "param_groups": [], "note": _MARK}

    @staticmethod
    def _load_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return optimizer.state_dict() if state_dict.get("note") == _MARK else state_dict


def _as_one(models: list[torch.nn.Module]) -> torch.nn.Module:
    """The models as one, in which each has names of its own, so that an optimizer may have parameters of several."""
    return models[0] if len(models) == 1 else torch.nn.ModuleList(models)


__all__ = ["FOLDER", "ShardedState", "register_sharded_state"]
