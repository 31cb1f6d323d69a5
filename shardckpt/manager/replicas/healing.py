"""Healing: a replica that is training transfers its states to one that joins, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import make_dtensor
from shardckpt.adapters.modules import get_model_tensors, read_versions
from shardckpt.adapters.optimizers import get_param_groups
from shardckpt.adapters.restore import load_into
from shardckpt.errors import CheckpointingException
from shardckpt.manager.plain_state import memory_of
from shardckpt.manager.states import MODEL, OPTIMIZER
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.unstored import LocalNonpersistentObject
from shardckpt.state_dict import dict_list_map_outplace
from shardckpt.tensors.torch_private import is_sharded_tensor
from shardckpt.validation.keys import VERSIONS

if TYPE_CHECKING:
    from shardckpt.manager.states import TrainingStates


class LocalShard(NamedTuple):
    """The local shard of a DTensor, sent to the same rank of another replica.

    The DTensor itself cannot be sent: its device mesh contains process groups of this replica.

    Attributes:
        shape: Of the DTensor, not of the local shard; so is ``stride``.
    """

    local: torch.Tensor
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Healing:
    """Gives the live states to another replica, or takes another's; :class:`PerRank` states are not transferred.

    No method is collective: torchft calls each rank by itself, and :meth:`give` in a thread while the model computes.
    At that moment FSDP may have unsharded the modules, so :meth:`refresh` collects their tensors between steps. Tensors
    are not copied: they change only when the step is committed, and the other replica has them by then.
    """

    def __init__(self, states: TrainingStates) -> None:
        self._states = states
        #: Whether a module returns copies (extra state), which do not change when the module does.
        self.has_copies = False
        self.refresh()

    def refresh(self) -> None:
        """Collect the tensors of the modules; to be called between steps.

        A module with a ShardedTensor is an error: it cannot be transferred.
        """
        self._modules = {name: get_model_tensors(parts) for name, parts in self._states.modules.items()}
        # now, not when they are given: to read them shards parameters, perhaps in the middle of a forward pass
        self._versions = {n: dict(enumerate(read_versions(parts))) for n, parts in self._states.modules.items()}
        self._names = self._name_parameters()
        parts = [part for parts in self._states.modules.values() for part in parts]
        storages = {memory_of(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
        found = [value for values in self._modules.values() for value in values.values()]
        self.has_copies = not storages.issuperset(memory_of(value) or -1 for value in found)
        for name, values in self._modules.items():
            for key, value in values.items():
                if is_sharded_tensor(value):
                    raise CheckpointingException(
                        f"fault tolerance: {name}.{key} is a ShardedTensor (FSDP1), which cannot be transferred to a "
                        "replica that joins; shard with fully_shard (FSDP2)"
                    )

    def give(self) -> dict[str, Any]:
        """Return the states of this rank, for :meth:`take` on the same rank of another replica."""
        sharded = {name: state.sharded_state_dict() for name, state in self._states.sharded.items()}
        return {
            "modules": {name: _localize(values) for name, values in self._modules.items()},
            VERSIONS: self._versions,
            OPTIMIZER: self._give_optimizer(),
            "sharded": {name: _localize(dict_list_map_outplace(_get_data, state)) for name, state in sharded.items()},
            "plain": {name: _localize(state.state_dict()) for name, state in self._states.plain.items()},
        }

    def take(self, given: dict[str, Any]) -> None:
        """Set the states to another replica's; other states, or states sharded in another way, are an error."""
        states = self._states
        for kind in ("modules", "sharded", "plain"):
            own = getattr(states, kind)
            if given[kind].keys() != own.keys():
                raise CheckpointingException(
                    f"the replica that sent its states has {sorted(given[kind])}, this one has {sorted(own)}: run the "
                    "same program on all replicas"
                )
        loaded = {
            name: {**_rebuild(given["modules"][name], live), VERSIONS: given[VERSIONS][name]}
            for name, live in self._modules.items()
        }
        for name, parts in states.modules.items():
            if name == MODEL and states.optimizers:
                both = {MODEL: loaded[MODEL], OPTIMIZER: self._rebuild_optimizer(given[OPTIMIZER])}
                load_into(both, parts, *states.optimizers)
            else:
                load_into(loaded[name], parts)
        for name, sharded in states.sharded.items():
            sharded.load_state_dict(_rebuild(given["sharded"][name], sharded.sharded_state_dict()))
        for name, plain in states.plain.items():
            plain.load_state_dict(_rebuild(given["plain"][name], plain.state_dict()))
        self.refresh()

    def _name_parameters(self) -> dict[torch.Tensor, str]:
        found: dict[torch.Tensor, str] = {}
        for number, optimizer in enumerate(self._states.optimizers):
            groups = get_param_groups(self._states.modules[MODEL], optimizer, number)
            for group, named in zip(optimizer.param_groups, groups, strict=True):
                found.update(zip(group["params"], named["params"], strict=True))
        return found

    def _give_optimizer(self) -> dict[str, Any]:
        """Return the optimizers' states and options by parameter name; no states before the first step."""
        given: dict[str, Any] = {"state": {}, "param_groups": {}}
        for optimizer in self._states.optimizers:
            for group in optimizer.param_groups:
                options = {option: value for option, value in group.items() if option != "params"}
                for param in group["params"]:
                    name = self._names[param]
                    given["param_groups"][name] = options
                    if param in optimizer.state:
                        given["state"][name] = _localize(optimizer.state[param])
        return given

    def _rebuild_optimizer(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizers' states and options as :func:`load_into` takes them."""
        params = {name: param for param, name in self._names.items()}
        return {
            "state": {name: _rebuild(state, params.get(name)) for name, state in given["state"].items()},
            "param_groups": {name: {"values": options} for name, options in given["param_groups"].items()},
        }


def _localize(state: Any) -> Any:
    """Replace the DTensors in nested dicts and lists by their local shards."""
    return dict_list_map_outplace(_localize_leaf, state)


def _localize_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    if not isinstance(leaf, DTensor):
        return leaf
    return LocalShard(leaf.to_local(), leaf.placements, tuple(leaf.shape), leaf.stride())


def _get_data(leaf: Any) -> Any:
    """Return the value of a leaf of a sharded state dict; None for an object that is not saved."""
    if isinstance(leaf, LocalNonpersistentObject):
        return None
    return leaf.data if isinstance(leaf, ShardedBase) else leaf


def _rebuild(value: Any, live: Any) -> Any:
    """Undo :func:`_localize`: shards from another replica become DTensors on the device meshes of the live state."""
    if isinstance(value, LocalShard):
        return _rebuild_dtensor(value, _get_data(live))
    if isinstance(value, dict):
        return {key: _rebuild(each, _get_child(live, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_rebuild(each, _get_child(live, index)) for index, each in enumerate(value)]
    return live.unwrap() if isinstance(live, LocalNonpersistentObject) else value


def _get_child(live: Any, key: Any) -> Any:
    """Return the live value under a key, or None; a tensor itself: an optimizer's state is sharded as its parameter."""
    if isinstance(live, dict):
        return live.get(key)
    if isinstance(live, list):
        return live[key] if key < len(live) else None
    return live


def _rebuild_dtensor(shard: LocalShard, live: Any) -> DTensor:
    # Optimizer state may have another shape than its parameter, which `live` then is.
    if not isinstance(live, DTensor) or (
        shard.shape == tuple(live.shape)
        and (tuple(shard.placements), shard.local.shape) != (live.placements, live.to_local().shape)
    ):
        here = f"{live.placements} of {tuple(live.shape)}" if isinstance(live, DTensor) else type(live).__name__
        raise CheckpointingException(
            f"the replica that sent its states has a DTensor with {shard.placements} of {shard.shape}, this one has "
            f"{here}: give all replicas the same number of ranks and the same parallelism"
        )
    return make_dtensor(shard.local, live.device_mesh, shard.placements, shard.shape, shard.stride)
