"""Describe state dicts, modules and optimizers for a save or a load, and restore what was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.adapters.leaves import describe_leaf, describe_object, describe_tree
from shardckpt.errors import KeyMismatchError, ShardingError, listed
from shardckpt.mapping import OptionalEntries

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

    from shardckpt.mapping import Replicated, ShardedStateDict, StateDict


def to_sharded_state_dict(
    model_or_dict: Module | Sequence[Module] | Mapping[Any, Any],
    *optimizers: Optimizer,
    prefix: str = "",
    check_replicas: bool = True,
) -> ShardedStateDict:
    """Describe a state dict, or a model and its optimizers, so that they can be saved, or loaded in place.

    A DTensor, or torch's ShardedTensor, becomes its shards of the global tensor: a load fills them in place and returns
    the tensor itself. Any other tensor counts as replicated on all ranks that have it; the lowest of these writes it.

    A state dict keeps its structure, and the key of a leaf is its path, joined by dots. Leaves that are not tensors
    stay: they are common state, or shards that are described already.

    For modules, keys are the full names of torch's state-dict API, without the prefixes of wrappers (checkpoint
    wrappers, torch.compile, FSDP, DDP). With optimizers, the result is ``{"model": ..., "optimizer": ...}``, and keys
    are ``model.<name>``, ``optimizer.state.<name>.exp_avg`` and, for the options of the parameter's group,
    ``optimizer.param_groups.<name>``. Values that are not tensors are stored as objects, one for each name.

    A parameter may have no optimizer state yet: no step was made, or it never had a gradient (an unused branch, an
    expert that no token reached). Then a save stores none, and a load that finds none leaves it out; the optimizer
    makes it at the parameter's next step. A load fills stored state whether or not the optimizer has state of the
    parameter already. If only a part of a parameter's state is stored, the load fails.

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
            the others.

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
        return {k: describe_tree(v, f"{prefix}{k}", replicated, objects=False) for k, v in model_or_dict.items()}
    return _describe_modules(model_or_dict, optimizers, prefix, replicated)


def load_into(
    loaded: StateDict,
    model_or_parts: Module | Sequence[Module],
    *optimizers: Optimizer,
    strict: bool = True,
) -> None:
    """Restore what was loaded into modules and optimizers, with the options of their groups (lr, betas).

    Args:
        loaded: What ``load`` returned for ``to_sharded_state_dict(model_or_parts, *optimizers)``.
        model_or_parts: The same modules.
        optimizers: The same optimizers.
        strict: Whether every parameter must have been loaded; if False, the others keep their values.

    Raises:
        KeyMismatchError: a parameter was not loaded; modules and optimizers do not change.
        CheckpointingException: parameters of one group were saved with different options, or ``loaded`` does not have
            the structure of ``to_sharded_state_dict``.
    """
    from shardckpt.adapters import modules, restore

    parts = modules.as_parts(model_or_parts)
    _check_structure(loaded, with_optimizers=bool(optimizers))
    model, optimizer = (loaded["model"], loaded["optimizer"]) if optimizers else (loaded, {})
    options = {name: _options(values) for name, values in optimizer.get("param_groups", {}).items()}
    groups = [restore.get_param_groups(parts, each, number) for number, each in enumerate(optimizers)]
    if strict:
        trained = {name for each in groups for group in each for name in group["params"]}
        _refuse(modules.get_model_tensors(parts).keys() - model.keys(), "model")
        _refuse(trained - options.keys(), "optimizer")
    filled = [[restore.apply_options(group, options) for group in each] for each in groups]
    # everything is checked above, before the first module changes
    for part in parts:
        restore.set_model(part, model)
    for number, each in enumerate(optimizers):
        restore.set_optimizer(modules.find_owner(parts, each, number), each, optimizer.get("state", {}), filled[number])


def _describe_modules(
    model: Module | Sequence[Module], optimizers: Sequence[Optimizer], prefix: str, replicated: Replicated
) -> ShardedStateDict:
    from shardckpt.adapters import modules  # torch's state-dict API is slow to import

    parts = modules.as_parts(model)
    values = modules.get_model_tensors(parts)
    # buffers may differ between ranks (statistics of BatchNorm): any rank's will do
    buffers = modules.find_buffers(values, parts) if replicated == "sampled" else frozenset()

    def describe_model(prefix: str) -> ShardedStateDict:
        kinds: dict[str, Replicated] = dict.fromkeys(buffers, "unchecked")
        return {n: describe_leaf(value, f"{prefix}{n}", kinds.get(n, replicated)) for n, value in values.items()}

    if not optimizers:
        return describe_model(prefix)
    states, options = modules.get_optimizer_state(parts, optimizers)
    state, groups = f"{prefix}optimizer.state", f"{prefix}optimizer.param_groups"

    def describe_state(values: dict[str, Any]) -> dict[str, Any]:
        return describe_tree(values, state, replicated, objects=True)  # type: ignore[no-any-return]

    def describe_lacking_state() -> dict[str, Any]:
        made = modules.make_initial_state(parts, optimizers)
        return describe_state({name: values for name, values in made.items() if name not in states})

    return {
        "model": describe_model(f"{prefix}model."),
        "optimizer": {
            "state": OptionalEntries(describe_state(states), f"{state}.", describe_lacking_state),
            "param_groups": {n: _describe_options(o, f"{groups}.{n}", replicated) for n, o in options.items()},
        },
    }


def _describe_options(options: dict[str, Any], key: str, replicated: Replicated) -> dict[str, Any]:
    """Describe the options of a parameter's group: plain values as one object, tensors one by one."""
    tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in options.items() if name not in tensors}
    # copies, so that a load does not fill the live tensors before load_into has checked what was loaded
    copies = {n: describe_leaf(tensor.detach().clone(), f"{key}.{n}", replicated) for n, tensor in tensors.items()}
    return {"values": describe_object(plain, key, replicated), **({"tensors": copies} if copies else {})}


def _check_structure(loaded: StateDict, *, with_optimizers: bool) -> None:
    """Raise unless ``loaded`` has the structure that :func:`to_sharded_state_dict` gives."""
    has_both = {"model", "optimizer"} <= loaded.keys()
    if with_optimizers and not has_both:
        raise ShardingError(
            "the loaded state dict has no 'model' and 'optimizer': load to_sharded_state_dict(model, optimizer)"
        )
    if has_both and not with_optimizers and all(isinstance(part, dict) for part in loaded.values()):
        raise ShardingError("the loaded state dict has an optimizer: pass the optimizers too, or loaded['model'] alone")
    if has_both and not isinstance(loaded["optimizer"].get("param_groups", {}), dict):
        raise ShardingError(
            "the optimizer's part does not come from to_sharded_state_dict(model, optimizer): restore a state dict of "
            "torch's structure with torch's set_model_state_dict and set_optimizer_state_dict"
        )


def _options(loaded: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`_describe_options` on what was loaded."""
    return {**loaded.get("values", {}), **loaded.get("tensors", {})}


def _refuse(missing: Collection[str], what: str) -> None:
    if missing:
        raise KeyMismatchError(
            f"the {what} has parameters that were not loaded: {listed(sorted(missing))}; "
            "load with to_sharded_state_dict of the same modules and optimizers, or pass strict=False to keep theirs"
        )


__all__ = ["load_into", "to_sharded_state_dict"]
