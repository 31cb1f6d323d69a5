"""Describe optimizer state by the model's shards: each state tensor is sharded as its parameter is."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shardckpt.adapters.dtensor import to_local
from shardckpt.errors import ShardingError, name_known
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject
from shardckpt.state_dict import build_copy, extract_sharded_tensors_and_factories, nested_values
from shardckpt.tensors.memory import view_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardckpt.mapping.base import ShardedStateDict, StateDict

logger = logging.getLogger(__name__)

#: A parameter's description.
ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory

KEEP_VARS_HINT = (
    "the model's sharded state dict must be made of the optimizer's own parameters, not of copies: "
    "model.state_dict(keep_vars=True)"
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map parameters to their numbers in the optimizer.

    Args:
        optim_params_iter: The optimizer's parameters, in its order.

    Returns:
        ``{id(parameter): number}``; for a DTensor, the id of its local tensor.
    """
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        # the optimizer numbers a parameter where it first meets it
        numbers.setdefault(id(to_local(param)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, ShardedParam]:
    """Map the number of each parameter in the optimizer to the parameter's shard in the model's state dict.

    A parameter is found by identity or by its memory, so detached views of it are found too.

    Args:
        model_sharded_state_dict: Nested dicts and lists with the model's shards, made with ``keep_vars=True``.
        optim_params_iter: The optimizer's parameters, in its order.

    Returns:
        ``{number: ShardedTensor or factory}``; parameters that the model's state dict lacks are absent. If it lacks
        all of them, a warning is logged.
    """
    params = list(optim_params_iter)
    numbers = get_optim_param_to_id_map(params)
    # state_dict() without keep_vars gives detached views, which are other objects of the same memory
    by_memory = {memory: numbers[id(local)] for local in map(to_local, params) if (memory := view_key(local))}
    described, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    found: dict[int, ShardedParam] = {}
    for shard in nested_values(described):
        data = to_local(shard.data)
        memory = view_key(data)
        number = numbers.get(id(data), by_memory.get(memory) if memory else None)
        if number is not None:
            found[number] = shard
    if params and not found:
        logger.warning("no parameter of the optimizer is in the model's sharded state dict: %s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedParam, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor of the optimizer that has the shape of its parameter.

    Args:
        model_param: The parameter's shard or factory.
        optim_param: The optimizer's tensor, of the parameter's local shape.
        prefix: The key becomes ``<prefix>.<the parameter's key>``.

    Returns:
        The parameter's description with this key, data and dtype, without its block scales.

    Raises:
        ShardingError: the tensor has another shape than the parameter.
    """
    data = to_local(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        # a factory of a DTensor builds from the DTensor, and a load returns the DTensor
        is_local = to_local(model_param.data) is model_param.data
        return replace(model_param, key=key, data=data if is_local else optim_param)
    if tuple(data.shape) != model_param.data_shape:
        raise ShardingError(
            f"{key!r}: the optimizer's tensor has shape {tuple(data.shape)}, its parameter {model_param.data_shape}; "
            "pass its name in exclude_keys, and describe it yourself"
        )
    # the parameter's block scales are not those of the optimizer's tensor
    return replace(model_param, key=key, data=data, dtype=data.dtype, block_scales=None)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: Collection[str] = (),
) -> None:
    """Replace the state in an optimizer's ``state_dict()`` by its description, in place.

    Every ``state[number][name]`` becomes a shard with the key ``optimizer.state.<name>.<the parameter's key>``.
    Tensors of the parameter's shape are sharded as the parameter is. Any other value (a step count, None) is stored
    once for each parameter, because it may differ between parameters. Each group's ``params`` are not stored: they are
    this rank's numbers.

    Args:
        optim_state_dict: The state dict; on an error it does not change.
        id_to_sharded_param_map: From :func:`get_param_id_to_sharded_param_map`.
        exclude_keys: Names of state to leave out, or one such name. One that no state has is named by a warning, but
            for ``step``, which Megatron's trainers pass for any optimizer.

    Raises:
        ShardingError: a parameter with state is not in the map, its state has another shape, or this is no state dict
            of an optimizer.
    """
    if missing := sorted({"state", "param_groups"} - optim_state_dict.keys()):
        raise ShardingError(f"the optimizer's state dict lacks {', '.join(missing)}: pass optimizer.state_dict()")
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    known = frozenset(str(name) for values in optim_state_dict["state"].values() for name in values)
    for name in sorted(map(str, excluded - known - {"step"})) if known else ():  # before the first step there is none
        _warn_of_unused(name, known)
    sharded: dict[int, dict[str, Any]] = {}
    for number, values in optim_state_dict["state"].items():
        kept = {name: value for name, value in values.items() if name not in excluded}
        if kept and number not in id_to_sharded_param_map:
            raise ShardingError(
                f"parameter {number} of the optimizer has state and is not in the model's sharded state dict: "
                f"{KEEP_VARS_HINT}"
            )
        sharded[number] = {
            name: _describe_value(id_to_sharded_param_map[number], value, f"optimizer.state.{name}")
            for name, value in kept.items()
        }
    groups = copy.deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    # only now: on an error above, the caller's dict has not changed
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = sharded


@lru_cache(maxsize=16)
def _warn_of_unused(name: str, known: frozenset[str]) -> None:
    """Warn of a name that leaves out nothing: once, not at each save."""
    logger.warning("exclude_keys: no state has the name %r %s", name, name_known(name, known, "state"))


def _describe_value(param: ShardedParam, value: Any, prefix: str) -> Any:
    # a tensor without axes is a step count, unless the parameter has no axes either
    scalar = not (param.data_shape if isinstance(param, ShardedTensor) else param.data.shape)
    if isinstance(value, torch.Tensor) and (scalar or value.dim()):
        return make_sharded_optimizer_tensor(param, value, prefix)
    return _describe_shared_value(param, value, f"{prefix}.{param.key}")


def _describe_shared_value(param: ShardedParam, value: Any, key: str) -> ShardedTensor | ShardedObject:
    """Describe a value that all shards of a parameter share: one for each index of its prepended axes (its layer).

    The shard with the parameter's first element is the main replica.
    """
    shards = [leaf for leaf in nested_values({"built": build_copy(param)}) if isinstance(leaf, ShardedTensor)]
    if not shards:
        raise ShardingError(f"the factory {param.key!r} builds no ShardedTensor: name its state in exclude_keys")
    first = min(shards, key=lambda shard: tuple(shard.global_offset))
    layers = first.prepend_axis_num
    offset, shape = first.global_offset[:layers], first.global_shape[:layers]
    copies = first.replica_id if isinstance(first.replica_id, tuple) else (first.replica_id,)
    start = first.flattened_range.start if first.flattened_range is not None else 0
    empty = int(math.prod(first.data_shape) == 0)
    # all zeros, which means the main replica, only for a shard that has the parameter's first element
    replica, shared = (*first.global_offset[layers:], start, empty, *copies), first.replicated
    if isinstance(value, torch.Tensor):
        return ShardedTensor(key, value, value.dtype, (), shape, offset, shape, replica, layers, replicated=shared)
    return ShardedObject(key, value, shape or (1,), offset or (0,), replica, replicated=shared)
