"""The states of a training by name: described for a save, requested from a load, and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.manager.per_rank import PerRank, Stateful
from shardckpt.manager.plain_state import describe_form, describe_tensors, memory_of, merge_tensors, request_tensors
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import Replicated, ShardedStateDict, StateDict

#: These two are described together: the keys of optimizer state contain the names of the model's parameters.
MODEL = "model"
OPTIMIZER = "optimizer"

#: Keys of a checkpoint: the forms of plain states, the states of each rank, the tensors of plain states.
_FORMS = "forms"
_RANKS = "ranks"
_TENSORS = "tensors"


class Ranks(NamedTuple):
    """This rank, the number of ranks, and the number of ranks that saved the checkpoint."""

    rank: int
    world_size: int
    saved_world_size: int

    @classmethod
    def of(cls, comm: Comm, saved_world_size: int | None = None) -> Ranks:
        """Return the ranks of a Comm; without a saved world size, as if as many had saved."""
        return cls(comm.rank, comm.world_size, comm.world_size if saved_world_size is None else saved_world_size)


class TrainingStates:
    """The states by name, sorted by kind.

    Args:
        states: Modules (or lists of the stages that this rank has), optimizers (under the name ``optimizer``, one or a
            list, of the modules under ``model``), :class:`PerRank` states, objects with ``sharded_state_dict()`` and
            ``load_state_dict``, and objects with ``state_dict`` and ``load_state_dict`` that are the same on all ranks.
        check_replicas: Whether a save compares values that several ranks hold.
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
            self._sort(_check_name(name), value)
        if self._optimizers and MODEL not in self._modules:
            raise CheckpointingException(
                f"the state {OPTIMIZER!r} is an optimizer: it goes with modules under the name {MODEL!r}, by whose "
                "parameters its state is named"
            )
        self.names = tuple(states)

    def describe(self, names: Collection[str], comm: Comm) -> ShardedStateDict:
        """Describe the named states for a save.

        Args:
            names: The states to save.
            comm: The ranks that save.

        Returns:
            A sharded state dict. Modules, optimizers and sharded states stand under their names; plain and per-rank
            states under the keys ``forms``, ``tensors`` and ``ranks``, then by name.
        """
        ranks = Ranks.of(comm)
        plain = {name: state.state_dict() for name, state in self._select(self._plain, names)}
        per_rank = self._select(self._per_rank, names)
        return {
            **self._describe_modules(names),
            **{name: state.sharded_state_dict() for name, state in self._select(self._sharded, names)},
            _FORMS: {name: describe_form(name, state, self._replicated) for name, state in plain.items()},
            _TENSORS: {name: describe_tensors(name, state, self._replicated) for name, state in plain.items()},
            _RANKS: {name: state.describe(name, ranks.rank, ranks.world_size) for name, state in per_rank},
        }

    def request_objects(self, names: Collection[str], ranks: Ranks) -> ShardedStateDict:
        """Describe what is loaded first: the objects, which say what tensors there are."""
        forms = self._select(self._plain, names)
        return {
            _FORMS: {name: describe_form(name, None, "unchecked") for name, _ in forms},
            _RANKS: {name: state.request(name, *ranks) for name, state in self._select(self._per_rank, names)},
        }

    def request_tensors(self, names: Collection[str], objects: StateDict) -> ShardedStateDict:
        """Describe what is loaded second: the tensors, into the live ones where they fit.

        Args:
            names: The states to load.
            objects: What was loaded for :meth:`request_objects`.
        """
        forms = objects.get(_FORMS, {})
        described = {
            **self._describe_modules(names),
            **{name: state.sharded_state_dict() for name, state in self._select(self._sharded, names)},
        }
        # Storage that a module or optimizer is loaded into. A plain state (an EMA that shares the weights) must not be
        # loaded into it as well: the last one read would win.
        taken = {memory for leaf in nested_values(described) if (memory := memory_of(getattr(leaf, "data", None)))}
        return {
            **described,
            _TENSORS: {
                name: request_tensors(name, forms[name], state.state_dict(), taken)
                for name, state in self._select(self._plain, names)
            },
        }

    def restore(self, names: Collection[str], objects: StateDict, tensors: StateDict, ranks: Ranks) -> None:
        """Set the states to what was loaded.

        Args:
            names: The states to set.
            objects: What was loaded for :meth:`request_objects`.
            tensors: What was loaded for :meth:`request_tensors`.
            ranks: The ranks that were given to :meth:`request_objects`.
        """
        for name, parts in self._select(self._modules, names):
            if name != MODEL or not self._with_optimizers(names):
                load_into(tensors[name], parts)
        if self._with_optimizers(names):
            both = {MODEL: tensors[MODEL], OPTIMIZER: tensors[OPTIMIZER]}
            load_into(both, self._modules[MODEL], *self._optimizers)
        for name, sharded in self._select(self._sharded, names):
            sharded.load_state_dict(tensors[name])
        for name, plain in self._select(self._plain, names):
            own_tensors = tensors.get(_TENSORS, {}).get(name, {})
            plain.load_state_dict(merge_tensors(objects[_FORMS][name], own_tensors))
        for name, per_rank in self._select(self._per_rank, names):
            per_rank.restore(objects[_RANKS][name], *ranks)

    def restore_model(self, loaded: StateDict) -> None:
        """Set the modules under ``model`` to what was loaded for them, and nothing else."""
        load_into(loaded, self._modules[MODEL])

    @property
    def modules(self) -> Mapping[str, list[torch.nn.Module]]:
        """The modules by name."""
        return self._modules

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers of the model."""
        return self._optimizers

    @property
    def sharded(self) -> Mapping[str, Any]:
        """The states with ``sharded_state_dict()``, by name."""
        return self._sharded

    @property
    def plain(self) -> Mapping[str, Stateful]:
        """The states that are the same on all ranks, by name."""
        return self._plain

    @property
    def per_rank(self) -> Mapping[str, PerRank]:
        """The states that differ from rank to rank, by name."""
        return self._per_rank

    @property
    def has_modules(self) -> bool:
        """Whether the model consists of modules, so that its keys begin with ``model.``."""
        return MODEL in self._modules

    def _sort(self, name: str, value: Any) -> None:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        items = [inner for item in items for inner in _unpack_optimizers(item)]
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

    def _describe_modules(self, names: Collection[str]) -> ShardedStateDict:
        found: ShardedStateDict = {}
        for name, parts in self._select(self._modules, names):
            if name != MODEL or not self._with_optimizers(names):
                found[name] = to_sharded_state_dict(parts, prefix=f"{name}.", check_replicas=self._check_replicas)
        if self._with_optimizers(names):
            found |= to_sharded_state_dict(self._modules[MODEL], *self._optimizers, check_replicas=self._check_replicas)
        return found

    def _with_optimizers(self, names: Collection[str]) -> bool:
        return OPTIMIZER in names and bool(self._optimizers)

    @staticmethod
    def _select(states: Mapping[str, Any], names: Collection[str]) -> list[tuple[str, Any]]:
        return [(name, state) for name, state in states.items() if name in names]


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name or name in (_FORMS, _RANKS, _TENSORS):
        raise CheckpointingException(f"{name!r} cannot be the name of a state: give another one")
    return name


def _unpack_optimizers(value: Any) -> list[Any]:
    """Return the optimizers in a container (torchtitan's) or a wrapper (torchft's) that is itself an optimizer."""
    if not isinstance(value, torch.optim.Optimizer):
        return [value]
    inner = getattr(value, "optimizers", None) or getattr(value, "optim", None)
    if isinstance(inner, torch.optim.Optimizer):
        return _unpack_optimizers(inner)
    if isinstance(inner, (list, tuple)):
        return [each for item in inner for each in _unpack_optimizers(item)]
    return [value]


__all__ = ["MODEL", "OPTIMIZER", "Ranks", "TrainingStates"]
