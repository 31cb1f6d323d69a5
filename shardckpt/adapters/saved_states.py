"""The state of parameters in the saves of a job: tensors are described once, as long as they stay the same."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.adapters.dtensor import LayoutCache
from shardckpt.adapters.forms import describe_nested, get_layout, is_self_describing, join_path
from shardckpt.adapters.leaf_shards import LeafShards
from shardckpt.adapters.leaves import describe_leaf
from shardckpt.state_dict import nested_items

if TYPE_CHECKING:
    from shardckpt.adapters.forms import Layout
    from shardckpt.adapters.optimizers import OptimizerState
    from shardckpt.mapping.base import Replicated


class _Columns(NamedTuple):
    """What determines the keys of states' tensors, and whether a state needs a form besides.

    Attributes:
        params: The names of the parameters.
        layouts: The layout of each parameter that is a DTensor, else None.
        names: The names of each parameter's values.
    """

    params: list[str]
    layouts: list[Layout | None]
    names: list[tuple[Any, ...]]


class SavedStates:
    """Describes the states of parameters in each save, in one flat dict; a load needs the states as they are nested."""

    def __init__(self) -> None:
        self._tensors = LeafShards()
        #: The columns of the last save, if its states were nothing but tensors by name; and their names.
        self._columns: _Columns | None = None
        self._slots: list[str] = []

    def describe(self, live: OptimizerState, key: str, replicated: Replicated) -> dict[str, Any]:
        """Return the shards of the states by the names of parameters and dotted paths.

        Shards of states that have a form are nested. They are this object's until :meth:`release`. ``key`` is the
        prefix of the keys, without the last dot.
        """
        states = list(live.states.values())
        columns = _Columns(list(live.states), [get_layout(live.params.get(name)) for name in live.states], [])
        is_usual = set(map(type, states)) == {dict}
        if is_usual:
            columns.names.extend(map(tuple, states))
            if columns == self._columns:
                leaves = list(chain.from_iterable(map(dict.values, states)))
                found = self._tensors.reuse(self._slots, leaves, f"{key}.", replicated)
                if found is not None:
                    return found
        tensors, others = _flatten(columns, states, key, replicated)
        # of nested ones the next save finds dicts in the place of tensors
        has_columns = is_usual and not others and len(tensors) == sum(map(len, columns.names))
        self._columns, self._slots = (columns, list(tensors)) if has_columns else (None, [])
        return {**others, **self._tensors.describe(tensors, f"{key}.", replicated)}

    def release(self) -> None:
        """Let go of the tensors; the results of :meth:`describe` must not be used any more."""
        self._tensors.release()


def _flatten(
    columns: _Columns, states: list[Any], key: str, replicated: Replicated
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of states by the names of parameters and dotted paths, and the descriptions of all else."""
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    cache = LayoutCache()
    for name, state, layout in zip(columns.params, states, columns.layouts, strict=True):
        if not is_self_describing(state, layout):
            others[name] = describe_nested(state, f"{key}.{name}", replicated, cache, layout)
            continue
        for path, leaf in nested_items(state):
            slot = f"{name}.{join_path(path)}"
            if isinstance(leaf, torch.Tensor) and slot not in tensors:
                tensors[slot] = leaf
                continue
            # of two parameters' values with one key both are described: the save refuses them
            place = f"{slot} of {name}" if slot in tensors or slot in others else slot
            others[place] = describe_leaf(leaf, f"{key}.{slot}", replicated, cache=cache)
    return tensors, others
