"""Load sharded optimizer state by the names and layouts of the model's state dict."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from shardckpt.adapters import (
    FORM,
    empty_state_tensor,
    is_group,
    rebuild_state,
    spread_options,
    to_sharded_state_dict,
)
from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, LoadTemplate, locate, open_checkpoint
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, KeyMismatchError, listed
from shardckpt.mapping import ShardedBase, ShardedTensor
from shardckpt.optimizer.groups import group_options
from shardckpt.optimizer.names import GROUPS, OTHERS, STATE, StateName
from shardckpt.optimizer.stored import find_stored_state
from shardckpt.plugins import get_plugin_manager
from shardckpt.state_dict import merge
from shardckpt.storage import retry_if_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from shardckpt.engine import OpenCheckpoint
    from shardckpt.mapping import StateDict
    from shardckpt.optimizer.reader_checkpoint import ReaderCheckpoint
    from shardckpt.optimizer.stored import StoredState
    from shardckpt.planning import Ints

logger = logging.getLogger(__name__)


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: str | os.PathLike[str] | Any,
    planner: Any = None,
    *,
    process_group: ProcessGroup | None = None,
    allow_globals: Iterable[Any] = (),
    shard_factored: bool = False,
) -> StateDict:
    """Collective: load an optimizer's state, sharded as the model's parameters are, without an optimizer.

    Takes torch's arguments by torch's names; each rank passes its own part of the model. No rank holds a full tensor
    of sharded state.

    torch's function cuts every tensor in rows over all ranks. Here state has the layout of its parameter: state of a
    DTensor is a DTensor of its mesh and placements, of a ShardedTensor a ShardedTensor, of a plain tensor a plain
    tensor, on the parameter's device. State of another shape (rows and columns of Adafactor) is replicated over that
    mesh, as torch's optimizers have it. Single numbers (step counts) are plain tensors on the CPU.

    State of parameters that no rank's model has is left out, and a warning names it; state of parameters that only
    other ranks have (pipeline stages) is left out without one.

    Example::

        params = get_model_state_dict(model)
        loaded = load_sharded_optimizer_state_dict(params, "optimizer", "checkpoints/step-100")
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])

    Args:
        model_state_dict: The model's tensors by full name, as ``get_model_state_dict`` gives them; they do not change.
        optimizer_key: The part of the keys before ``.state``: ``"optimizer"``.
        storage_reader: A checkpoint's directory or URL, or a reader of it. What torch's FileSystemReader or shardckpt's
            CheckpointStorageReader would read is read as by its path. Any other StorageReader, also a subclass of
            these, reads by its own methods, and checks what they check; objects are decoded here.
        planner: None or torch's DefaultLoadPlanner, which changes nothing; any other is refused.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.
        allow_globals: Classes and functions that legacy pickles in the checkpoint may name besides the plain ones.
        shard_factored: Whether factored state of a DTensor is sharded along those axes of its parameter that it still
            has, for optimizers that keep it so; else it is replicated.

    Returns:
        ``{optimizer_key: {"state": {<parameter>: {<slot>: ...}}, "param_groups": [...]}}``, whether the state was saved
        nested or flattened, for torch's ``set_optimizer_state_dict`` or FSDP1's ``optim_state_dict_to_load``. A
        parameter without stored state (frozen, or without a step yet) is absent. Groups that were stored by number are
        returned as they were. Options that were stored by parameter (flattened) are returned as one group for each
        parameter, from which ``set_optimizer_state_dict`` fills the optimizer's own groups. If no state is stored,
        torch takes groups as they are, so parameters with equal options share one.

    Raises:
        KeyMismatchError: nothing is stored under ``optimizer_key``, or state of none of the model's parameters.
        ShapeMismatchError: state was saved for a parameter of another shape.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.collective_phase("reading the arguments"):
        _refuse_planner(planner)
        location = _find_location(storage_reader)
        directory = None if location is None else locate(location, get_plugin_manager())
        allowed = (*allow_globals, *getattr(storage_reader, "allowed_globals", ()))
        if not isinstance(model_state_dict, Mapping):
            raise CheckpointingException(
                f"expected the model's state dict (get_model_state_dict), got a {type(model_state_dict).__name__}"
            )
        params = {name: value for name, value in model_state_dict.items() if isinstance(value, torch.Tensor)}
    comm.agree(optimizer_key=optimizer_key, shard_factored=shard_factored, by_reader=directory is None)
    if directory is None:
        from shardckpt.optimizer.reader_checkpoint import ReaderCheckpoint  # it imports torch's planners

        reader: Any = storage_reader
        read = ReaderCheckpoint(reader, optimizer_key, comm, allowed)
        loaded = _load(optimizer_key, params, read, comm, comm.local_phase, shard_factored=shard_factored)
        return {optimizer_key: loaded}

    def attempt() -> StateDict:
        # opened in each attempt: another save may have replaced the checkpoint
        options = LoadOptions(allow_globals=allowed)
        with open_checkpoint(directory, comm, get_plugin_manager(), options) as checkpoint:
            phase = checkpoint.operation.local_phase
            return {optimizer_key: _load(optimizer_key, params, checkpoint, comm, phase, shard_factored=shard_factored)}

    return retry_if_replaced(attempt, directory)


@runtime_checkable
class LocatedReader(Protocol):
    """A StorageReader that reads nothing but what the engine reads at a location."""

    @property
    def location(self) -> str | None:
        """The checkpoint's directory or URL; None for a subclass, whose own methods read."""

    @property
    def allowed_globals(self) -> tuple[Any, ...]:
        """Classes and functions that objects may name besides the plain ones."""


def _find_location(source: Any) -> str | os.PathLike[str] | None:
    """Return the directory or URL of a checkpoint, or of a reader of it; None for a reader that has its own methods."""
    if isinstance(source, (str, os.PathLike)):
        return source
    if isinstance(source, LocatedReader) and source.location is not None:
        return source.location
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import
    from torch.distributed.checkpoint.storage import StorageReader

    if type(source) is FileSystemReader:  # a subclass may read otherwise, or elsewhere
        return source.path
    if isinstance(source, StorageReader):
        return None
    raise CheckpointingException(
        f"cannot load through a {type(source).__name__}: give the checkpoint's directory or URL, or a StorageReader of "
        "it"
    )


def _refuse_planner(planner: Any) -> None:
    """Raise unless the planner is None or torch's default one, which changes nothing: no planner is called."""
    if planner is None:
        return
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # slow to import

    if type(planner) is not DefaultLoadPlanner or not planner.flatten_state_dict:
        raise CheckpointingException(
            f"the planner {type(planner).__module__}.{type(planner).__qualname__} would not be called: the model's "
            "state dict decides what is read; leave it out, or use torch's own load_sharded_optimizer_state_dict"
        )


def _load(
    key: str,
    params: Mapping[str, torch.Tensor],
    checkpoint: OpenCheckpoint | ReaderCheckpoint,
    comm: Comm,
    phase: Callable[[str], AbstractContextManager[None]],
    *,
    shard_factored: bool,
) -> StateDict:
    index, common = checkpoint.index(), checkpoint.common()
    with phase("choosing the optimizer's state"):
        stored = find_stored_state(key, index, common)
        names = stored.parse_names(params)
    _report_unclaimed(stored, names, params, comm)
    with phase("laying out the optimizer's state"):
        shapes = {shard.key: shard.global_shape for shard in index if isinstance(shard, ShardedTensor)}
        template = LoadTemplate(_load_template(stored, names, params, shapes, shard_factored=shard_factored))
    values = checkpoint.values(template.shards)
    with phase("assembling the optimizer's state"):
        loaded = template.fill(values, {})
        found = {name: loaded.get(name, stored.entries[name]) for name in names}
        return _assemble(found, names, stored.groups, params)


def _load_template(
    stored: StoredState,
    names: Mapping[str, StateName],
    params: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Ints],
    *,
    shard_factored: bool,
) -> StateDict:
    """Return load templates for the entries that are not in the common state.

    Args:
        stored: The state.
        names: The parsed names of the entries to load.
        params: The model's parameters.
        shapes: The global shapes of all stored tensors by key.
        shard_factored: As for :func:`load_sharded_optimizer_state_dict`.
    """
    template: StateDict = {}
    for name, parsed in names.items():
        entry = stored.entries[name]
        if isinstance(entry, ShardedTensor) and parsed.kind == STATE:
            owner = str(parsed.owner)
            tensor = empty_state_tensor(
                entry.key,
                tuple(entry.global_shape),
                entry.dtype,
                parsed.slot,
                params[owner],
                shard_factored=shard_factored,
                param_shape=shapes.get(f"model.{owner}", shapes.get(owner)),
            )
            template[name] = to_sharded_state_dict({entry.key: tensor})[entry.key]
        elif isinstance(entry, ShardedBase):
            template[name] = entry
    return template


def _report_unclaimed(
    stored: StoredState, names: Mapping[str, StateName], params: Mapping[str, torch.Tensor], comm: Comm
) -> None:
    """Collective: warn of entries that belong to no parameter of any rank; raise if that is all of the state."""
    entries = sorted(name for name in stored.entries if not name.startswith(f"{OTHERS}."))
    # a pipeline stage lacks the parameters of the others: a name counts as known if any rank knows it
    claimed = comm.largest(*(name in names for name in entries))
    unclaimed = [name for name, is_claimed in zip(entries, claimed, strict=True) if not is_claimed]
    state = [name for name in entries if name.startswith(f"{STATE}.")]
    if not unclaimed:
        return
    with comm.collective_phase("choosing the optimizer's state"):
        if state and set(state) <= set(unclaimed):
            raise KeyMismatchError(
                f"the state of no parameter of the model is stored: there are {listed(state)}; the model has "
                f"{listed(sorted(params))}: pass the state dict of get_model_state_dict, whose names are those of "
                "get_optimizer_state_dict (an optimizer's own state_dict() has numbers)"
            )
    if comm.is_main:
        logger.warning(
            "optimizer state is not loaded, because no rank's model has these parameters: %s", listed(unclaimed)
        )


def _assemble(
    found: Mapping[str, Any],
    names: Mapping[str, StateName],
    groups: list[dict[str, Any]] | None,
    params: Mapping[str, torch.Tensor],
) -> StateDict:
    """Collective where :func:`rebuild_state` is: assemble the state dict, with parameters in the model's order."""
    state: dict[Any, Any] = {name: {} for name in params}
    options: dict[Any, Any] = {name: {} for name in params}
    shared: dict[str, dict[str, Any]] = {}
    rest: StateDict = {}
    with_form = {parsed.owner for parsed in names.values() if parsed.path == (FORM,)}
    for name, parsed in names.items():
        kind, owner, path = parsed
        if isinstance(owner, str) and is_group(owner):
            shared[owner] = {"values": found[name]}
            continue
        if kind == STATE and owner in with_form:
            state[owner][parsed.slot] = found[name]
            continue
        target = rest if owner is None else (state if kind == STATE else options).setdefault(owner, {})
        nested = found[name]
        for part in reversed(path):
            nested = {part: nested}
        try:
            merge(target, nested)
        except ValueError as exc:
            raise CorruptCheckpointError(f"{name} contradicts other stored values of the optimizer: {exc}") from exc
    for owner in with_form:
        state[owner] = rebuild_state(state[owner], params.get(str(owner)))
    for name, values in spread_options(shared).items():
        if name in params:
            options[name] = {**values, **options[name]}
    state = {name: slots for name, slots in state.items() if slots}
    given = {name: values for name, values in options.items() if values}
    if groups is None:
        return {**rest, STATE: state, GROUPS: group_options(given, apart=bool(state))}
    # options that are tensors are stored apart, by the group's number
    return {**rest, STATE: state, GROUPS: [{**group, **given.get(n, {})} for n, group in enumerate(groups)]}
