"""Describe state dicts, modules and optimizers for a save or a load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from itertools import chain
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters import modules
from shardckpt.adapters.dtensor import AlikeTensors
from shardckpt.adapters.forms import get_layout
from shardckpt.adapters.leaf_shards import LeafShards
from shardckpt.adapters.leaves import describe_leaf, describe_object, describe_plain_object, describe_tree
from shardckpt.adapters.module_tree import list_state_columns
from shardckpt.adapters.optimizers import (
    PARAMS,
    STATE,
    describe_others,
    describe_state,
    digest_names,
    find_fresh,
    get_optimizer_state,
    list_options,
    make_flat_state,
    name_group,
    request_numbered,
    request_options,
    request_others,
    request_states,
)
from shardckpt.adapters.own_values import find_own_values, request_own_values
from shardckpt.adapters.saved_states import SavedStates
from shardckpt.adapters.wrapper_params import (
    describe_wrapper_param,
    find_wrapper_params,
    request_wrapper_params,
)
from shardckpt.errors import KeyMismatchError, ShardingError
from shardckpt.mapping import OptionalEntries, ShardedBase
from shardckpt.state_dict import nested_items, nested_values
from shardckpt.tensors import ORDINARY, is_sharded_tensor
from shardckpt.validation import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.mapping import PlainObject, Replicated, ShardedStateDict, StoredNames

#: Groups of which each has objects of its own; of more, those with equal values are one object.
_FEW_GROUPS = 16
_PLAIN = frozenset((int, float, bool, str, type(None)))
#: Classes of the values that optimizers of torch have.
_TENSORS = frozenset((torch.Tensor, DTensor))


def to_sharded_state_dict(
    model_or_dict: Module | Sequence[Module] | Mapping[Any, Any],
    *optimizers: Optimizer,
    prefix: str = "",
    check_replicas: bool = True,
    dequantize: bool = False,
) -> ShardedStateDict:
    """Describe a state dict, or a model and its optimizers, so that they can be saved, or loaded in place.

    A DTensor, or torch's ShardedTensor, becomes its shards of the global tensor: a load fills them in place and returns
    the tensor itself. Any other tensor counts as replicated on all ranks that have it; the lowest of these writes it.

    A state dict keeps its structure, and the key of a leaf is its path, joined by dots. Leaves that are not tensors
    stay: they are common state, or shards that are described already. Where an optimizer's ``state_dict()`` in it has
    no state yet, a load takes what is stored, whole; among sharded tensors that is an error, since nothing says how
    such state is sharded: describe the optimizer itself.

    For modules, keys are the full names of torch's state-dict API, without the prefixes of wrappers (checkpoint
    wrappers, torch.compile, FSDP, DDP). With optimizers, the result is ``{"model": ..., "optimizer": ...}``, and keys
    are ``model.<name>``, ``optimizer.state.<name>.exp_avg`` and, for the options of a group, ``optimizer.param_groups``
    with a digest of its parameters' names. Values that are not tensors are stored as objects; so are the versions of
    modules, if their classes have any (``_version``), under ``_versions`` beside the names.

    A parameter may have no optimizer state yet: no step was made, or it never had a gradient (an unused branch, an
    expert that no token reached). Then a save stores none, and a load that finds none leaves it out; the optimizer
    makes it at the parameter's next step. A load takes the state that is stored, in its dtype, whether or not the
    optimizer has state of the parameter already: no step is taken to find out. What an optimizer's ``state_dict()`` has
    besides (``optimizer.others``) comes back into an optimizer of the same parameters.

    Example::

        state = to_sharded_state_dict(model, optimizer)
        dist_checkpointing.save(state, "checkpoints/step-100")
        ...
        state = to_sharded_state_dict(model, optimizer)
        load_into(dist_checkpointing.load(state, "checkpoints/step-100"), model, optimizer)

    Args:
        model_or_dict: Nested dicts and lists, a module, or a list of this rank's modules (pipeline or virtual stages);
            it does not change.
        optimizers: Optimizers of the modules, one by one; the parameters of each belong to one module.
        prefix: Put before every key; no dot is added: ``"model."``.
        check_replicas: Whether a save compares the tensors and objects that several ranks have under one key and that
            no mesh declares as replicas, and raises if their values differ. This reads all of them. If False, the
            lowest rank's is saved of vectors and scalars (the statistics of BatchNorm), objects and buffers of modules.
            A tensor of two or more axes is still sampled at 32 elements: if more than half of them differ between
            ranks, it is not a copy but another tensor (an expert of this rank), and the save fails instead of losing
            the others. So it does where plain tensors of state beside a DTensor differ: they are of this rank's rows.
        dequantize: Whether the values of quantized parameters of modules are stored, for readers that do not quantize.
            Otherwise their codes and scales are, bit for bit; a load takes either. Where the shards of a DTensor cut
            blocks the values are stored, with a warning.

    Returns:
        A dict for ``dist_checkpointing.save`` and ``load``. It shares the tensors' memory. Pass what ``load`` returns
        to :func:`load_into`.

    Raises:
        ShardingError: two modules or two optimizers have different values under one name, or an argument has the wrong
            type.
    """
    replicated: Replicated = True if check_replicas else "sampled"
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ShardingError(
                f"expected an optimizer, got a {type(optimizer).__name__}: pass optimizers one by one, and prefix= "
                "as a keyword"
            )
    if isinstance(model_or_dict, Mapping):
        if optimizers:
            raise ShardingError(
                "optimizers are described only with their modules: put the optimizer's state dict into the dict"
            )
        return _describe_dict(model_or_dict, prefix, replicated)
    return _describe_modules(model_or_dict, optimizers, prefix, replicated, None, dequantize=dequantize)


class SavedModules:
    """Describes the same modules and optimizers in each save: faster than :func:`to_sharded_state_dict`.

    What describes tensors is kept from save to save; a change of whatever kind is seen.

    Args:
        check_replicas: As for that function.
    """

    def __init__(self, *, check_replicas: bool = True) -> None:
        self._replicated: Replicated = True if check_replicas else "sampled"
        self._tensors = LeafShards()
        self._states = SavedStates()
        self._keys = _GroupKeys()

    def describe(
        self, model: Module | Sequence[Module], *optimizers: Optimizer, prefix: str = "", dequantize: bool = False
    ) -> ShardedStateDict:
        """Describe modules and optimizers for a save; a load needs :func:`to_sharded_state_dict`.

        Args:
            model: As for that function.
            optimizers: As for that function.
            prefix: As for that function.
            dequantize: As for that function.

        Returns:
            A dict for ``dist_checkpointing.save``, until :meth:`release`.

        Raises:
            ShardingError: As from that function; or a DTensor cannot be described.
        """
        parts = modules.as_parts(model)
        if len(parts) == 1 and not optimizers and self._replicated is True:
            # nearly always all is as it was in the last save: then the names need not be the keys of a dict first
            columns = list_state_columns(parts[0])
            found = None if columns is None else self._tensors.find(columns.names, columns.tensors, prefix, True)
            if columns is not None and found is not None:
                found.update(_describe_versions([columns.versions], prefix, self._replicated))
                return found
        kept = _Kept(self._tensors, self._states, self._keys)
        return _describe_modules(model, optimizers, prefix, self._replicated, kept, dequantize=dequantize)

    def release(self) -> None:
        """Let go of the tensors, once they are saved or copied: they would stay in memory when the model is gone."""
        self._tensors.release()
        self._states.release()


def _describe_dict(values: Mapping[Any, Any], prefix: str, replicated: Replicated) -> ShardedStateDict:
    found = {k: describe_tree(v, f"{prefix}{k}", replicated, objects=False) for k, v in values.items()}
    for path, groups in find_fresh(dict(values)):
        key = f"{prefix}{'.'.join(map(str, (*path, STATE)))}"
        request = partial(_request_numbered, values, groups, key)
        reduce(getitem, path, found)[STATE] = OptionalEntries({}, f"{key}.", request, in_common=True)
    return found


def _request_numbered(
    values: Mapping[Any, Any], groups: list[dict[str, Any]], key: str, stored: StoredNames, _: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what :func:`request_numbered` returns, whole tensors; raise if the state dict has sharded ones."""
    found = request_numbered(groups, stored, key)
    if found and any(map(_is_sharded, nested_values(dict(values)))):
        raise KeyMismatchError(
            f"the checkpoint has state below {key!r}, and the state dict to load has none there, since its optimizer "
            "has not made a step: it does not say how that state is sharded, and the optimizer would start anew. Give "
            "the optimizer itself: to_sharded_state_dict(model, optimizer), or CheckpointManager(config, {'model': "
            f"model, 'optimizer': optimizer}}). To start anew, leave {key!r} out of the state dict"
        )
    return found


def _is_sharded(leaf: Any) -> bool:
    return isinstance(leaf, (DTensor, ShardedBase)) or (type(leaf) not in ORDINARY and is_sharded_tensor(leaf))


def _describe_modules(
    model: Module | Sequence[Module],
    optimizers: Sequence[Optimizer],
    prefix: str,
    replicated: Replicated,
    kept: _Kept | None,
    *,
    dequantize: bool,
) -> ShardedStateDict:
    parts = modules.as_parts(model)
    columns = list(map(list_state_columns, parts))
    values, versions = modules.read_model(parts, columns)
    # buffers may differ between ranks (statistics of BatchNorm): any rank's will do
    buffers = modules.find_buffers(values, parts) if replicated == "sampled" else frozenset()
    alike = AlikeTensors()

    wrappers = {} if dequantize else find_wrapper_params(values)
    own = find_own_values(parts) if kept is None else None  # what is kept is kept for saves

    def describe_model(prefix: str) -> ShardedStateDict:
        def replication(name: str) -> Replicated:
            return "unchecked" if name in buffers else replicated

        plain = values if not wrappers else {n: value for n, value in values.items() if n not in wrappers}
        if kept is not None:
            found = kept.tensors.describe(plain, prefix, replicated, buffers)
        else:
            found = {
                n: describe_leaf(value, f"{prefix}{n}", replication(n), alike=alike, detached=True)
                for n, value in plain.items()
            }
        if wrappers:
            inner = {
                n: describe_wrapper_param(f"{prefix}{n}", each, replication(n), alike) for n, each in wrappers.items()
            }
            found = {n: inner[n] if n in inner else found[n] for n in values}
        found.update(_describe_versions(versions, prefix, replicated))
        if not wrappers and own is None:
            return found

        def request(stored: StoredNames, entries: Mapping[str, Any]) -> dict[str, Any]:
            requested = request_wrapper_params(entries, wrappers, stored, prefix)
            return requested if own is None else request_own_values(requested, values, own, stored, prefix)

        return OptionalEntries(found, prefix, request, required=True)

    if not optimizers:
        return describe_model(prefix)
    live = get_optimizer_state(parts, optimizers, columns)
    state, groups, others = (f"{prefix}optimizer.{kind}" for kind in ("state", "param_groups", "others"))

    def describe(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: describe_state(each, f"{state}.{name}", replicated, alike, get_layout(live.params.get(name)))
            for name, each in values.items()
        }

    states = describe(live.states) if kept is None else kept.states.describe(live, state, replicated)
    options = _describe_options(live.groups, groups, replicated)
    rest = {
        one.digest: describe_others(one, f"{others}.{one.digest}", replicated, alike) for one in live.each if one.others
    }

    def request_state(stored: StoredNames, entries: Mapping[str, Any]) -> dict[str, Any]:
        made = describe(make_flat_state(parts, optimizers, live))
        return made | request_states(live, entries, stored, state, f"{prefix}model.")

    return {
        "model": describe_model(f"{prefix}model."),
        "optimizer": {
            "state": OptionalEntries(states, f"{state}.", request_state),
            "param_groups": OptionalEntries(
                options, f"{groups}.", lambda stored, _: request_options(live.names, stored, groups), required=True
            ),
            "others": OptionalEntries(
                rest, f"{others}.", lambda stored, entries: request_others(live, entries, stored, others)
            ),
            "for_dcp": {
                **_describe_groups_for_dcp(
                    live.groups, groups, frozenset(live.names), _GroupKeys() if kept is None else kept.keys
                ),
                **_describe_numbers(live.states, state),
            },
        },
    }


def _describe_versions(parts: Sequence[Mapping[str, Any]], prefix: str, replicated: Replicated) -> dict[str, Any]:
    """Describe the versions of the modules of each part; a load asks for all that are stored, if there are any.

    The name of an object says what is in it: stages of a pipeline have modules of one name, such as the first.
    """
    own = {digest_names(f"{name} {version}" for name, version in each.items()): each for each in parts if each}
    if not own:
        return {}
    key = f"{prefix}{VERSIONS}."
    described = {digest: describe_object(each, f"{key}{digest}", replicated) for digest, each in own.items()}

    def request(stored: StoredNames, _: Mapping[str, Any]) -> dict[str, Any]:
        found = [each for each in stored.objects if each.startswith(key)]
        return {each.removeprefix(key): describe_object(None, each, "unchecked") for each in found}

    return {VERSIONS: OptionalEntries(described, key, request)}


def _describe_options(groups: list[dict[str, Any]], key: str, replicated: Replicated) -> dict[str, Any]:
    """Describe the options of each group: names of parameters and plain values as one object, tensors by parameter."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if not group[PARAMS]:
            continue
        name, options = name_group(group), list_options(group)
        # copies, so that a load does not fill the live tensors before load_into has checked what was loaded
        copies = {n: value.detach().clone() for n, value in options.items() if isinstance(value, torch.Tensor)}
        values = {PARAMS: group[PARAMS], "options": {n: value for n, value in options.items() if n not in copies}}
        found[name] = {"values": describe_object(values, f"{key}.{name}", replicated)}
        for param in group[PARAMS] if copies else ():  # as stock dcp.load asks for them
            tensors = {n: describe_leaf(copy, f"{key}.{param}.{n}", replicated) for n, copy in copies.items()}
            found[param] = {"tensors": tensors}
    return found


def _describe_groups_for_dcp(
    param_groups: list[dict[str, Any]], key: str, params: Collection[str], kept: _GroupKeys
) -> dict[str, PlainObject]:
    """Describe the groups as stock ``dcp.load`` asks for them, in both forms of torch's ``get_optimizer_state_dict``.

    Nested: ``<key>.0.lr``, and the names of the parameters, ``<key>.0.params``. Flattened: ``<key>.<name>.lr`` for each
    parameter. An option is stored once, and listed under all these keys.

    Args:
        param_groups: The groups, with the names of their parameters.
        key: What the keys begin with.
        params: The names of all parameters.
        kept: Has the keys of the last save.

    Returns:
        The descriptions, by their own keys. Ranks with the same parameters in a group have the same.
    """
    # by option and value; of few groups each keeps its own objects, so that a later save has as many as the last
    alike: dict[Any, list[_GroupOption]] = {}
    for number, group in enumerate(param_groups):
        # pipeline stages have a group 0 each, of other parameters: both are stored
        digest = digest_names(group[PARAMS])
        for option, keys in kept.find(number, group, key, params).items():
            if keys:
                same = _mark_value(group[option]) if len(param_groups) > _FEW_GROUPS else None
                place = (option, number if same is None else same)
                alike.setdefault(place, []).append(_GroupOption(f"{number}.{option}/{digest}", group[option], keys))
    found = {}
    for (option, _), each in alike.items():
        own, keys = f"{key}/{each[0].name}", each[0].keys
        if len(each) > 1:
            own = f"{key}/{option}/{digest_names(one.name for one in each)}"
            keys = tuple(chain.from_iterable(one.keys for one in each))
        found[own] = describe_plain_object(each[0].value, own, keys)
    return found


class _GroupOption(NamedTuple):
    """An option of a group: its name with that of the group, its value, and the keys to find it by."""

    name: str
    value: Any
    keys: tuple[str, ...]


def _mark_value(value: Any) -> tuple[Any, ...] | None:
    """Return what equal values of equal types have in common; None for others than plain values and tuples of them."""
    items = value if type(value) is tuple else (value,)
    return (type(value), repr(value)) if _PLAIN.issuperset(map(type, items)) else None


class _GroupKeys:
    """The keys under which stock ``dcp.load`` looks for the options of groups: made once, as long as they are alike."""

    def __init__(self) -> None:
        #: By the number of a group: what its keys depend on, and the keys of each option.
        self._found: dict[int, tuple[tuple[Any, ...], dict[str, tuple[str, ...]]]] = {}

    def find(
        self, number: int, group: Mapping[str, Any], key: str, params: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        """Return the keys of each option; arguments as for :func:`_describe_groups_for_dcp`."""
        names = group[PARAMS]
        # tensors are listed under the names of parameters already
        by_name = {name: name != PARAMS and not isinstance(value, torch.Tensor) for name, value in group.items()}
        # a parameter whose name is a number, or a number and the name of an option, has its options there
        taken = [option for option in by_name if str(number) in params or f"{number}.{option}" in params]
        form = (key, list(names), list(by_name.items()), taken)
        if number not in self._found or self._found[number][0] != form:
            keys = {
                option: (
                    *(() if option in taken else (f"{key}.{number}.{option}",)),
                    *([f"{key}.{name}.{option}" for name in names] if is_listed else ()),
                )
                for option, is_listed in by_name.items()
            }
            self._found[number] = form, keys
        return self._found[number][1]


class _Kept(NamedTuple):
    """What describes a model and its optimizers in later saves."""

    tensors: LeafShards
    states: SavedStates
    keys: _GroupKeys


def _describe_numbers(states: Mapping[str, Any], key: str) -> dict[str, PlainObject]:
    """Describe the optimizer's state that is not tensors (a step that is a number) as stock ``dcp.load`` asks for it.

    Args:
        states: The state of each parameter, by its name.
        key: What the keys begin with.

    Returns:
        The descriptions, by their own keys: one for each name of a value and each value, listed for all parameters that
        have it.
    """
    names: dict[tuple[str, type[Any], Any], list[str]] = {}
    for name, state in states.items():
        if type(state) is dict and _TENSORS.issuperset(map(type, state.values())):  # nearly always
            continue
        for path, value in nested_items(state):
            if isinstance(value, (int, float, str, type(None))):
                names.setdefault((".".join(map(str, path)), type(value), value), []).append(name)
    found = {}
    for (option, _, value), having in names.items():
        own = f"{key}/{option}/{digest_names(having)}"
        found[own] = describe_plain_object(value, own, tuple(f"{key}.{name}.{option}" for name in having))
    return found
