"""Requests of a load for optimizers: all that is stored, in live tensors where these fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shardckpt.adapters.forms import (
    FORM,
    find_axes,
    find_layout,
    flatten_state,
    join_path,
)
from shardckpt.adapters.group_options import GROUP_NAME, GROUPS, GROUPS_NAME, OTHERS, PARAMS, STATE, request_options
from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.modules import data_address
from shardckpt.adapters.optimizers import OptimizerState, list_slots
from shardckpt.adapters.state_layout import empty_of_axes, empty_state_tensor, resize_like
from shardckpt.adapters.stored_values import find_slots, nest, request_value, restore_containers
from shardckpt.adapters.wrappers import InnerShard, is_inner, request_inner
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

    from shardckpt.mapping.unstored import StoredNames


def request_optimizer(
    params: Mapping[str, torch.Tensor], stored: StoredNames, key: str, *, groups: int, shard_factored: bool
) -> dict[str, Any]:
    """Return the request of a load without an optimizer: all that is stored below its key, in new memory.

    It has the state by parameter, the options by parameter or by group, and by their paths the values that belong to no
    parameter. ``key`` is what the keys begin with, without the last dot. ``groups`` is how many groups are stored by
    number; 0 if options are stored by parameter. ``shard_factored`` is as for :func:`empty_state_tensor`.
    """
    rests = [each[len(key) + 1 :] for each in stored.list_below(key)]
    rests = [rest for rest in rests if rest.partition(".")[0] not in (STATE, GROUPS, OTHERS)]
    others = nest({tuple(rest.split(".")): request_value(stored, f"{key}.{rest}") for rest in rests})
    live = OptimizerState([], list(params), dict(params), {})
    state = request_states(live, {}, stored, f"{key}.{STATE}", "model.", shard_factored=shard_factored)
    if groups:
        slots = find_slots(dict.fromkeys(map(str, range(groups))), stored, f"{key}.{GROUPS}")
        options = [
            {slot: request_value(stored, f"{key}.{GROUPS}.{number}.{slot}") for slot in each}
            for number, each in slots.items()
        ]
        return {**others, STATE: state, GROUPS: options}
    by_name = request_options(params, stored, f"{key}.{GROUPS}")
    found = {  # unlike tensors, options may be in the common state
        name: {part: each for part, each in parts.items() if part != "values" or each.key in stored.objects}
        for name, parts in by_name.items()
    }
    return {**others, STATE: state, GROUPS: found}


def request_states(
    live: OptimizerState,
    described: Mapping[str, Any],
    stored: StoredNames,
    key: str,
    model: str,
    *,
    shard_factored: bool = False,
) -> dict[str, Any]:
    """Return the request of a load: all that is stored of each parameter's state, in the live tensors where they fit.

    A parameter without stored state has its live descriptions, or none. The caller's changes of ``described`` count.
    ``key`` is the prefix of the states' keys, without the last dot. ``shard_factored`` is as for
    :func:`empty_state_tensor`.
    """
    # memory that several live tensors have is loaded into once
    taken = {data_address(param) for param in live.params.values()} - {0}
    found = {name: entry for name, entry in described.items() if name not in live.params}  # FSDP1's
    for name, slots in find_slots(live.params, stored, key, in_common=True).items():
        entry = described.get(name, {})
        if slots and isinstance(entry, dict):
            param_key = next((each for each in (f"{model}{name}", name) if each in stored.tensors), None)
            param_shape = None if param_key is None else stored.tensors[param_key][1]
            saved = _SavedState(f"{key}.{name}", slots, live.params[name], param_shape, stored, shard_factored)
            found[name] = _request_state(saved, live.states.get(name, {}), described.get(name), taken)
        else:
            found[name] = entry
    return found


@dataclass(frozen=True)
class _SavedState:
    """The stored state of a parameter.

    Attributes:
        key: What the keys begin with, without the last dot.
        slots: The rest of each key.
        param: The live parameter.
        param_shape: The shape of the parameter in the checkpoint, if it is there.
        stored: All that the checkpoint has.
        shard_factored: As for :func:`empty_state_tensor`.
    """

    key: str
    slots: list[str]
    param: torch.Tensor
    param_shape: tuple[int, ...] | None
    stored: StoredNames
    shard_factored: bool

    @cached_property
    def _axes(self) -> dict[str, list[int]]:
        return find_axes(self.slots)

    def describe(self, slot: str) -> Any:
        """Describe a stored value, to be loaded into new memory."""
        key = f"{self.key}.{slot}"
        if key not in self.stored.tensors:
            return describe_object(None, key, "unchecked")
        dtype, shape = self.stored.tensors[key]
        param = self.param
        if key in self.stored.resized and self.param_shape is not None:
            shape = resize_like(key, shape, self.param_shape, tuple(param.size()))
        inner = request_inner(slot, self._list_shapes(), dtype, param) if is_inner(slot) else None
        if isinstance(inner, InnerShard):
            return inner.describe(key, "unchecked")
        axes = self._axes.get(slot)
        if inner is not None:
            tensor = inner
        elif isinstance(param, DTensor) and axes is not None:
            tensor = empty_of_axes(key, shape, dtype, param, axes)
        else:
            tensor = empty_state_tensor(
                key, shape, dtype, slot, param, shard_factored=self.shard_factored, param_shape=self.param_shape
            )
        return describe_leaf(tensor, key, "unchecked")

    def _list_shapes(self) -> dict[str, tuple[int, ...]]:
        keys = {slot: f"{self.key}.{slot}" for slot in self.slots}
        return {slot: self.stored.tensors[key][1] for slot, key in keys.items() if key in self.stored.tensors}


def _request_state(saved: _SavedState, state: Any, described: dict[str, Any] | None, taken: set[int]) -> Any:
    """Return the request of a load for one parameter's state.

    A leaf of ``described`` that fits is loaded as it is described; one that the caller has removed is not asked for.
    ``taken`` has the addresses of memory that is loaded into; those of leaves are added.
    """
    if FORM in saved.slots:
        return {slot: saved.describe(slot) for slot in saved.slots}
    has_paths = described is not None and FORM not in described
    kept: dict[tuple[Any, ...], Any] = {}
    used: set[str] = set()
    for path, leaf in nested_items(described) if has_paths else ():
        slot = getattr(leaf, "key", f"{saved.key}.{join_path(path)}").removeprefix(f"{saved.key}.")
        used.add(slot)
        if slot in saved.slots:
            kept[path] = leaf if _fits(leaf, saved.stored, taken) else saved.describe(slot)
        elif not isinstance(leaf, ShardedBase):
            kept[path] = leaf
    removed = {join_path(path) for path, _ in nested_items(state)} - used if has_paths else set()
    for slot in saved.slots:
        if slot not in used and slot not in removed:
            kept[tuple(slot.split("."))] = saved.describe(slot)
    return restore_containers(nest(kept), state)


def _fits(leaf: Any, stored: StoredNames, taken: set[int]) -> bool:
    """Return whether a leaf can be loaded as it is described; its memory counts as taken then."""
    if isinstance(leaf, ShardedTensor):
        form = (leaf.dtype, tuple(leaf.global_shape))
    elif isinstance(leaf, ShardedTensorFactory):
        form = (leaf.data.dtype, tuple(leaf.data.size()))
    else:
        return True
    address = 0 if leaf.data is None else data_address(leaf.data)
    found = stored.tensors.get(leaf.key)
    is_resized = found is not None and leaf.key in stored.resized and found[0] == form[0]
    if (found != form and not is_resized) or address in taken:
        return False
    taken.update({address} - {0})
    return True


def find_fresh(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Yield the path and the groups of each optimizer's state dict, among nested values, that has no state yet."""
    if isinstance(values, dict):
        state, groups = values.get(STATE), values.get(GROUPS)
        is_fresh = isinstance(state, dict) and not state and isinstance(groups, list)
        if is_fresh and all(isinstance(group, dict) and PARAMS in group for group in groups or ()):
            yield path, groups or []
    children = values.items() if isinstance(values, dict) else enumerate(values)
    for key, each in children:
        if isinstance(each, (dict, list)):
            yield from find_fresh(each, (*path, key))


def request_numbered(groups: Iterable[Mapping[str, Any]], stored: StoredNames, key: str) -> dict[Any, Any]:
    """Return the request of a load for an optimizer's own state dict that has no state yet: all that is stored.

    The values of the groups under ``params`` are the keys of the state; ``key`` is the prefix of its stored keys,
    without the last dot.
    """
    # by names of parameters: the optimizer itself was described; other values of plain DCP are common state elsewhere
    by_names = [f"{key.removesuffix(STATE)}{GROUPS}.{name}" for name in (GROUP_NAME, GROUPS_NAME)]
    if any(each.startswith((*by_names, f"{key}.")) for each in stored.objects):
        return {}
    names = {str(param): param for group in groups for param in group[PARAMS]}
    found: dict[Any, Any] = {}
    for name, slots in find_slots(names, stored, key).items():
        keys = {tuple(slot.split(".")): f"{key}.{name}.{slot}" for slot in slots}
        leaves = {path: request_value(stored, own) for path, own in keys.items()}
        if leaves:
            found[names[name]] = restore_containers(nest(leaves), {})
    return found


def request_others(live: OptimizerState, described: Mapping[str, Any], stored: StoredNames, key: str) -> dict[str, Any]:
    """Return the request of a load for values that belong to no parameter.

    ``key`` is what the keys begin with, without the last dot.
    """
    found: dict[str, Any] = {}
    optimizers = {optimizer.digest: optimizer for optimizer in live.each}
    for digest, slots in find_slots(optimizers, stored, key).items():
        if not slots:
            continue
        optimizer = optimizers[digest]
        tensors = list_slots(flatten_state(optimizer.others, shards=False), optimizer.params)
        keys = {slot: f"{key}.{digest}.{slot}" for slot in slots}
        found[digest] = {
            slot: request_value(stored, own, tensors.get(slot), optimizer.params.get(find_layout(slot)))
            for slot, own in keys.items()
        }
    return {**{name: entry for name, entry in described.items() if name not in found}, **found}
