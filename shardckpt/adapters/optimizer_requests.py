"""What a load asks a checkpoint for of optimizers: all that is stored, in live tensors where these fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.forms import (
    FORM,
    find_axes,
    find_layout,
    flatten_state,
    join_path,
)
from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.modules import data_address
from shardckpt.adapters.optimizers import (
    GROUP_NAME,
    GROUPS,
    GROUPS_NAME,
    PARAMS,
    STATE,
    list_slots,
    name_group,
)
from shardckpt.adapters.state_layout import empty_of_axes, empty_state_tensor
from shardckpt.adapters.wrappers import InnerShard, is_inner, request_inner
from shardckpt.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardckpt.adapters.optimizers import OptimizerState
    from shardckpt.mapping import StoredNames


def request_states(
    live: OptimizerState, described: Mapping[str, Any], stored: StoredNames, key: str, model: str
) -> dict[str, Any]:
    """Return what a load asks for: all that is stored of each parameter's state, in the live tensors where they fit.

    Args:
        live: The state of the optimizers now.
        described: What describes it; what the caller has changed there is heeded.
        stored: What the checkpoint has.
        key: What the keys of states begin with, without the last dot.
        model: What the keys of the parameters begin with.

    Returns:
        The descriptions by parameter. One of which nothing is stored has its live ones, or none.
    """
    # memory that several live tensors have is loaded into once
    taken = {data_address(param) for param in live.params.values()} - {0}
    found = {name: entry for name, entry in described.items() if name not in live.params}  # FSDP1's
    for name, slots in _find_slots(live.params, stored, key).items():
        entry = described.get(name, {})
        if slots and isinstance(entry, dict):
            param_key = next((each for each in (f"{model}{name}", name) if each in stored.tensors), None)
            param_shape = None if param_key is None else stored.tensors[param_key][1]
            saved = _SavedState(f"{key}.{name}", slots, live.params[name], param_shape, stored)
            found[name] = _request_state(saved, live.states.get(name, {}), described.get(name), taken)
        else:
            found[name] = entry
    return found


@dataclass(frozen=True)
class _SavedState:
    """What a checkpoint has of the state of a parameter.

    Attributes:
        key: What the keys begin with, without the last dot.
        slots: The rest of each key.
        param: The live parameter.
        param_shape: The shape of the parameter in the checkpoint, if it is there.
        stored: All that the checkpoint has.
    """

    key: str
    slots: list[str]
    param: torch.Tensor
    param_shape: tuple[int, ...] | None
    stored: StoredNames

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
        inner = request_inner(slot, self._list_shapes(), dtype, param) if is_inner(slot) else None
        if isinstance(inner, InnerShard):
            return inner.describe(key, "unchecked")
        axes = self._axes.get(slot)
        if inner is not None:
            tensor = inner
        elif isinstance(param, DTensor) and axes is not None:
            tensor = empty_of_axes(key, shape, dtype, param, axes)
        elif isinstance(param, DTensor) and not {*shape} <= {*param.shape, 1}:  # made by itself, not from the parameter
            tensor = torch.empty(shape, dtype=dtype, device=param.device)
        else:
            tensor = empty_state_tensor(key, shape, dtype, slot, param, param_shape=self.param_shape)
        return describe_leaf(tensor, key, "unchecked")

    def _list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the stored tensors."""
        keys = {slot: f"{self.key}.{slot}" for slot in self.slots}
        return {slot: self.stored.tensors[key][1] for slot, key in keys.items() if key in self.stored.tensors}


def _request_state(saved: _SavedState, state: Any, described: dict[str, Any] | None, taken: set[int]) -> Any:
    """Return what a load asks for of one parameter's state.

    Args:
        saved: What the checkpoint has of it.
        state: The live state.
        described: What describes it, if anything does: a leaf that fits is loaded as it is described, one that the
            caller has removed is not asked for.
        taken: The addresses of memory that is loaded into; those of leaves are added.
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
    return _restore_containers(_nest(kept), state)


def _fits(leaf: Any, stored: StoredNames, taken: set[int]) -> bool:
    """Return whether a leaf can be loaded as it is described; its memory counts as taken then."""
    if isinstance(leaf, ShardedTensor):
        form = (leaf.dtype, tuple(leaf.global_shape))
    elif isinstance(leaf, ShardedTensorFactory):
        form = (leaf.data.dtype, tuple(leaf.data.size()))
    else:
        return True
    address = 0 if leaf.data is None else data_address(leaf.data)
    if stored.tensors.get(leaf.key) != form or address in taken:
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
    """Return what a load asks for of the state of an optimizer's own state dict that has none yet: all that is stored.

    Args:
        groups: Its groups; what they have under ``params`` are the keys of the state.
        stored: What the checkpoint has.
        key: What the keys of the state begin with, without the last dot.
    """
    # by names of parameters: the optimizer itself was described; other values of plain DCP are common state elsewhere
    by_names = [f"{key.removesuffix(STATE)}{GROUPS}.{name}" for name in (GROUP_NAME, GROUPS_NAME)]
    if any(each.startswith((*by_names, f"{key}.")) for each in stored.objects):
        return {}
    names = {str(param): param for group in groups for param in group[PARAMS]}
    found: dict[Any, Any] = {}
    for name, slots in _find_slots(names, stored, key).items():
        keys = {tuple(slot.split(".")): f"{key}.{name}.{slot}" for slot in slots}
        leaves = {path: describe_leaf(_allocate(stored, own), own, "unchecked") for path, own in keys.items()}
        if leaves:
            found[names[name]] = _restore_containers(_nest(leaves), {})
    return found


def request_options(names: Iterable[str], stored: StoredNames, key: str) -> dict[str, Any]:
    """Return what a load asks for of the options: all groups that are stored, whose parameters only their objects name.

    Options that are tensors are stored by parameter, as stock ``dcp.load`` asks for them. Older checkpoints, and those
    of other libraries, have an object for each parameter, too.

    Args:
        names: The parameters.
        stored: What the checkpoint has.
        key: What the keys of options begin with, without the last dot.
    """
    rests = (each[len(key) + 1 :] for each in stored.objects if each.startswith(f"{key}."))
    groups = list(filter(is_group, rests))
    found: dict[str, Any] = {name: {"values": describe_object(None, f"{key}.{name}", "unchecked")} for name in groups}
    for name, options in _find_slots(dict.fromkeys(names), stored, key).items():
        keys = {option: f"{key}.{name}.{option}" for option in options}
        tensors = {
            option: describe_leaf(_allocate(stored, own), own, "unchecked")
            for option, own in keys.items()
            if own in stored.tensors
        }
        entry = {} if groups else {"values": describe_object(None, f"{key}.{name}", "unchecked")}
        if tensors or entry:
            found[name] = entry | ({"tensors": tensors} if tensors else {})
    return found


def spread_options(loaded: Mapping[str, Any], live: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter; those of a group are one dict, if no tensor is among them.

    Args:
        loaded: What was loaded for :func:`request_options`.
        live: The names of groups, by :func:`name_group`, that count where others have the same parameter.
    """
    found: dict[str, dict[str, Any]] = {}
    objects = [parts["values"] for name, parts in loaded.items() if is_group(name)]
    groups = [group for each in objects for group in (each if isinstance(each, list) else [each])]
    for group in sorted(groups, key=lambda group: name_group(group) in live):
        found.update(dict.fromkeys(group[PARAMS], group["options"]))
    for name, parts in loaded.items():
        if not is_group(name):
            found[name] = {**found.get(name, {}), **parts.get("values", {}), **parts.get("tensors", {})}
    return found


def is_group(name: str) -> bool:
    """Return whether this is the name of a stored group, or of several."""
    return name.startswith((GROUP_NAME, GROUPS_NAME))


def request_others(live: OptimizerState, described: Mapping[str, Any], stored: StoredNames, key: str) -> dict[str, Any]:
    """Return what a load asks for of what belongs to no parameter.

    Args:
        live: The state of the optimizers now.
        described: What describes it.
        stored: What the checkpoint has.
        key: What the keys begin with, without the last dot.
    """
    found: dict[str, Any] = {}
    each = {one.digest: one for one in live.each}
    for digest, slots in _find_slots(each, stored, key).items():
        if not slots:
            continue
        one = each[digest]
        tensors = list_slots(flatten_state(one.others, shards=False), one.params)
        keys = {slot: f"{key}.{digest}.{slot}" for slot in slots}
        found[digest] = {
            slot: describe_leaf(
                _allocate(stored, own, tensors.get(slot), one.params.get(find_layout(slot))), own, "unchecked"
            )
            if own in stored.tensors
            else describe_object(None, own, "unchecked")
            for slot, own in keys.items()
        }
    return {**{name: entry for name, entry in described.items() if name not in found}, **found}


def _allocate(stored: StoredNames, key: str, live: Any = None, param: torch.Tensor | None = None) -> torch.Tensor:
    """Return memory for a stored tensor of no parameter: laid out as a tensor of its shape, else whole on the CPU.

    Args:
        stored: What the checkpoint has.
        key: The tensor's key.
        live: The tensor that the optimizer has there now.
        param: The parameter that it was sharded as.
    """
    dtype, shape = stored.tensors[key]
    for like in (live, param):
        if isinstance(like, torch.Tensor) and tuple(like.shape) == shape:
            return torch.empty_like(like.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _find_slots(names: Mapping[str, Any], stored: StoredNames, key: str) -> dict[str, list[str]]:
    """Return the rest of each stored key below the key of each name."""
    found: dict[str, list[str]] = {name: [] for name in names}
    prefix = f"{key}."
    for each in (*stored.tensors, *stored.objects):
        if each.startswith(prefix):
            rest = each[len(prefix) :]
            name = find_name(rest, found)
            if name is not None and len(name) < len(rest):
                found[name].append(rest[len(name) + 1 :])
    return found


def find_name(key: str, names: Collection[str]) -> str | None:
    """Return the longest of some names with which a dotted key begins; None if none does."""
    while key not in names:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return key


def _nest(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return nested dicts for paths."""
    found: dict[Any, Any] = {}
    for (*parts, last), value in values.items():
        node = found
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return found


def _restore_containers(found: Any, live: Any, depth: int = 0) -> Any:
    """Return nested dicts with the keys and lists that the live state has: state that is stored without a form.

    Where it has none, numbers from 0 count a list, as they do in older checkpoints and those of DCP.
    """
    if not isinstance(found, dict):
        return found
    inside = live if isinstance(live, dict) else dict(enumerate(live)) if isinstance(live, list) else {}
    keys = {str(key): key for key in inside}
    restored = {
        keys.get(str(key), key): _restore_containers(value, inside.get(keys.get(str(key), key)), depth + 1)
        for key, value in found.items()
    }
    if depth == 0 or (isinstance(live, dict) and live):
        return restored
    by_text = {str(key): value for key, value in restored.items()}
    numbers = [*map(str, range(len(restored)))]
    return [by_text[number] for number in numbers] if by_text.keys() == {*numbers} else restored
