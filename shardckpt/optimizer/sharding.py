"""Optimizer state described by the model's shards: each state tensor lies where its parameter lies."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shardckpt.errors import ShardingError
from shardckpt.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from shardckpt.state_dict import build_copy, extract_sharded_tensors_and_factories, nested_values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

logger = logging.getLogger(__name__)

#: A parameter's description.
ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory

KEEP_VARS_HINT = (
    "the model's sharded state dict must be made of the optimizer's own parameters, not of copies: "
    "model.state_dict(keep_vars=True)"
)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> dict[int, int]:
    """``{id(parameter): its number in the optimizer}``; of a DTensor, the local tensor's."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(param)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.Tensor]
) -> dict[int, ShardedParam]:
    """The model's description of every parameter, by the parameter's number in the optimizer.

    A parameter is found by identity, or by its memory: detached views of it will do.

    Args:
        model_sharded_state_dict: A nest with the shards of the model, made with ``keep_vars=True``.
        optim_params_iter: The optimizer's parameters, in its order.
    """
    params = list(optim_params_iter)
    numbers = get_optim_param_to_id_map(params)
    places = {place: number for number, param in enumerate(params) if (place := _place(_local(param)))}
    described, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    found: dict[int, ShardedParam] = {}
    for shard in nested_values(described):
        data = _local(shard.data)
        place = _place(data)
        number = numbers.get(id(data), places.get(place) if place else None)
        if number is not None:
            found[number] = shard
    if params and not found:
        logger.warning("no parameter of the optimizer is in the model's sharded state dict: %s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedParam, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor of the optimizer that has the shape of its parameter, under ``<prefix>.<the model's key>``.

    Raises:
        ShardingError: it has another shape.
    """
    data = _local(optim_param)
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        is_local = _local(model_param.data) is model_param.data  # else it takes what torch spreads, and gives it back
        return replace(model_param, key=key, data=data if is_local else optim_param)
    if tuple(data.shape) != model_param.data_shape:
        raise ShardingError(
            f"{key!r}: the optimizer's tensor has shape {tuple(data.shape)}, its parameter {model_param.data_shape}; "
            "leave such state out with exclude_keys, and describe it yourself"
        )
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: Collection[str] = (),
) -> None:
    """Describe the state in an optimizer's ``state_dict()``, in place.

    Every ``state[number][name]`` becomes a shard with the key ``optimizer.state.<name>.<the model's key>``: tensors
    of the parameter's shape as the parameter is sharded; anything else (a step count, None) once a parameter, as it
    may differ between ranks that hold different layers. Each group's ``params`` stay this rank's own.

    Args:
        optim_state_dict: Changed once everything in it is described; on an error it stays as it was.
        id_to_sharded_param_map: From :func:`get_param_id_to_sharded_param_map`.
        exclude_keys: Names of state to leave out, or one such name.

    Raises:
        ShardingError: state of a parameter that the model's sharded state dict lacks, or of another shape.
    """
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    sharded: dict[int, dict[str, Any]] = {}
    for number, values in optim_state_dict["state"].items():
        kept = {name: value for name, value in values.items() if name not in excluded}
        if kept and number not in id_to_sharded_param_map:
            raise ShardingError(
                f"parameter {number} of the optimizer has state and is not in the model's sharded state dict: "
                f"{KEEP_VARS_HINT}"
            )
        sharded[number] = {
            name: _described(id_to_sharded_param_map[number], value, f"optimizer.state.{name}")
            for name, value in kept.items()
        }
    groups = copy.deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["param_groups"] = groups
    optim_state_dict["state"] = sharded


def _described(param: ShardedParam, value: Any, prefix: str) -> Any:
    scalar = not (param.data_shape if isinstance(param, ShardedTensor) else param.data.shape)
    if isinstance(value, torch.Tensor) and (scalar or value.dim()):
        return make_sharded_optimizer_tensor(param, value, prefix)
    return _once(param, value, f"{prefix}.{param.key}")


def _once(param: ShardedParam, value: Any, key: str) -> ShardedTensor | ShardedObject:
    """A value that all shards of a parameter share: one for each place along its prepended axes (its layer).

    The shard with the parameter's first element holds the main replica.
    """
    first = _first_shard(param)
    layers = first.prepend_axis_num
    offset, shape = first.global_offset[:layers], first.global_shape[:layers]
    copies = first.replica_id if isinstance(first.replica_id, tuple) else (first.replica_id,)
    start = first.flattened_range.start if first.flattened_range is not None else 0
    empty = int(math.prod(first.data_shape) == 0)
    replica, shared = (*first.global_offset[layers:], start, empty, *copies), first.replicated
    if isinstance(value, torch.Tensor):
        return ShardedTensor(key, value, value.dtype, (), shape, offset, shape, replica, layers, replicated=shared)
    return ShardedObject(key, value, shape or (1,), offset or (0,), replica, replicated=shared)


def _first_shard(param: ShardedParam) -> ShardedTensor:
    """The description itself, or of those that a factory builds the one at the lowest offset."""
    shards = [leaf for leaf in nested_values({"built": build_copy(param)}) if isinstance(leaf, ShardedTensor)]
    if not shards:
        raise ShardingError(f"the factory {param.key!r} builds no ShardedTensor: leave its state out with exclude_keys")
    return min(shards, key=lambda shard: tuple(shard.global_offset))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor; any other tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # without autograd it is the same object every time
        return tensor.to_local()  # type: ignore[no-any-return]


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """What tensors over the same memory have in common; None where a tensor has no memory of its own."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type == "meta" or not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]
