"""What a training loop wants saved, by name: described for a save, wanted from a load, and handed back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.manager.per_rank import PerRank, Stateful
from shardckpt.manager.plain_state import describe_form, describe_tensors, memory_of, put_together, wanted_tensors
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import Replicated, ShardedStateDict, StateDict

#: The states that are described together: optimizer state goes by the names of the model's parameters.
MODEL = "model"
OPTIMIZER = "optimizer"

#: Where a checkpoint has the forms of plain states and the states of ranks, beside the tensors.
_FORMS = "forms"
_RANKS = "ranks"
_TENSORS = "tensors"


class Ranks(NamedTuple):
    """Who saves or loads, and how many saved what is loaded."""

    rank: int
    world_size: int
    saved: int

    @classmethod
    def of(cls, comm: Comm, saved: int | None = None) -> Ranks:
        """The ranks of a Comm."""
        return cls(comm.rank, comm.world_size, comm.world_size if saved is None else saved)


class TrainingStates:
    """The states by name, sorted by kind.

    Args:
        states: Modules (or lists of the stages that this rank has), optimizers (under the name ``optimizer``, one or a
            list, of the modules under ``model``), :class:`PerRank` states, what has ``sharded_state_dict()`` and
            ``load_state_dict``, and anything with ``state_dict`` and ``load_state_dict`` that all ranks have alike.
        check_replicas: Whether what ranks hold twice is compared when it is saved.
    """

    def __init__(self, states: Mapping[str, Any], *, check_replicas: bool = True) -> None:
        self._replicated: Replicated = True if check_replicas else "unchecked"
        self._check_replicas = check_replicas
        self._modules: dict[str, list[torch.nn.Module]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._sharded: dict[str, Any] = {}
        self._per_rank: dict[str, PerRank] = {}
        self._plain: dict[str, Stateful] = {}
        for name, value in states.items():
            self._sort(_checked_name(name), value)
        if self._optimizers and MODEL not in self._modules:
            raise CheckpointingException(
                f"the state {OPTIMIZER!r} is an optimizer: it goes with modules under the name {MODEL!r}, by whose "
                "parameters its state is named"
            )
        self.names = tuple(states)

    def describe(self, names: Collection[str], comm: Comm) -> ShardedStateDict:
        """The named states, to be saved."""
        ranks = Ranks.of(comm)
        plain = {name: state.state_dict() for name, state in self._chosen(self._plain, names)}
        per_rank = self._chosen(self._per_rank, names)
        return {
            **self._described_modules(names),
            **{name: state.sharded_state_dict() for name, state in self._chosen(self._sharded, names)},
            _FORMS: {name: describe_form(name, state, self._replicated) for name, state in plain.items()},
            _TENSORS: {name: describe_tensors(name, state, self._replicated) for name, state in plain.items()},
            _RANKS: {name: state.describe(name, ranks.rank, ranks.world_size) for name, state in per_rank},
        }

    def wanted_objects(self, names: Collection[str], ranks: Ranks) -> ShardedStateDict:
        """What is loaded first: objects, which say what tensors there are."""
        forms = self._chosen(self._plain, names)
        return {
            _FORMS: {name: describe_form(name, None, "unchecked") for name, _ in forms},
            _RANKS: {name: state.wanted(name, *ranks) for name, state in self._chosen(self._per_rank, names)},
        }

    def wanted_tensors(self, names: Collection[str], objects: StateDict) -> ShardedStateDict:
        """What is loaded then, given what was for :meth:`wanted_objects`: into the live tensors where it fits."""
        forms = objects.get(_FORMS, {})
        described = {
            **self._described_modules(names),
            **{name: state.sharded_state_dict() for name, state in self._chosen(self._sharded, names)},
        }
        taken = {memory for leaf in nested_values(described) if (memory := memory_of(getattr(leaf, "data", None)))}
        return {
            **described,
            _TENSORS: {
                name: wanted_tensors(name, forms[name], state.state_dict(), taken)
                for name, state in self._chosen(self._plain, names)
            },
        }

    def restore(self, names: Collection[str], objects: StateDict, tensors: StateDict, ranks: Ranks) -> None:
        """Hand over what was loaded."""
        for name, parts in self._chosen(self._modules, names):
            if name != MODEL or not self._with_optimizers(names):
                load_into(tensors[name], parts)
        if self._with_optimizers(names):
            both = {MODEL: tensors[MODEL], OPTIMIZER: tensors[OPTIMIZER]}
            load_into(both, self._modules[MODEL], *self._optimizers)
        for name, sharded in self._chosen(self._sharded, names):
            sharded.load_state_dict(tensors[name])
        for name, plain in self._chosen(self._plain, names):
            found = tensors.get(_TENSORS, {}).get(name, {})
            plain.load_state_dict(put_together(objects[_FORMS][name], found))
        for name, per_rank in self._chosen(self._per_rank, names):
            per_rank.restore(objects[_RANKS][name], *ranks)

    def restore_model(self, loaded: StateDict) -> None:
        """Hand over what was loaded for the modules that :meth:`describe` described as ``model``, and nothing else."""
        load_into(loaded, self._modules[MODEL])

    @property
    def modules(self) -> Mapping[str, list[torch.nn.Module]]:
        """The modules by name."""
        return self._modules

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those of the model."""
        return self._optimizers

    @property
    def sharded(self) -> Mapping[str, Any]:
        """The states that describe themselves, by name."""
        return self._sharded

    @property
    def plain(self) -> Mapping[str, Stateful]:
        """The states that all ranks have alike, by name."""
        return self._plain

    @property
    def per_rank(self) -> Mapping[str, PerRank]:
        """The states that each rank has its own of, by name."""
        return self._per_rank

    @property
    def has_modules(self) -> bool:
        """Whether the model is one of modules, so that its keys begin with ``model.``."""
        return MODEL in self._modules

    def _sort(self, name: str, value: Any) -> None:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        items = [inner for item in items for inner in _unpacked(item)]
        if callable(getattr(value, "sharded_state_dict", None)):
            self._sharded[name] = value
        elif isinstance(value, PerRank):
            self._per_rank[name] = value
        elif items and all(isinstance(item, torch.nn.Module) for item in items):
            self._modules[name] = items
        elif items and all(isinstance(item, torch.optim.Optimizer) for item in items):
            if name != OPTIMIZER:
                raise CheckpointingException(
                    f"the state {name!r} is an optimizer: give optimizers as {OPTIMIZER!r}, all in one list; where "
                    f"several models have one each, give these as one torch.nn.ModuleDict under {MODEL!r}"
                )
            self._optimizers = items
        elif isinstance(value, Stateful):
            self._plain[name] = value
        else:
            raise CheckpointingException(
                f"the state {name!r} is of type {type(value).__name__}: expected modules, optimizers, or something "
                "with state_dict and load_state_dict"
            )

    def _described_modules(self, names: Collection[str]) -> ShardedStateDict:
        found: ShardedStateDict = {}
        for name, parts in self._chosen(self._modules, names):
            if name != MODEL or not self._with_optimizers(names):
                found[name] = to_sharded_state_dict(parts, prefix=f"{name}.", check_replicas=self._check_replicas)
        if self._with_optimizers(names):
            found |= to_sharded_state_dict(self._modules[MODEL], *self._optimizers, check_replicas=self._check_replicas)
        return found

    def _with_optimizers(self, names: Collection[str]) -> bool:
        return OPTIMIZER in names and bool(self._optimizers)

    @staticmethod
    def _chosen(states: Mapping[str, Any], names: Collection[str]) -> list[tuple[str, Any]]:
        return [(name, state) for name, state in states.items() if name in names]


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name or name in (_FORMS, _RANKS, _TENSORS):
        raise CheckpointingException(f"{name!r} cannot be the name of a state: give another one")
    return name


def _unpacked(value: Any) -> list[Any]:
    """The optimizers of a container that is one itself, as torchtitan's, or in a wrapper, as torchft's; else itself."""
    if not isinstance(value, torch.optim.Optimizer):
        return [value]
    inner = getattr(value, "optimizers", None) or getattr(value, "optim", None)
    if isinstance(inner, torch.optim.Optimizer):
        return _unpacked(inner)
    return [each for item in inner for each in _unpacked(item)] if isinstance(inner, (list, tuple)) else [value]


__all__ = ["MODEL", "OPTIMIZER", "Ranks", "TrainingStates"]
