"""Load sharded optimizer state by the names and layouts of the model's state dict."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from shardckpt.adapters.forms import rebuild_state
from shardckpt.adapters.group_options import GROUPS, PARAMS, STATE, is_group, spread_options
from shardckpt.adapters.optimizer_requests import request_optimizer
from shardckpt.adapters.stored_values import find_name
from shardckpt.distributed.comm import Comm
from shardckpt.engine.load_template import LoadTemplate
from shardckpt.engine.loading import name_stored
from shardckpt.engine.locations import locate
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.errors import CheckpointingException, KeyMismatchError, listed
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.state_dict import are_equal
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from shardckpt.adapters.reader_checkpoint import ReaderCheckpoint
    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.mapping.base import StateDict
    from shardckpt.mapping.unstored import StoredNames

logger = logging.getLogger(__name__)

#: The parts of an optimizer's state dict whose keys contain names of parameters.
_NAMED = (STATE, GROUPS)


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

    torch's function splits every tensor by rows over all ranks. Here state has the layout and device of its parameter:
    for a DTensor it is a DTensor with the same mesh and placements, for a ShardedTensor a ShardedTensor, for a plain
    tensor a plain tensor. State of another shape (rows and columns of Adafactor) is replicated over that mesh, as
    torch's optimizers keep it; state whose sizes do not occur in the parameter is a plain tensor. Single numbers (step
    counts) are plain tensors on the CPU.

    State of parameters that no rank's model has is left out, and a warning names it; state of parameters that only
    other ranks have (pipeline stages) is left out without one.

    Example::

        params = get_model_state_dict(model)
        loaded = load_sharded_optimizer_state_dict(params, "optimizer", "checkpoints/step-100")
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])

    Args:
        model_state_dict: The model's tensors by full name, as ``get_model_state_dict`` gives them; they do not change.
        optimizer_key: The part of the keys before ``.state``: ``"optimizer"``.
        storage_reader: A checkpoint's directory or URL, or a reader of it. For torch's FileSystemReader and shardckpt's
            CheckpointStorageReader the engine reads their path. Any other StorageReader, including a subclass of these,
            reads and checks by its own methods; only objects are decoded here.
        planner: None or torch's DefaultLoadPlanner, which changes nothing; any other is refused.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.
        allow_globals: Classes and functions that legacy pickles in the checkpoint may name besides the plain ones.
        shard_factored: Whether factored state of a DTensor is sharded along the axes that it shares with its
            parameter, for optimizers that keep it so; else it is replicated.

    Returns:
        ``{optimizer_key: {"state": {<parameter>: {<slot>: ...}}, "param_groups": [...]}}``, whether the state was saved
        nested or flattened, for torch's ``set_optimizer_state_dict`` or FSDP1's ``optim_state_dict_to_load``. A
        parameter without stored state (frozen, or without a step yet) is absent. Groups that were stored by number are
        returned unchanged. Options that were stored by parameter (flattened) become one group for each parameter, from
        which ``set_optimizer_state_dict`` fills the optimizer's own groups. If no state is stored, that function uses
        the groups directly, so parameters with equal options share a group.

    Raises:
        KeyMismatchError: nothing is stored under ``optimizer_key``, or state of none of the model's parameters.
        ShapeMismatchError: state was saved for a parameter of another shape.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.collective_phase("reading the arguments"):
        check_annotated(load_sharded_optimizer_state_dict, locals())
        _refuse_planner(planner)
        location = _find_location(storage_reader)
        directory = None if location is None else locate(location, get_plugin_manager())
        allowed = (*allow_globals, *getattr(storage_reader, "allowed_globals", ()))
        params = {name: value for name, value in model_state_dict.items() if isinstance(value, torch.Tensor)}
    comm.agree(optimizer_key=optimizer_key, shard_factored=shard_factored, by_reader=directory is None)
    if directory is None:
        from shardckpt.adapters.reader_checkpoint import ReaderCheckpoint  # imports torch's planners: slow

        reader: Any = storage_reader
        opened = ReaderCheckpoint(reader, optimizer_key, comm, allowed)
        loaded = _load(optimizer_key, params, opened, comm, comm.local_phase, shard_factored=shard_factored)
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
    """A StorageReader of a checkpoint that the engine can read in its place."""

    @property
    def location(self) -> str | None:
        """The checkpoint's directory or URL; None for a subclass, which may read otherwise."""

    @property
    def allowed_globals(self) -> tuple[Any, ...]:
        """Classes and functions that objects may name in addition to the plain ones."""


def _find_location(source: Any) -> str | os.PathLike[str] | None:
    """Return the directory or URL from which the engine can read; None if the reader itself must read."""
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
    """Refuse a planner that could change the load, since no planner is called."""
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
    """Collective: load the optimizer's state of an open checkpoint."""
    # without the values that plain DCP stores one by one: the common state has them, too
    stored = name_stored(checkpoint.columns()._replace(values=()))
    common = checkpoint.common()
    with phase("choosing the optimizer's state"):
        values = _find_common_values(key, stored, common)
        groups = values.get(GROUPS)
        group_count = len(groups) if isinstance(groups, list) else 0  # 0: options are stored by parameter
        names = _list_names(key, stored, values, group_count)
        objects = {each[len(key) + 1 :] for each in stored.list_below(key) if each in stored.objects}
        has_place = [_has_place(name, params, objects, numbered=group_count > 0) for name in names]
    _report_unused(names, has_place, params, comm)
    with phase("laying out the optimizer's state"):
        wanted = request_optimizer(params, stored, key, groups=group_count, shard_factored=shard_factored)
        template = LoadTemplate(wanted)
    loaded = checkpoint.values(template.shards)
    with phase("assembling the optimizer's state"):
        return _assemble(template.fill(loaded, _nest_values(values, params)), params)


def _find_common_values(key: str, stored: StoredNames, common: StateDict) -> StateDict:
    """Return the optimizer's values in the common state.

    Raises:
        KeyMismatchError: There are none, and no tensor or object is stored under the optimizer's key.
    """
    values: Any = common
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    # groups alone are enough: plain SGD has no state
    if not values and not stored.list_below(key):
        keys = (*stored.tensors, *stored.objects, *map(str, common))
        names = sorted({each.split(".")[0] for each in keys})
        raise KeyMismatchError(
            f"the checkpoint has no state of an optimizer {key!r}; its top-level names are "
            f"{', '.join(names) or 'none'}: pass the part of the keys before .state as optimizer_key"
        )
    return values if isinstance(values, dict) else {}


def _walk_values(values: StateDict) -> Iterator[tuple[Any, str | None, Any]]:
    """Yield each of the optimizer's values in the common state with its part (``"state"``) and its parameter's name.

    The value is a dict of slots, or the value of one slot, whose name then follows the parameter's name after a dot.
    The name is None for a value of no parameter, such as a list of numbered groups.
    """
    for name, value in values.items():
        part, _, owner = str(name).partition(".")
        if part not in _NAMED:
            yield name, None, value
        elif owner:  # flattened: {"state.layer.weight.exp_avg": ...}
            yield part, owner, value
        elif isinstance(value, dict):  # nested: {"state": {"layer.weight": {"exp_avg": ...}}}
            yield from ((part, str(param), slots) for param, slots in value.items())
        else:
            yield part, None, value


def _list_names(key: str, stored: StoredNames, values: StateDict, group_count: int) -> list[str]:
    """Return the names of the stored state and options of parameters: ``state.layer.weight.exp_avg``.

    Options of groups belong to no parameter and are omitted. Those with a number that no group in the common state has
    stay in the list, so that they are reported as unused.
    """
    names = {each[len(key) + 1 :] for each in stored.list_below(key)}
    for part, owner, value in _walk_values(values):
        if owner is not None:
            name = f"{part}.{owner}"
            names.update([f"{name}.{slot}" for slot in value] if isinstance(value, dict) else [name])
    numbers = {*map(str, range(group_count))}

    def is_of_parameter(name: str) -> bool:
        part, _, rest = name.partition(".")
        is_of_group = part == GROUPS and (is_group(rest) or rest.partition(".")[0] in numbers)
        return part in _NAMED and bool(rest) and not is_of_group

    return sorted(filter(is_of_parameter, names))


def _has_place(name: str, params: Mapping[str, torch.Tensor], objects: Collection[str], *, numbered: bool) -> bool:
    """Return whether a stored name belongs to a parameter of this rank: one of its values, or an object of its options.

    If groups are stored by number (``numbered``), options by parameter are not read.
    """
    part, _, rest = name.partition(".")
    owner = find_name(rest, params)
    if owner is None or (numbered and part == GROUPS):
        return False
    return len(owner) < len(rest) or (part == GROUPS and name in objects)


def _report_unused(names: list[str], has_place: list[bool], params: Mapping[str, torch.Tensor], comm: Comm) -> None:
    """Collective: warn of names that fit no parameter of any rank; raise if no state fits one."""
    # a pipeline stage lacks the parameters of the others: a name counts as known if any rank knows it
    used = comm.largest(*has_place)
    unused = [name for name, is_used in zip(names, used, strict=True) if not is_used]
    if not unused:
        return
    state = [name for name in names if name.startswith(f"{STATE}.")]
    with comm.collective_phase("choosing the optimizer's state"):
        if state and set(state) <= set(unused):
            raise KeyMismatchError(
                f"no parameter of the model has stored state: the checkpoint has {listed(state)}; the model has "
                f"{listed(sorted(params))}: pass the state dict of get_model_state_dict, which has the names of "
                "get_optimizer_state_dict (an optimizer's own state_dict() has numbers)"
            )
    if comm.is_main:
        logger.warning(
            "optimizer state is not loaded, because no rank's model has a parameter or group for it: %s", listed(unused)
        )


def _nest_values(values: StateDict, params: Mapping[str, torch.Tensor]) -> StateDict:
    """Return the values of the common state nested as the load template is, without other parameters' values."""
    nested: StateDict = {}
    for part, rest, value in _walk_values(values):
        if rest is None:
            nested[part] = value
        elif owner := find_name(rest, params):
            slot = rest[len(owner) + 1 :]
            if slot or isinstance(value, dict):
                slots = nested.setdefault(part, {}).setdefault(owner, {})
                if part == GROUPS:  # spread_options looks for options one level deeper
                    slots = slots.setdefault("values", {})
                slots.update({slot: value} if slot else value)
    return nested


def _assemble(loaded: StateDict, params: Mapping[str, torch.Tensor]) -> StateDict:
    """Collective where :func:`rebuild_state` is: return the state dict, with parameters in the model's order."""
    slots = {name: loaded.get(STATE, {}).get(name) for name in params}
    state = {name: rebuild_state(values, params[name]) for name, values in slots.items() if values}
    groups = loaded.get(GROUPS, {})
    if not isinstance(groups, list):
        options = spread_options(groups)
        by_parameter = {name: options[name] for name in params if options.get(name)}
        groups = _group_options(by_parameter, one_each=bool(state))
    return {**loaded, STATE: state, GROUPS: groups}


def _group_options(options: dict[str, dict[str, Any]], *, one_each: bool) -> list[dict[str, Any]]:
    """Return groups of parameters whose options were stored by parameter, with the names under ``params``.

    With ``one_each`` every parameter has its own group, from which torch's ``set_optimizer_state_dict`` can fill any
    grouping; else parameters with equal options share a group.
    """
    groups: list[dict[str, Any]] = []
    for name, values in options.items():
        same = None if one_each else next((group for group in groups if _has_options(group, values)), None)
        if same is None:
            groups.append({**values, PARAMS: [name]})
        else:
            same[PARAMS].append(name)
    return groups


def _has_options(group: dict[str, Any], options: dict[str, Any]) -> bool:
    """Return whether a group has exactly these options."""
    return group.keys() - {PARAMS} == options.keys() and all(are_equal(group[key], options[key]) for key in options)
