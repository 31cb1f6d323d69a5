"""Sharded optimizer state from a checkpoint, by the names and layouts of the model's state dict."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from shardckpt.adapters import to_sharded_state_dict
from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, LoadTemplate, locate, open_checkpoint
from shardckpt.errors import CorruptCheckpointError, KeyMismatchError, listed
from shardckpt.mapping import ShardedBase, ShardedTensor
from shardckpt.optimizer.arguments import location, parameters, refuse_planner
from shardckpt.optimizer.groups import regrouped, with_tensors
from shardckpt.optimizer.layout import laid_out
from shardckpt.optimizer.names import GROUPS, STATE, Place
from shardckpt.optimizer.stored import stored_state
from shardckpt.plugins import host
from shardckpt.state_dict import merge
from shardckpt.storage import retry_if_replaced

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.engine import OpenCheckpoint
    from shardckpt.mapping import StateDict
    from shardckpt.optimizer.stored import StoredState

logger = logging.getLogger(__name__)


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    checkpoint_or_reader: str | os.PathLike[str] | Any,
    planner: Any = None,
    *,
    process_group: ProcessGroup | None = None,
    allow_globals: Iterable[Any] = (),
    shard_factored: bool = False,
) -> StateDict:
    """Load an optimizer's state, sharded as the model's parameters are; needs no optimizer, and of no tensor the whole.

    Takes torch's arguments in torch's order. Gives ``{optimizer_key: {"state": {<parameter>: {<slot>: ...}},
    "param_groups": [...]}}``, whether the state was saved nested or flattened, for torch's ``set_optimizer_state_dict``
    or FSDP1's ``optim_state_dict_to_load``. Every rank of the group calls it with its own part of the model.

    Where torch cuts every tensor in rows over all ranks, here state lies as its parameter does: state of a DTensor is
    a DTensor of its mesh and placements, of a ShardedTensor a ShardedTensor, of a plain tensor a plain tensor, on the
    parameter's device. State of another shape (rows and columns of Adafactor) is replicated over that mesh, as torch's
    optimizers have it, and single numbers (step counts) are plain tensors on the CPU.

    A parameter of which nothing is stored (frozen, or without a step yet) is absent. State of parameters that no
    rank's model has is left out with a warning that names it; of those that another rank has (pipeline stages) without.
    Groups that were stored by number are given as they were. Options that were stored by parameter (flattened) come as
    a group a parameter, from which ``set_optimizer_state_dict`` fills the optimizer's own groups; where there is no
    state at all, which makes torch take groups as they come, parameters with equal options share one.

    Args:
        model_state_dict: The model's tensors by full name, as ``get_model_state_dict`` gives them; they stay.
        optimizer_key: What stands before ``.state`` in the keys of the state: ``"optimizer"``.
        checkpoint_or_reader: A checkpoint's directory or URL, or torch's FileSystemReader of it.
        planner: None or torch's DefaultLoadPlanner, which changes nothing; any other is refused.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.
        allow_globals: Classes and functions that legacy pickles in the checkpoint may name besides the plain ones.
        shard_factored: Whether factored state of a DTensor is sharded along the axes that it has left of its
            parameter's, for optimizers that keep it so; else it is replicated.

    Raises:
        KeyMismatchError: the checkpoint has nothing under ``optimizer_key``, or state of no parameter of the model.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.collective_phase("reading the arguments"):
        refuse_planner(planner)
        directory, params = locate(location(checkpoint_or_reader), host()), parameters(model_state_dict)
    comm.agree(optimizer_key=optimizer_key, shard_factored=shard_factored)

    def attempt() -> StateDict:
        with open_checkpoint(directory, comm, host(), LoadOptions(allow_globals=tuple(allow_globals))) as checkpoint:
            return {optimizer_key: _load(optimizer_key, params, checkpoint, shard_factored=shard_factored)}

    return retry_if_replaced(attempt, directory)


def _load(
    key: str, params: Mapping[str, torch.Tensor], checkpoint: OpenCheckpoint, *, shard_factored: bool
) -> StateDict:
    index, common = checkpoint.index(), checkpoint.common()
    with checkpoint.operation.local_phase("choosing the optimizer's state"):
        stored = stored_state(key, index, common)
        places = stored.placed(params)
    _report_unclaimed(stored, places, params, checkpoint.context.comm)
    with checkpoint.operation.local_phase("laying out the optimizer's state"):
        template = LoadTemplate(_wanted(stored, places, params, shard_factored=shard_factored))
    values = checkpoint.values(template.shards)
    with checkpoint.operation.local_phase("assembling the optimizer's state"):
        loaded = template.fill(values, {})
        found = {name: loaded.get(name, stored.entries[name]) for name in places}
        return _assembled(found, places, stored.groups, params)


def _wanted(
    stored: StoredState, places: Mapping[str, Place], params: Mapping[str, torch.Tensor], *, shard_factored: bool
) -> StateDict:
    """The entries that are not in the common state, as what a load fills."""
    wanted: StateDict = {}
    for name, place in places.items():
        entry = stored.entries[name]
        if isinstance(entry, ShardedTensor) and place.kind == STATE:
            tensor = laid_out(entry, place.slot, params[str(place.owner)], shard_factored=shard_factored)
            wanted[name] = to_sharded_state_dict({entry.key: tensor})[entry.key]
        elif isinstance(entry, ShardedBase):
            wanted[name] = entry
    return wanted


def _report_unclaimed(
    stored: StoredState, places: Mapping[str, Place], params: Mapping[str, torch.Tensor], comm: Comm
) -> None:
    """Warn of entries that belong to no parameter of any rank; raise if that is all of the state."""
    names = sorted(stored.entries)
    claimed = comm.largest(*(name in places for name in names))
    unclaimed = [name for name, is_claimed in zip(names, claimed, strict=True) if not is_claimed]
    state = [name for name in names if name.startswith(f"{STATE}.")]
    if not unclaimed:
        return
    with comm.collective_phase("choosing the optimizer's state"):
        if state and set(state) <= set(unclaimed):
            raise KeyMismatchError(
                f"the state of no parameter of the model is stored: there are {listed(state)}; the model has "
                f"{listed(sorted(params))}: give its state dict by the names of get_model_state_dict, which are those "
                "that optimizer state is saved by (get_optimizer_state_dict; an optimizer's own state_dict has numbers)"
            )
    if comm.is_main:
        logger.warning("of the optimizer's, not loaded, as no rank's model has such parameters: %s", listed(unclaimed))


def _assembled(
    found: Mapping[str, Any],
    places: Mapping[str, Place],
    groups: list[dict[str, Any]] | None,
    params: Mapping[str, torch.Tensor],
) -> StateDict:
    """The state of the optimizer, with parameters in the model's order."""
    state: dict[Any, Any] = {name: {} for name in params}
    options: dict[Any, Any] = {name: {} for name in params}
    rest: StateDict = {}
    for name, (kind, owner, path) in places.items():
        target = rest if owner is None else (state if kind == STATE else options).setdefault(owner, {})
        _put(name, target, path, found[name])
    state = {name: slots for name, slots in state.items() if slots}
    given = {name: values for name, values in options.items() if values}
    gathered = regrouped(given, apart=bool(state)) if groups is None else with_tensors(groups, given)
    return {**rest, STATE: state, GROUPS: gathered}


def _put(name: str, target: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Merge a value into a dict at a path below it."""
    nest = value
    for part in reversed(path):
        nest = {part: nest}
    try:
        merge(target, nest)
    except ValueError as exc:
        raise CorruptCheckpointError(f"{name} does not fit to what else is stored of the optimizer: {exc}") from exc


__all__ = ["load_sharded_optimizer_state_dict"]
