"""Describe state dicts, modules and optimizers for a save or a load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters import modules
from shardckpt.adapters.dtensor import LayoutCache
from shardckpt.adapters.for_dcp import GroupKeys, describe_groups, describe_numbers
from shardckpt.adapters.forms import get_layout
from shardckpt.adapters.group_options import (
    GROUPS,
    OTHERS,
    STATE,
    describe_options,
    request_options,
)
from shardckpt.adapters.leaf_shards import LeafShards
from shardckpt.adapters.leaves import describe_tree
from shardckpt.adapters.model_tensors import ModelTensors, describe_versions
from shardckpt.adapters.module_tree import list_state_columns
from shardckpt.adapters.optimizer_requests import find_fresh, request_numbered, request_others, request_states
from shardckpt.adapters.optimizers import describe_others, describe_state, get_optimizer_state, make_flat_state
from shardckpt.adapters.saved_states import SavedStates
from shardckpt.engine.gc_pause import pause_gc
from shardckpt.errors import KeyMismatchError, ShardingError, show_given
from shardckpt.mapping.base import ShardedBase
from shardckpt.mapping.unstored import OptionalEntries
from shardckpt.state_dict import nested_values
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import is_sharded_tensor
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.adapters.optimizers import OptimizerState
    from shardckpt.mapping.base import Replicated, ShardedStateDict
    from shardckpt.mapping.unstored import StoredNames


@pause_gc()
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
    no state yet, a load takes all of the stored state; among sharded tensors that is an error, since nothing says how
    such state is sharded: describe the optimizer itself.

    For modules, keys are the full names of torch's state-dict API, without the prefixes of wrappers (checkpoint
    wrappers, torch.compile, FSDP, DDP). With optimizers, the result is ``{"model": ..., "optimizer": ...}``, and keys
    are ``model.<name>``, ``optimizer.state.<name>.exp_avg`` and, for the options of a group, ``optimizer.param_groups``
    with a digest of its parameters' names. Values that are not tensors are stored as objects; so are the versions of
    modules, if their classes have any (``_version``), under ``_versions`` next to the names.

    A parameter may have no optimizer state yet: no step was made, or it never had a gradient (an unused branch, an
    expert that no token reached). Then a save stores none, and a load that finds none leaves it out; the optimizer
    makes it at the parameter's next step. A load takes the state that is stored, in its dtype, whether or not the
    optimizer has state of the parameter already: no step is taken to find out. Other entries of an optimizer's
    ``state_dict()`` (``optimizer.others``) come back into an optimizer of the same parameters.

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
            the others. So it does where plain tensors of state next to a DTensor differ: they are of this rank's rows.
        dequantize: Whether the values of quantized parameters of modules are stored, for readers that do not quantize.
            Otherwise their codes and scales are, bit for bit; a load takes either. Where the shards of a DTensor cut
            blocks the values are stored, with a warning.

    Returns:
        A dict for ``dist_checkpointing.save`` and ``load``. It shares the tensors' memory. Pass the result of ``load``
        to :func:`load_into`.

    Raises:
        ShardingError: two modules or two optimizers have different values under one name, or a described value, or the
            prefix, has the wrong type.
        CheckpointingException: a flag is none.
    """
    if not isinstance(prefix, str):
        raise ShardingError(f"prefix={show_given(prefix)}: give the text before every key, prefix='model.'")
    check_annotated(to_sharded_state_dict, locals())
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


class _Kept(NamedTuple):
    """The description of a model and its optimizers, kept for later saves."""

    tensors: LeafShards
    states: SavedStates
    keys: GroupKeys


class SavedModules:
    """Describes the same modules and optimizers in each save: faster than :func:`to_sharded_state_dict`.

    The descriptions of tensors are kept from save to save; a change of whatever kind is seen.
    """

    def __init__(self, *, check_replicas: bool = True) -> None:
        self._replicated: Replicated = True if check_replicas else "sampled"
        self._tensors = LeafShards()
        self._states = SavedStates()
        self._keys = GroupKeys()

    @pause_gc()
    def describe(
        self, model: Module | Sequence[Module], *optimizers: Optimizer, prefix: str = "", dequantize: bool = False
    ) -> ShardedStateDict:
        """Describe modules and optimizers for a save; a load needs :func:`to_sharded_state_dict`.

        The result is for ``dist_checkpointing.save``, until :meth:`release`. It raises as that function does, and if a
        DTensor cannot be described.
        """
        parts = modules.as_parts(model)
        if len(parts) == 1 and not optimizers and self._replicated is True:
            # nearly always all is as it was in the last save: then the names need not be the keys of a dict first
            columns = list_state_columns(parts[0])
            found = None if columns is None else self._tensors.reuse(columns.names, columns.tensors, prefix, True)
            if columns is not None and found is not None:
                found.update(describe_versions([columns.versions], prefix, self._replicated))
                return found
        kept = _Kept(self._tensors, self._states, self._keys)
        return _describe_modules(model, optimizers, prefix, self._replicated, kept, dequantize=dequantize)

    def release(self) -> None:
        """Let go of the tensors, once they are saved or copied: they would stay in memory when the model is gone."""
        self._tensors.release()
        self._states.release()


def _describe_dict(values: Mapping[Any, Any], prefix: str, replicated: Replicated) -> ShardedStateDict:
    cache = LayoutCache()
    found = {k: describe_tree(v, f"{prefix}{k}", replicated, objects=False, cache=cache) for k, v in values.items()}
    for path, groups in find_fresh(dict(values)):
        key = f"{prefix}{'.'.join(map(str, (*path, STATE)))}"
        request = partial(_request_numbered, values, groups, key)
        reduce(getitem, path, found)[STATE] = OptionalEntries({}, f"{key}.", request, in_common=True)
    return found


def _request_numbered(
    values: Mapping[Any, Any], groups: list[dict[str, Any]], key: str, stored: StoredNames, _: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the request of :func:`request_numbered` for whole tensors; raise if the state dict has sharded ones."""
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
    tensors = ModelTensors(
        parts, columns, replicated, dequantize=dequantize, kept=None if kept is None else kept.tensors
    )
    cache = LayoutCache()
    if not optimizers:
        return tensors.describe(prefix, cache)
    live = get_optimizer_state(parts, optimizers, columns)
    make_flat = partial(make_flat_state, parts, optimizers, live)
    return {
        "model": tensors.describe(f"{prefix}model.", cache),
        "optimizer": _describe_optimizers(live, make_flat, prefix, replicated, cache, kept),
    }


def _describe_optimizers(
    live: OptimizerState,
    make_flat: Callable[[], Mapping[str, Any]],
    prefix: str,
    replicated: Replicated,
    cache: LayoutCache,
    kept: _Kept | None,
) -> ShardedStateDict:
    """Describe the state of optimizers; ``make_flat`` makes state for FSDP1's parameters that have none."""
    state, groups, others = (f"{prefix}optimizer.{kind}" for kind in (STATE, GROUPS, OTHERS))

    def describe(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: describe_state(each, f"{state}.{name}", replicated, cache, get_layout(live.params.get(name)))
            for name, each in values.items()
        }

    states = describe(live.states) if kept is None else kept.states.describe(live, state, replicated)
    options = describe_options(live.groups, groups, replicated)
    rest = {
        one.digest: describe_others(one, f"{others}.{one.digest}", replicated, cache) for one in live.each if one.others
    }

    def request_state(stored: StoredNames, entries: Mapping[str, Any]) -> dict[str, Any]:
        return describe(make_flat()) | request_states(live, entries, stored, state, f"{prefix}model.")

    keys = GroupKeys() if kept is None else kept.keys
    return {
        STATE: OptionalEntries(states, f"{state}.", request_state),
        GROUPS: OptionalEntries(
            options,
            f"{groups}.",
            lambda stored, _: request_options(live.names, stored, groups, live.groups),
            required=True,
        ),
        OTHERS: OptionalEntries(
            rest, f"{others}.", lambda stored, entries: request_others(live, entries, stored, others)
        ),
        "for_dcp": {
            **describe_groups(live.groups, groups, frozenset(live.names), keys),
            **describe_numbers(live.states, state),
        },
    }
