"""Accelerate: ``accelerator.save_state`` and ``load_state`` save and load models and optimizers by shardckpt."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from accelerate import DistributedType  # type: ignore[import-untyped]
from accelerate.checkpointing import save_accelerator_state  # type: ignore[import-untyped]

from shardckpt import dist_checkpointing
from shardckpt.adapters.restore import load_into
from shardckpt.adapters.state import to_sharded_state_dict
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from accelerate import Accelerator

    from shardckpt.mapping.base import ShardedStateDict

#: The checkpoint's name in the folder of a ``save_state``.
FOLDER = "shardckpt"

#: With these, Accelerate writes models and optimizers before it calls any hook.
_WITHOUT_HOOKS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
#: Stands in ``optimizer.bin`` and is compared at a load: with another text, older checkpoints would not load.
_NOTE = "stored by shardckpt, in the folder beside this file"  # it stands in files: never another text
#: The accelerators that have our hooks.
_REGISTERED: WeakSet[Accelerator] = WeakSet()


def register_sharded_state(
    accelerator: Accelerator,
    strategy: str | tuple[str, int] | None = None,
    *,
    check_replicas: bool = True,
) -> ShardedState:
    """Make ``accelerator.save_state(folder)`` save models and optimizers in ``folder/shardckpt``, for ``load_state``.

    Each shard is written once, by one of the ranks that have it, and any number of ranks can load it. It works with
    plain models, DDP, and modules that were sharded before they were prepared (FSDP2, tensor parallel:
    ``accelerator.prepare_model(model, evaluation_mode=True)`` does not change them). Accelerate still writes
    ``optimizer.bin``, with a note instead of the optimizer's state, and schedulers, samplers, the GradScaler, random
    states and registered objects, for which it has no hooks.

    Args:
        accelerator: The accelerator, before or after ``prepare``.
        strategy: Backend, ``"backend@version"`` or (backend, version); by default the registry's default.
        check_replicas: As for :func:`shardckpt.adapters.to_sharded_state_dict`.

    Returns:
        The registered hooks; :meth:`ShardedState.remove` removes them.

    Raises:
        CheckpointingException: the accelerator has the hooks already; or it uses its FSDP plugin, DeepSpeed or
            Megatron-LM, with which Accelerate saves shards itself before it calls any hook.

    Example::

        register_sharded_state(accelerator)
        accelerator.save_state("run/step-100")  # on every rank
    """
    if accelerator.distributed_type in _WITHOUT_HOOKS:
        raise CheckpointingException(
            f"under {accelerator.distributed_type.value} Accelerate saves models and optimizers itself, before it "
            "calls the hooks of save_state: they would be stored twice. Use a shardckpt.manager.CheckpointManager with "
            "the prepared model and optimizer instead of save_state and load_state"
        )
    if accelerator in _REGISTERED:  # the first hook takes the models from a load, and the second would find none
        raise CheckpointingException(
            "register_sharded_state was called for this accelerator before: call remove() of what it returned first"
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
        _REGISTERED.add(accelerator)
        #: Optimizers that have our hooks.
        self._hooked: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._handles: list[Any] = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    def remove(self) -> None:
        """Remove the hooks: Accelerate saves and loads everything itself from then on."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        _REGISTERED.discard(self._accelerator)

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        """Collective: save models and optimizers. Emptying ``weights`` tells Accelerate that they are saved."""
        with Comm().local_phase("describing the accelerator's models"):
            state = self._describe(models)
        # save_state may be called for one folder again: Accelerate, too, overwrites its files
        dist_checkpointing.save(state, Path(output_dir, FOLDER), self._strategy, overwrite=True)
        weights.clear()
        self._hook_optimizers()

    def _load(self, models: list[torch.nn.Module], input_dir: str) -> None:
        """Collective: load models and optimizers. Emptying ``models`` tells Accelerate that they are loaded."""
        comm = Comm()
        with comm.local_phase("describing the accelerator's models"):
            state = self._describe(models)
        loaded = dist_checkpointing.load(state, Path(input_dir, FOLDER))
        with comm.collective_phase("restoring the accelerator's models"):
            load_into(loaded, _as_one(models), *self._optimizers())
        models.clear()
        self._hook_optimizers()

    def _describe(self, models: list[torch.nn.Module]) -> ShardedStateDict:
        optimizers = self._optimizers()
        prefix = "" if optimizers else "model."  # the keys of the model are the same with and without optimizers
        return to_sharded_state_dict(_as_one(models), *optimizers, prefix=prefix, check_replicas=self._check_replicas)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that Accelerate would save: it passes hooks the models only."""
        return [getattr(each, "optimizer", each) for each in self._accelerator._optimizers]  # noqa: SLF001

    def _hook_optimizers(self) -> None:
        """Make torch's optimizers give Accelerate a note instead of their state, and ignore the note at a load."""
        for each in self._optimizers():
            if each not in self._hooked:
                self._hooked.add(each)
                self._handles.append(each.register_state_dict_post_hook(self._withhold_state))
                self._handles.append(each.register_load_state_dict_pre_hook(_ignore_note))

    def _withhold_state(self, _optimizer: torch.optim.Optimizer, _state: dict[str, Any]) -> dict[str, Any] | None:
        """Return the note if this accelerator's save_state asks, after :meth:`_save`; others get the state."""
        frame = inspect.currentframe()  # Accelerate has no hook at the end of save_state that could reset a mark
        while frame is not None and frame.f_code is not save_accelerator_state.__code__:
            frame = frame.f_back
        if frame is None or frame.f_locals["optimizers"] is not self._accelerator._optimizers:  # noqa: SLF001
            return None
        return {"state": {}, "param_groups": [], "note": _NOTE}


def _ignore_note(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return optimizer.state_dict() if state_dict.get("note") == _NOTE else state_dict


def _as_one(models: list[torch.nn.Module]) -> torch.nn.Module:
    """Return the models as one module, in which names differ: an optimizer may have parameters of several models."""
    return models[0] if len(models) == 1 else torch.nn.ModuleList(models)


__all__ = ["FOLDER", "ShardedState", "register_sharded_state"]
