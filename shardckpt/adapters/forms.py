"""Nested states as tensors and one object, the form, which has all else: containers, keys of any type, classes.

Optimizers keep more than tensors by name: lists of them (LBFGS), integers as keys, quantized tensors. Keys of a
checkpoint are dotted texts, which lose the type of a name.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.wrappers import CLASS, InnerShard, flatten_wrappers, is_wrapper, rebuild_wrapper
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError
from shardckpt.state_dict import dict_list_map_outplace, nested_items, nested_values, of_type
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardckpt.adapters.dtensor import LayoutCache
    from shardckpt.mapping.base import Replicated

#: The key of a form, below the key of its state: no name of a value has parentheses.
FORM = "(form)"
#: The first item of a placeholder, ``(this text, dtype name, shape)``, which replaces a tensor in a stored form. It is
#: part of the checkpoint format, as the texts below are.
_PLACEHOLDER = "shardckpt: a tensor"
#: A fourth item of the placeholders of plain tensors whose siblings are DTensors.
_WHOLE = "whole on each rank"
#: The prefix of the last part of the key of a tensor that belongs to no parameter, and is sharded as one.
_LAYOUT = ".(as "
#: The prefix of the last part of the key of an object that says which axes of a parameter's tensors are sharded, for
#: tensors that are laid out otherwise than the parameter.
_SHARDED = "(sharded "
#: The key that marks a dict in the place of a tuple or deque with tensors: the class, and a deque's longest length.
_SEQUENCE = "shardckpt: a sequence of the class"
#: The key of its items.
_ITEMS = "(items)"


class Layout(NamedTuple):
    """The global shape and the placements of a parameter that is a DTensor."""

    shape: torch.Size
    placements: tuple[Placement, ...]


def flatten_state(state: Any, *, shards: bool = True) -> Any:
    """Return a state as nested dicts and lists with plain tensors and DTensors.

    A tuple or deque with tensors becomes a dict that has its items, as a tensor with others inside does.
    """

    def flatten(leaf: Any) -> Any:
        if not has_tensors(leaf):
            return leaf
        return {
            _SEQUENCE: [type(leaf).__name__, getattr(leaf, "maxlen", None)],
            _ITEMS: dict_list_map_outplace(flatten, list(leaf)),
        }

    return flatten_wrappers(dict_list_map_outplace(flatten, state), shards=shards)


def has_tensors(leaf: Any) -> bool:
    """Return whether a leaf of a state is a tuple or deque with tensors in it; named tuples are objects."""
    return type(leaf) in (tuple, deque) and any(
        isinstance(each, torch.Tensor) or has_tensors(each) for each in nested_values(list(leaf))
    )


def is_self_describing(state: Any, layout: Layout | None) -> bool:
    """Return whether keys alone describe a state: nested dicts with names as keys, and values that are no lists.

    ``layout`` is the parameter's layout if it is a DTensor. Then its state is a DTensor, too, except single numbers.
    """
    if type(state) is not dict or not state:
        return False
    for name, value in state.items():
        # a number would come back as a place in a list, as older checkpoints without forms have them
        if type(name) is not str or not name or "." in name or name == FORM or name.isdecimal():
            return False
        kind = type(value)
        if kind in ORDINARY:
            needs_form = layout is not None and value.numel() > 1
        elif kind is DTensor:
            needs_form = (layout is not None and _has_own_layout(value, layout)) or is_wrapper(value)
        elif kind is dict:
            needs_form = not is_self_describing(value, layout)
        else:
            needs_form = isinstance(value, (dict, list)) or is_wrapper(value) or has_tensors(value)
        if needs_form:
            return False
    return True


def make_form(state: Any, *, is_distributed: bool = False) -> Any:
    """Return a state with a placeholder for each tensor.

    With ``is_distributed`` plain tensors are told apart from DTensors. A value that looks like a placeholder is a
    ShardingError: it would come back as a tensor.
    """

    def replace(leaf: Any) -> Any:
        if is_placeholder(leaf):
            raise ShardingError(f"a value of a state is {leaf!r}, which stands for a tensor in a checkpoint")
        if isinstance(leaf, InnerShard):
            return (_PLACEHOLDER, str(leaf.tensor.dtype).removeprefix("torch."), (leaf.size,))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        mark = (_WHOLE,) if is_distributed and not isinstance(leaf, DTensor) else ()
        return (_PLACEHOLDER, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), *mark)

    return dict_list_map_outplace(replace, state)


def is_placeholder(leaf: Any) -> bool:
    """Return whether a leaf of a form stands for a tensor."""
    # of an array, == is an array
    return isinstance(leaf, tuple) and len(leaf) in (3, 4) and isinstance(leaf[0], str) and leaf[0] == _PLACEHOLDER


def list_tensors(state: Any) -> dict[str, torch.Tensor | InnerShard]:
    """Return the tensors of a state by their dotted paths.

    It is a ShardingError if two have the same path, as for the keys 1 and ``"1"`` of a dict, or one has the form's
    path.
    """
    found: dict[str, torch.Tensor | InnerShard] = {}
    for path, leaf in nested_items(state):
        if isinstance(leaf, (torch.Tensor, InnerShard)):
            name = join_path(path)
            if name in found or path[0] == FORM:
                raise ShardingError(
                    f"a tensor of an optimizer's state has the path {name!r}, which is taken: give it another key"
                )
            found[name] = leaf
    return found


def describe_nested(
    values: Any, key: str, replicated: Replicated, cache: LayoutCache, layout: Layout | None
) -> dict[str, Any]:
    """Describe a parameter's state that is not :func:`is_self_describing`; for the rest see there and describe_leaf."""
    flat = flatten_state(values)
    is_distributed = layout is not None
    form, tensors = make_form(flat, is_distributed=is_distributed), list_tensors(flat)
    found = describe_with_form(form, tensors, key, replicated, cache, is_distributed=is_distributed)
    if layout is not None and (axes := _list_axes(tensors, layout)):
        # a load must know before it has read an object; stock dcp.load knows tensors by their paths alone
        slot = f"{_SHARDED}{json.dumps(axes)})"
        found[slot] = describe_object(None, f"{key}.{slot}", replicated)
    return found


def get_layout(param: torch.Tensor | None) -> Layout | None:
    """Return the layout of a parameter that is a DTensor; None of any other."""
    return Layout(param.shape, param.placements) if isinstance(param, DTensor) else None


def _has_own_layout(tensor: DTensor, param: Layout) -> bool:
    """Return whether the shape of a state does not say how it is laid out: as its parameter, or else replicated."""
    shape = tensor.shape
    if shape == param.shape:
        return tensor.placements is not param.placements and tensor.placements != param.placements
    is_replicated = all(isinstance(place, Replicate) for place in tensor.placements)
    return not is_replicated or tensor.numel() == 1 or not {*shape} <= {*param.shape, 1}


def _list_axes(tensors: Mapping[str, Any], param: Layout) -> dict[str, list[int]]:
    """Return the axes that are sharded, one or none, of the tensors by path whose shapes do not say it."""
    own = {
        path: {getattr(place, "dim", None) for place in tensor.placements} - {None}
        for path, tensor in tensors.items()
        if isinstance(tensor, DTensor) and _has_own_layout(tensor, param)
    }
    return {path: list(axes) for path, axes in own.items() if len(axes) <= 1}  # type: ignore[arg-type]


def find_axes(slots: Iterable[str]) -> dict[str, list[int]]:
    """Return the sharded axes by path that :func:`describe_nested` has put into the name of one of a state's objects.

    If the name of such an object does not say them, it is a CorruptCheckpointError.
    """
    slot = next((slot for slot in slots if slot.startswith(_SHARDED)), None)
    if slot is None:
        return {}
    with suppress(ValueError):
        found = json.loads(slot[len(_SHARDED) : -1])
        if isinstance(found, dict) and all(map(_are_axes, found.values())):
            return found
    raise CorruptCheckpointError(f"the name of a stored object does not say which axes are sharded: {slot!r}")


def _are_axes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1 and all(type(axis) is int and axis >= 0 for axis in value)


def describe_with_form(
    form: Any,
    tensors: Mapping[str, torch.Tensor | InnerShard],
    key: str,
    replicated: Replicated,
    cache: LayoutCache | None = None,
    *,
    is_distributed: bool = False,
) -> dict[str, Any]:
    """Describe a form and its tensors below a key, each by the rest of its own; the others are as for describe_leaf.

    With ``is_distributed`` they belong to a DTensor.
    """

    def describe(tensor: torch.Tensor | InnerShard, key: str) -> Any:
        if isinstance(tensor, InnerShard):
            return tensor.describe(key, replicated)
        # next to a DTensor it may be of this rank's rows: one rank's would be wrong for all
        is_compared = is_distributed and not isinstance(tensor, DTensor) and tensor.numel() > 1
        return describe_leaf(tensor, key, True if is_compared else replicated, cache=cache)

    return {
        FORM: describe_object(form, f"{key}.{FORM}", replicated),
        **{slot: describe(tensor, f"{key}.{slot}") for slot, tensor in tensors.items()},
    }


def fill_form(
    form: Any,
    find: Callable[[str], torch.Tensor | None],
    param: torch.Tensor | None = None,
    path: tuple[Any, ...] = (),
) -> Any:
    """Collective over the meshes of the DTensors, if there are any: return the state that was saved.

    A tensor that each rank had whole when it was saved, and that was loaded as a DTensor, is gathered. ``find`` returns
    the tensor at a dotted path, or None if it was not loaded, which is an error, as is a wrapper tensor that cannot be
    put together. ``param`` is given if the state is a parameter's.
    """
    if isinstance(form, dict):
        filled: Any = of_type(form, {key: fill_form(each, find, param, (*path, key)) for key, each in form.items()})
        if _SEQUENCE in filled:
            (cls, longest), items = filled[_SEQUENCE], filled[_ITEMS]
            return deque(items, longest) if cls == "deque" else tuple(items)
        return rebuild_wrapper(filled, form, param) if CLASS in filled else filled
    if isinstance(form, list):
        return of_type(form, [fill_form(each, find, param, (*path, index)) for index, each in enumerate(form)])
    if not is_placeholder(form):
        return form
    tensor = find(join_path(path))
    if tensor is None:
        raise CheckpointingException(f"a tensor of the state was not loaded: {join_path(path)!r}")
    if _WHOLE in form and isinstance(tensor, DTensor):
        return tensor.full_tensor()  # a state that was plain is so again
    return tensor


def rebuild_state(values: Mapping[str, Any], param: torch.Tensor | None = None) -> Any:
    """Collective where :func:`fill_form` is: return a state from its loaded values, by its form if it has one."""
    if FORM not in values:
        return dict(values)
    by_path = {slot.partition(_LAYOUT)[0]: value for slot, value in values.items()}
    return fill_form(values[FORM], by_path.get, param)


def join_layout(path: str, name: str | None) -> str:
    """Return the dotted path of a tensor, followed by the name of the parameter that it is sharded as, if it is."""
    return path if name is None else f"{path}{_LAYOUT}{name})"


def find_layout(slot: str) -> str:
    """Return the parameter's name in a slot that :func:`join_layout` returned; ``""`` if it has none."""
    return slot.partition(_LAYOUT)[2].removesuffix(")")


def join_path(path: tuple[Any, ...]) -> str:
    """Return a path as text: its parts, joined by dots."""
    return ".".join(map(str, path))
