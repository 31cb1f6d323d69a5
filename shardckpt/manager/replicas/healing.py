"""What a replica at work hands to one that joins: the states that all replicas have alike, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters import groups_of, load_into, model_state
from shardckpt.errors import CheckpointingException
from shardckpt.manager.plain_state import memory_of
from shardckpt.manager.states import MODEL, OPTIMIZER
from shardckpt.mapping import LocalNonpersistentObject, ShardedBase
from shardckpt.state_dict import dict_list_map_outplace
from shardckpt.tensors import is_sharded_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.manager.states import TrainingStates


class Part(NamedTuple):
    """This rank's part of a DTensor, on its way to the rank of the same number in another replica.

    (The DTensor itself would take its mesh with it, which is this replica's.)
    """

    local: torch.Tensor
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Healing:
    """Gives the live states to another replica, and takes another's.

    Nothing here is collective: torchft calls on each rank by itself, and :meth:`give` in a thread of its own while the
    model computes. So modules, which then may be unsharded, are looked at by :meth:`refresh`, between steps; everything
    else is as it is when it is given. Tensors are not copied: they change only when the step is committed, and by then
    the other replica has them.

    Args:
        states: The training's. What each rank has its own of stays each replica's own.
    """

    def __init__(self, states: TrainingStates) -> None:
        self._states = states
        #: Whether values of modules are made for each look at them (extra state), and do not change with the module.
        self.has_copies = False
        self.refresh()

    def refresh(self) -> None:
        """Look at the modules again; between steps.

        Raises:
            CheckpointingException: there is a ShardedTensor, which cannot be given.
        """
        self._modules = {name: model_state(parts) for name, parts in self._states.modules.items()}
        self._names = self._parameter_names()
        storages = {memory_of(tensor) for parts in self._states.modules.values() for tensor in _tensors(parts)}
        found = [value for values in self._modules.values() for value in values.values()]
        self.has_copies = not storages.issuperset(memory_of(value) or -1 for value in found)
        for name, values in self._modules.items():
            for key, value in values.items():
                if is_sharded_tensor(value):
                    raise CheckpointingException(
                        f"fault tolerance: {name}.{key} is a ShardedTensor (FSDP1), which cannot be handed to a "
                        "replica that joins; shard with fully_shard (FSDP2)"
                    )

    def give(self) -> dict[str, Any]:
        """The states, for :meth:`take` on the rank of the same number."""
        sharded = {name: state.sharded_state_dict() for name, state in self._states.sharded.items()}
        return {
            "modules": {name: _parts(values) for name, values in self._modules.items()},
            OPTIMIZER: self._optimizer_parts(),
            "sharded": {name: _parts(dict_list_map_outplace(_data, state)) for name, state in sharded.items()},
            "plain": {name: _parts(state.state_dict()) for name, state in self._states.plain.items()},
        }

    def take(self, given: dict[str, Any]) -> None:
        """Set the states to what another replica gave.

        Raises:
            CheckpointingException: its states are others, or lie otherwise on its ranks.
        """
        states = self._states
        self._check_names(given)
        loaded = {name: _put_together(given["modules"][name], live) for name, live in self._modules.items()}
        for name, parts in states.modules.items():
            if name == MODEL and states.optimizers:
                load_into({MODEL: loaded[MODEL], OPTIMIZER: self._taken(given[OPTIMIZER])}, parts, *states.optimizers)
            else:
                load_into(loaded[name], parts)
        for name, sharded in states.sharded.items():
            sharded.load_state_dict(_put_together(given["sharded"][name], sharded.sharded_state_dict()))
        for name, plain in states.plain.items():
            plain.load_state_dict(_put_together(given["plain"][name], plain.state_dict()))
        self.refresh()

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        found: dict[torch.Tensor, str] = {}
        for number, optimizer in enumerate(self._states.optimizers):
            groups = groups_of(self._states.modules[MODEL], optimizer, number)
            for group, named in zip(optimizer.param_groups, groups, strict=True):
                found.update(zip(group["params"], named["params"], strict=True))
        return found

    def _optimizer_parts(self) -> dict[str, Any]:
        """State and options by the parameters' names; of an optimizer that has made no step, no state."""
        parts: dict[str, Any] = {"state": {}, "param_groups": {}}
        for optimizer in self._states.optimizers:
            for group in optimizer.param_groups:
                options = {option: value for option, value in group.items() if option != "params"}
                for param in group["params"]:
                    name = self._names[param]
                    parts["param_groups"][name] = options
                    if param in optimizer.state:
                        parts["state"][name] = _parts(optimizer.state[param])
        return parts

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's part of what :func:`load_into` takes."""
        params = {name: param for param, name in self._names.items()}
        return {
            "state": {name: _put_together(state, params.get(name)) for name, state in given["state"].items()},
            "param_groups": {name: {"values": options} for name, options in given["param_groups"].items()},
        }

    def _check_names(self, given: dict[str, Any]) -> None:
        for kind, own in (
            ("modules", self._states.modules),
            ("sharded", self._states.sharded),
            ("plain", self._states.plain),
        ):
            if given[kind].keys() != own.keys():
                raise CheckpointingException(
                    f"the replica that this one takes its states from has {sorted(given[kind])}, this one has "
                    f"{sorted(own)}: run the same program on all replicas"
                )


def _parts(nest: Any) -> Any:
    """A nest as it can be sent: DTensors as the part that this rank has."""
    return dict_list_map_outplace(_part, nest)


def _part(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    if not isinstance(leaf, DTensor):
        return leaf
    return Part(leaf.to_local(), leaf.placements, tuple(leaf.shape), leaf.stride())


def _data(leaf: Any) -> Any:
    """What a leaf of a sharded state dict stands for; nothing for what stays where it is."""
    if isinstance(leaf, LocalNonpersistentObject):
        return None
    return leaf.data if isinstance(leaf, ShardedBase) else leaf


def _put_together(value: Any, live: Any) -> Any:
    """What :func:`_parts` was given by another replica, on the meshes of this one's live nest, or DTensor."""
    if isinstance(value, Part):
        return _dtensor(value, _data(live))
    if isinstance(value, dict):
        return {key: _put_together(each, _below(live, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_put_together(each, _below(live, place)) for place, each in enumerate(value)]
    return live.unwrap() if isinstance(live, LocalNonpersistentObject) else value


def _below(live: Any, key: Any) -> Any:
    """The live value under a key, if it has one; below a tensor, the tensor."""
    if isinstance(live, dict):
        return live.get(key)
    if isinstance(live, list):
        return live[key] if key < len(live) else None
    return live


def _dtensor(part: Part, live: Any) -> DTensor:
    if not isinstance(live, DTensor) or (
        part.shape == tuple(live.shape)
        and (tuple(part.placements), part.local.shape) != (live.placements, live.to_local().shape)
    ):
        here = f"{live.placements} of {tuple(live.shape)}" if isinstance(live, DTensor) else type(live).__name__
        raise CheckpointingException(
            f"the replica that this one takes its states from has a DTensor with {part.placements} of {part.shape}, "
            f"this one has {here}: give all replicas the same number of ranks and the same parallelism"
        )
    return DTensor.from_local(
        part.local,
        live.device_mesh,
        part.placements,
        run_check=False,
        shape=torch.Size(part.shape),
        stride=tuple(part.stride),
    )


def _tensors(parts: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    return [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]


__all__ = ["Healing", "Part"]
