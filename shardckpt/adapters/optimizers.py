"""State of optimizers by full parameter names: what there is to save, and what a checkpoint has for a load to ask for.

An optimizer's ``state_dict()`` has the state of each parameter, the options of each group, and whatever else the class
keeps: entries of its own, state under keys that are no parameters. All of it is stored. A load asks for what is stored,
whether or not the optimizer has it already; torch's ``get_optimizer_state_dict`` takes a step to find out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from shardckpt.adapters import fsdp1
from shardckpt.adapters.forms import (
    FORM,
    describe_nested,
    describe_with_form,
    find_axes,
    find_layout,
    flatten_state,
    is_self_describing,
    join_layout,
    join_path,
    list_tensors,
    make_form,
)
from shardckpt.adapters.leaves import describe_leaf, describe_object, describe_tree
from shardckpt.adapters.module_tree import name_parameters
from shardckpt.adapters.modules import data_address, merge_sources
from shardckpt.adapters.state_layout import empty_of_axes, empty_state_tensor
from shardckpt.adapters.wrappers import InnerShard, is_inner, request_inner
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.adapters.dtensor import AlikeTensors
    from shardckpt.adapters.forms import Layout
    from shardckpt.adapters.module_tree import StateColumns
    from shardckpt.mapping import Replicated, StoredNames

#: Entries of an optimizer's state dict.
STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
#: What an optimizer has beside the state and options of parameters, see :attr:`NamedState.others`.
ENTRIES, EMPTY = "entries", "empty groups"
#: What the names of stored groups begin with, as the names of parameters do not.
GROUP_NAME = "(group "
#: The same of several groups that are one object: of more than FEW_GROUPS, which cost more than what is in them.
GROUPS_NAME = "(groups "
FEW_GROUPS = 16
#: Classes of the values that are stored once for all groups that have them.
_PLAIN = frozenset((int, float, bool, str, type(None)))


class NamedState(NamedTuple):
    """The state of one optimizer by the full names of its parameters.

    Attributes:
        params: The parameters; none of FSDP1's.
        state: The state of each parameter; one without state (no step was made, or it had no gradient) is not there.
        groups: The groups, with names under ``params``.
        others: What belongs to no parameter: under ``entries`` what the state dict has beside state and groups, under
            ``state`` what has other keys than parameters, under ``empty groups`` their options by number. Without
            those that are empty.
        number: The position of the optimizer.
        is_flat: Whether torch alone knows how names and tensors belong together (FSDP1).
        has_groups: Whether the optimizer's own state dict has state and groups; wrappers have their own structure.
    """

    params: dict[str, torch.Tensor]
    state: dict[str, Any]
    groups: list[dict[str, Any]]
    others: dict[str, Any]
    number: int
    is_flat: bool = False
    has_groups: bool = True

    @property
    def digest(self) -> str:
        """A short text that optimizers of the same parameters, in their order, have in common."""
        return digest_names(self.names or [str(self.number)])

    @property
    def names(self) -> list[str]:
        """The names of the parameters, by their numbers."""
        return [name for group in self.groups for name in group[PARAMS]]


class OptimizerState(NamedTuple):
    """The state of all optimizers.

    Attributes:
        each: That of each optimizer.
        names: The names of all parameters.
        params: The parameters of all by name, but for those of FSDP1.
        states: The state of each parameter.
    """

    each: list[NamedState]
    names: list[str]
    params: dict[str, torch.Tensor]
    states: dict[str, Any]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for one in self.each for group in one.groups]


def get_optimizer_state(
    parts: Sequence[Module], optimizers: Sequence[Optimizer], columns: Iterable[StateColumns | None] = ()
) -> OptimizerState:
    """Return the state of all optimizers.

    Args:
        parts: The modules of this rank.
        optimizers: Their optimizers.
        columns: As for :func:`name_parts`.

    Raises:
        ShardingError: two optimizers have the same parameter, or one has those of several parts.
    """
    named = name_parts(parts, columns) if optimizers else []
    each = [read_optimizer(named, optimizer, number) for number, optimizer in enumerate(optimizers)]
    owners: dict[str, NamedState] = {}
    for one in each:
        for name in one.names:
            if owners.setdefault(name, one) is not one:
                raise ShardingError(
                    f"{name!r} is in optimizer {owners[name].number} and in optimizer {one.number}: leave it in one of "
                    "them, or give each part of the model names of its own"
                )
    return OptimizerState(
        each,
        list(owners),
        {name: param for one in each for name, param in one.params.items()},
        {name: state for one in each for name, state in one.state.items()},
    )


def get_param_groups(parts: Sequence[Module], optimizer: Optimizer, number: int) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, with the full names of the parameters under ``params``.

    Args:
        parts: The modules of this rank.
        optimizer: The optimizer; it does not change.
        number: Its position among the optimizers, for errors.

    Returns:
        Its groups, as torch's ``get_optimizer_state_dict`` gives them.

    Raises:
        ShardingError: no single module has all parameters of the optimizer.
    """
    return read_optimizer(name_parts(parts), optimizer, number).groups


class NamedPart(NamedTuple):
    """A module, and its parameters, which are looked for once for all optimizers.

    Attributes:
        module: The module.
        params: The ids of its parameters.
        names: Their names by id; None if torch must be asked.
    """

    module: Module
    params: AbstractSet[int]
    names: Mapping[int, str] | None


def name_parts(parts: Iterable[Module], columns: Iterable[StateColumns | None] = ()) -> list[NamedPart]:
    """Return the modules with their parameters as they are now.

    Args:
        parts: The modules.
        columns: What the tensors of each are listed as, if they are: then modules are not looked at again.
    """
    found = []
    for part, listed in zip_longest(parts, columns):
        names = name_parameters(part) if listed is None else listed.name_parameters()
        found.append(NamedPart(part, {*map(id, part.parameters())} if names is None else names.keys(), names))
    return found


def read_optimizer(parts: Sequence[NamedPart], optimizer: Optimizer, number: int) -> NamedState:
    """Return the state of one optimizer; arguments and errors are those of :func:`get_param_groups`."""
    owner = find_owner(parts, optimizer, number)
    if owner.names is None:
        found = fsdp1.get_state(owner.module, optimizer)
        return NamedState({}, _drop_empty(found[STATE]), found[GROUPS], {}, number, is_flat=True)
    return _name_state(optimizer, owner.names, number)


def _name_state(optimizer: Optimizer, names: Mapping[int, str], position: int) -> NamedState:
    """Return an optimizer's state dict with the names of parameters in place of their numbers."""
    with torch.no_grad():
        found = own_method(optimizer, "state_dict")()
    params = [param for group in optimizer.param_groups for param in group[PARAMS]]
    by_number = dict(enumerate(map(names.__getitem__, map(id, params))))
    # wrappers have their optimizer inside, and hooks may give other names to parameters
    has_groups = (
        isinstance(found.get(STATE), dict)
        and isinstance(found.get(GROUPS), list)
        and all(map(by_number.__contains__, chain.from_iterable(group[PARAMS] for group in found[GROUPS])))
    )
    if has_groups:
        state = {by_number[number]: values for number, values in found[STATE].items() if number in by_number}
        groups = [{**group, PARAMS: list(map(by_number.__getitem__, group[PARAMS]))} for group in found[GROUPS]]
        others = {
            ENTRIES: {name: value for name, value in found.items() if name not in (STATE, GROUPS)},
            STATE: {k: v for k, v in found[STATE].items() if k not in by_number}
            if len(state) < len(found[STATE])
            else {},
        }
    else:
        state, others = {}, {ENTRIES: dict(found)}
        groups = [{**group, PARAMS: [names[id(param)] for param in group[PARAMS]]} for group in optimizer.param_groups]
    others[EMPTY] = {number: list_options(group) for number, group in enumerate(groups) if not group[PARAMS]}
    named = dict(zip(by_number.values(), params, strict=True))
    return NamedState(named, _drop_empty(state), groups, _drop_empty(others), position, has_groups=has_groups)


def own_method(optimizer: Optimizer, name: str) -> Callable[..., Any]:
    """Return an optimizer's method, its class's where torch's state-dict functions have replaced it."""
    method: Callable[..., Any] = getattr(optimizer, name)
    is_replaced = name in vars(optimizer) and method.__module__ == get_optimizer_state_dict.__module__
    return getattr(type(optimizer), name).__get__(optimizer) if is_replaced else method


def list_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group; the names of its parameters are no option of each."""
    return {name: value for name, value in group.items() if name not in (PARAMS, PARAM_NAMES)}


def make_marker() -> Callable[[Any], str | None]:
    """Return a function of options: a text that equal plain values, and tuples of them, of equal types have in common.

    Others have None. All values must live as long as it is used, which looks at each but once.
    """
    marks: dict[int, str | None] = {}

    def mark(value: Any) -> str | None:
        if id(value) not in marks:
            items = value if type(value) is tuple else (value,)
            marks[id(value)] = repr(value) if _PLAIN.issuperset(map(type, items)) else None
        return marks[id(value)]

    return mark


def _drop_empty(states: dict[str, Any]) -> dict[str, Any]:
    return {name: state for name, state in states.items() if state}


def name_group(group: Mapping[str, Any]) -> str:
    """Return the name under which the options of a group are stored: no parameter has such a one."""
    return f"{GROUP_NAME}{digest_names(group[PARAMS])})"


def name_groups(names: Iterable[str]) -> str:
    """Return the name under which groups are stored as one object, by the name of each."""
    return f"{GROUPS_NAME}{digest_names(names)})"


def digest_names(names: Iterable[str]) -> str:
    """Return a short text that equal names in equal order have in common."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def describe_state(
    values: Any, key: str, replicated: Replicated, alike: AlikeTensors, layout: Layout | None
) -> dict[str, Any]:
    """Describe the state of a parameter below a key: tensors and other values one by one, or with its form.

    Args:
        values: The state.
        key: The key.
        replicated: As for :func:`describe_leaf`.
        alike: As there.
        layout: That of the parameter, if it is a DTensor.
    """
    if is_self_describing(values, layout):
        return describe_tree(values, key, replicated, objects=True, alike=alike)  # type: ignore[no-any-return]
    return describe_nested(values, key, replicated, alike, layout)


def describe_others(one: NamedState, key: str, replicated: Replicated, alike: AlikeTensors) -> dict[str, Any]:
    """Describe what an optimizer has beside the state of parameters: tensors, and the form.

    The key of a tensor that is sharded as a parameter names it: a load must know before it has read the form.
    """
    flat = flatten_state(one.others, shards=False)
    return describe_with_form(make_form(flat), _list_slots(flat, one.params), key, replicated, alike)


def _list_slots(flat: Any, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors by their dotted paths, followed by the parameter that each DTensor is sharded as."""
    return {
        join_layout(path, _find_same_layout(tensor, params)) if isinstance(tensor, DTensor) else path: tensor
        for path, tensor in list_tensors(flat).items()
    }


def _find_same_layout(tensor: DTensor, params: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a parameter of the same shape, mesh and placements; None if there is none."""
    layout = (tensor.shape, tensor.device_mesh, tensor.placements)
    dtensors = ((name, param) for name, param in params.items() if isinstance(param, DTensor))
    return next((n for n, param in dtensors if (param.shape, param.device_mesh, param.placements) == layout), None)


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


def make_flat_state(parts: Sequence[Module], optimizers: Sequence[Optimizer], live: OptimizerState) -> dict[str, Any]:
    """Return new state of the parameters of FSDP1 that have none, by name: memory for a load to fill."""
    flat = [one.number for one in live.each if one.is_flat]
    named = name_parts(parts) if flat else []
    found = (fsdp1.make_state(find_owner(named, optimizers[n], n).module, optimizers[n]) for n in flat)
    made = merge_sources("optimizer", map(_drop_empty, found)) if flat else {}
    return {name: state for name, state in made.items() if name not in live.states}


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
        tensors = _list_slots(flatten_state(one.others, shards=False), one.params)
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


def find_owner(parts: Sequence[NamedPart], optimizer: Optimizer, number: int) -> NamedPart:
    """Return the module that has all parameters of an optimizer; raise ShardingError if none has, or it has none."""
    if not hasattr(optimizer, GROUPS):
        raise ShardingError(
            f"optimizer {number}, a {type(optimizer).__name__}, has no param_groups that say which parameters it "
            "trains: pass the optimizer that it has inside, and save its own state_dict() beside it"
        )
    params = {id(param) for group in optimizer.param_groups for param in group[PARAMS]}
    for part in parts:
        if params <= part.params:
            return part
    holders = [str(index) for index, part in enumerate(parts) if params & part.params]
    where = f"spread over modules {', '.join(holders)}" if len(holders) > 1 else "not all in the model"
    raise ShardingError(
        f"the parameters of optimizer {number} are {where}: make one optimizer for each module, after the model was "
        "wrapped, and pass all of them"
    )
