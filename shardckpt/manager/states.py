"""The states of a training by name: described for a save, requested from a load, and restored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.adapters.kept_options import choose_options, list_option_names
from shardckpt.adapters.restore import load_into
from shardckpt.adapters.state import SavedModules, to_sharded_state_dict
from shardckpt.errors import CheckpointingException, listed, show_given
from shardckpt.manager.per_rank import PerRank, Stateful
from shardckpt.manager.plain_state import (
    describe_form,
    describe_tensors,
    describe_values,
    memory_of,
    merge_tensors,
    request_tensors,
    restore_keys,
)
from shardckpt.manager.replicated_states import ReplicatedStates
from shardckpt.manager.steps import MODEL_PREFIX
from shardckpt.manager.wrapped_optimizers import (
    copy_options,
    is_partitioning,
    list_optimizers,
    unpack_optimizers,
)
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import Replicated, ShardedStateDict, StateDict

logger = logging.getLogger(__name__)

#: These two are described together: the keys of optimizer state contain the names of the model's parameters.
MODEL = "model"
OPTIMIZER = "optimizer"
#: torchtitan's names of further states; no state must be named so.
LR_SCHEDULER = "lr_scheduler"
DATALOADER = "dataloader"
TRAIN_STATE = "train_state"

#: Keys of a checkpoint: the forms of plain states, the states of each rank, the tensors of plain states.
FORMS = "forms"
_RANKS = "ranks"
_TENSORS = "tensors"

#: The attribute of an error that has the name of the state whose code has raised it.
_STATE_NAME = "shardckpt_state"


class Ranks(NamedTuple):
    """This rank, the number of ranks, and the number of ranks that saved the checkpoint."""

    rank: int
    world_size: int
    saved_world_size: int


#: The end of an error about a state.
_TAKEN = (
    "a CheckpointManager takes modules, their optimizers, PerRank(...), and objects with state_dict and "
    f"load_state_dict, by name: {{{MODEL!r}: model, {OPTIMIZER!r}: optimizer}}"
)


def check_named(states: Any) -> None:
    """Raise CheckpointingException unless states are given by name, and not as ``state_dict()`` returns them."""
    if not isinstance(states, Mapping):
        advice = f"give it by name, as {{{MODEL!r}: ...}}; " if isinstance(states, torch.nn.Module) else ""
        raise CheckpointingException(f"the states are {show_given(states)}: {advice}{_TAKEN}")
    tensors = [str(name) for name, value in states.items() if isinstance(value, torch.Tensor)]
    if tensors and len(tensors) == len(states):
        raise CheckpointingException(
            f"the states are tensors, as state_dict() returns them ({listed(tensors, limit=2)}): give the module "
            f"itself, {{{MODEL!r}: model}}; tensors by name are saved by dist_checkpointing.save"
        )


def _advise_of_state(value: Any) -> str:
    if isinstance(value, Mapping):
        return "give the object that has this state_dict(), so that a load can set it; "
    if isinstance(value, int | float):
        return "a load could not set it; the step is stored (manager.loaded_step); "
    if isinstance(value, type | torch.Tensor):
        return "give an object of it; " if isinstance(value, type) else "give the module or object that has it; "
    return "leave it out, or give its object; " if value is None else ""


class TrainingStates:
    """The states by name, sorted by kind.

    With ``check_replicas`` a save compares values that several ranks hold. ``keep_options`` are the options of the
    optimizers that keep their live values, as for CheckpointConfig.

    Attributes:
        names: The names of all states, in the order in which they were given.
        modules: Modules, or lists of the stages that this rank has.
        optimizers: One or a list, given under the name ``optimizer``, of the modules under ``model``.
        sharded: Objects with ``sharded_state_dict()`` and ``load_state_dict``.
        per_rank: The :class:`PerRank` states.
        plain: Objects with ``state_dict`` and ``load_state_dict`` that are the same on all ranks, or lists of those
            whose states are equal.
    """

    def __init__(
        self, states: Mapping[str, Any], *, check_replicas: bool = True, keep_options: Collection[str] = ()
    ) -> None:
        self._keep_options = keep_options
        self._has_said_gradients = False
        #: Their names, once :meth:`find_kept_options` has found them.
        self._kept_options: list[str] = []
        self._replicated: Replicated = True if check_replicas else "unchecked"
        self._check_replicas = check_replicas
        self.modules: dict[str, list[torch.nn.Module]] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        #: ZeroRedundancyOptimizers: each has groups of its own besides those of its inner optimizer.
        self._partitioning: list[Any] = []
        self.sharded: dict[str, Any] = {}
        self.per_rank: dict[str, PerRank] = {}
        self.plain: dict[str, Stateful] = {}
        #: Describes the modules of each name in saves.
        self._saved: dict[str, SavedModules] = {}
        for name, value in states.items():
            self._sort(name, value)
        if self.optimizers and MODEL not in self.modules:
            raise CheckpointingException(
                f"the state {OPTIMIZER!r} is an optimizer: also give its modules under the name {MODEL!r}, since "
                "its state is named by their parameters"
            )
        self.names = tuple(states)

    def find_kept_options(self, comm: Comm) -> None:
        """Collective: find the options that :meth:`restore` keeps, among the options of the optimizers of all ranks.

        It is an error, the same on every rank, if no rank has one of them.
        """
        if self._keep_options:
            with comm.collective_phase("checking the options of the optimizers"):
                names = {name for each in comm.all_gather(list_option_names(self.optimizers)) for name in each}
                self._kept_options = choose_options(self._keep_options, sorted(names))

    def describe_for_save(
        self, names: Collection[str], comm: Comm, *, model_prefix: str = MODEL_PREFIX, dequantize: bool = False
    ) -> ShardedStateDict:
        """Describe the named states as :meth:`describe` does, faster; until :meth:`release`, and not for a load.

        ``model_prefix`` is the prefix of the model's keys; only without its optimizers it may be another one.
        """
        if not self._has_said_gradients and self._with_optimizers(names):
            self._log_gradients()
        return self._describe(names, comm, to_save=True, model_prefix=model_prefix, dequantize=dequantize)

    def release(self) -> None:
        """Let go of the tensors that :meth:`describe_for_save` has described."""
        for saved in self._saved.values():
            saved.release()

    def describe(self, names: Collection[str], comm: Comm) -> ShardedStateDict:
        """Return a sharded state dict of the named states.

        States stand under their names, since errors show the places of keys; the values of plain states, except
        tensors, stand under ``forms``.
        """
        return self._describe(names, comm, to_save=False)

    def _describe(
        self,
        names: Collection[str],
        comm: Comm,
        *,
        to_save: bool,
        model_prefix: str = MODEL_PREFIX,
        dequantize: bool = False,
    ) -> ShardedStateDict:
        plain = {name: _call(name, state.state_dict) for name, state in self._select(self.plain, names)}
        per_rank = self._select(self.per_rank, names)
        # before the forms: an error about a tensor names its key
        tensors = {name: _call(name, describe_tensors, name, state, self._replicated) for name, state in plain.items()}
        described = {
            **self._describe_sharded(names, to_save=to_save, model_prefix=model_prefix, dequantize=dequantize),
            # without the empty ones: each would be an entry of the common state, with the name of its form
            **{name: found for name, found in tensors.items() if found},
            **{name: _call(name, state.describe, name, comm.rank, comm.world_size) for name, state in per_rank},
            FORMS: {name: describe_form(name, state, self._replicated) for name, state in plain.items()},
        }
        if plain and not self.sharded:  # Megatron refuses to list a checkpoint that has plain objects
            taken = {
                leaf.key
                for leaf in nested_values(described)
                if type(leaf) is ShardedTensor or isinstance(leaf, ShardedBase)  # isinstance of an ABC is slow
            }
            for name, state in plain.items():
                described[FORMS].update(describe_values(name, state, taken))
        return described

    def request_objects(self, names: Collection[str], ranks: Ranks) -> ShardedStateDict:
        """Return a sharded state dict of the objects, which are loaded first: they list the tensors."""
        return {
            FORMS: {name: describe_form(name, None, "unchecked") for name, _ in self._select(self.plain, names)},
            _RANKS: {name: state.request(name, *ranks) for name, state in self._select(self.per_rank, names)},
        }

    def restore_keys(self, objects: StateDict) -> None:
        """Give plain states that another library stored the keys of the live ones, in place; see the function."""
        forms = objects.get(FORMS, {})
        live = {name: _call(name, self.plain[name].state_dict) for name in forms}
        forms.update({name: restore_keys(form, live[name]) for name, form in forms.items()})

    def request_tensors(
        self, names: Collection[str], objects: StateDict, *, model_prefix: str = MODEL_PREFIX
    ) -> ShardedStateDict:
        """Return a sharded state dict of the tensors, which are loaded second: into the live ones where they fit."""
        forms = objects.get(FORMS, {})
        described = self._describe_sharded(names, model_prefix=model_prefix)
        # Storage that a module or optimizer is loaded into. A plain state (an EMA that shares the weights) must not be
        # loaded into it as well: the last one read would win.
        taken = {memory for leaf in nested_values(described) if (memory := memory_of(getattr(leaf, "data", None)))}
        return {
            **described,
            _TENSORS: {
                name: request_tensors(name, forms[name], _call(name, state.state_dict), taken)
                for name, state in self._select(self.plain, names)
            },
        }

    def restore(
        self, names: Collection[str], objects: StateDict, tensors: StateDict, ranks: Ranks, *, strict: bool = True
    ) -> None:
        """Collective where :func:`load_into` is: set the states to the loaded values.

        Unless ``strict``, parts of the model that were not loaded keep their values.
        """
        for name, parts in self._select(self.modules, names):
            if name != MODEL or not self._with_optimizers(names):
                load_into(tensors.get(name, {}), parts, strict=strict or name != MODEL)
        if self._with_optimizers(names):
            both = {MODEL: tensors[MODEL], OPTIMIZER: tensors[OPTIMIZER]}
            keep = [name for name in list_option_names(self.optimizers) if name in self._kept_options]
            load_into(both, self.modules[MODEL], *self.optimizers, strict=strict, keep_options=keep)
            for outer in self._partitioning:
                _call(OPTIMIZER, copy_options, outer.optim, outer)
        for name, sharded in self._select(self.sharded, names):
            _call(name, sharded.load_state_dict, tensors[name])
        for name, plain in self._select(self.plain, names):
            own_tensors = tensors.get(_TENSORS, {}).get(name, {})
            _call(name, plain.load_state_dict, merge_tensors(objects[FORMS][name], own_tensors))
        for name, per_rank in self._select(self.per_rank, names):
            _call(name, per_rank.restore, objects[_RANKS][name], *ranks)

    def restore_model(self, loaded: StateDict) -> None:
        """Set the modules under ``model`` to their loaded values, and nothing else."""
        # the required tensors have been checked before; the folder of an adapter has nothing of the base model
        load_into(loaded, self.modules[MODEL], strict=False)

    def _log_gradients(self) -> None:
        """Log once if gradients are alive: a resume in the middle of an accumulation begins it anew."""
        params = (param for each in self.optimizers for group in each.param_groups for param in group["params"])
        if any(param.grad is not None for param in params):
            self._has_said_gradients = True
            logger.info(
                "parameters have gradients at a save, and no checkpoint has these: between backward() and "
                "optimizer.step() they are lost to a resume; a save after the step needs none"
            )

    def _sort(self, name: Any, given: Any) -> None:
        if not isinstance(name, str) or not name or name in (FORMS, _RANKS, _TENSORS):
            raise CheckpointingException(f"{name!r} cannot be the name of a state: give other text, as {MODEL!r}")
        value: Any = None if isinstance(given, type) else given  # a class has the methods of its objects
        items: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        self._partitioning.extend(each for item in items for each in list_optimizers(item) if is_partitioning(each))
        items = [inner for item in items for inner in unpack_optimizers(item)]
        if callable(getattr(value, "sharded_state_dict", None)):
            self.sharded[name] = value
        elif isinstance(value, PerRank):
            self.per_rank[name] = value
        elif items and all(isinstance(item, torch.nn.Module) for item in items):
            self.modules[name] = items
        elif items and all(isinstance(item, torch.optim.Optimizer) for item in items):
            if name != OPTIMIZER:
                raise CheckpointingException(
                    f"the state {name!r} is an optimizer: give optimizers as {OPTIMIZER!r}, all in one list; where "
                    f"several models have one each, give these as one torch.nn.ModuleDict under {MODEL!r}"
                )
            self.optimizers = items
        elif isinstance(value, Stateful):
            self.plain[name] = value
        elif items and all(isinstance(item, Stateful) for item in items):
            self.plain[name] = ReplicatedStates(name, items)
        else:
            raise CheckpointingException(
                f"the state {name!r} is {show_given(given)}: {_advise_of_state(given)}{_TAKEN}"
            )

    def _describe_sharded(
        self,
        names: Collection[str],
        *,
        to_save: bool = False,
        model_prefix: str = MODEL_PREFIX,
        dequantize: bool = False,
    ) -> ShardedStateDict:
        describe = partial(self._describe_modules, to_save=to_save, dequantize=dequantize)
        found: ShardedStateDict = {}
        for name, parts in self._select(self.modules, names):
            if name != MODEL or not self._with_optimizers(names):
                prefix = model_prefix if name == MODEL else f"{name}."
                found[name] = describe(name, parts, prefix=prefix)
        if self._with_optimizers(names):
            for outer in self._partitioning:  # its step copies the options, as a scheduler sets them, to the inner one
                _call(OPTIMIZER, copy_options, outer, outer.optim)
            found |= describe(MODEL, self.modules[MODEL], *self.optimizers)
        for name, state in self._select(self.sharded, names):
            found[name] = _call(name, state.sharded_state_dict)
        return found

    def _describe_modules(
        self,
        name: str,
        parts: list[torch.nn.Module],
        *optimizers: torch.optim.Optimizer,
        prefix: str = "",
        to_save: bool,
        dequantize: bool,
    ) -> ShardedStateDict:
        if not to_save:
            return to_sharded_state_dict(parts, *optimizers, prefix=prefix, check_replicas=self._check_replicas)
        if name not in self._saved:
            self._saved[name] = SavedModules(check_replicas=self._check_replicas)
        return self._saved[name].describe(parts, *optimizers, prefix=prefix, dequantize=dequantize)

    def _with_optimizers(self, names: Collection[str]) -> bool:
        return OPTIMIZER in names and bool(self.optimizers)

    @staticmethod
    def _select(states: Mapping[str, Any], names: Collection[str]) -> list[tuple[str, Any]]:
        return [(name, state) for name, state in states.items() if name in names]


def name_state(error: BaseException) -> str:
    """Return the state whose code raised an error, for the text of :attr:`Comm.describe_origin`; "" without one."""
    name = getattr(error, _STATE_NAME, "")
    return f"in the state {name!r}" if name else ""


def _call(name: str, method: Callable[..., Any], *args: Any) -> Any:
    """Call a state's own code; :func:`name_state` knows its error: a KeyError does not say whose it is."""
    try:
        return method(*args)
    except CheckpointingException:
        raise
    except Exception as exc:
        setattr(exc, _STATE_NAME, name)
        raise
