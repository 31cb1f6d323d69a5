"""State dicts, modules and optimizers as what a save and a load take; and what was loaded handed back to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.adapters.leaves import describe_leaf, describe_nest, describe_object
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

    A DTensor, or a ShardedTensor of torch's, becomes its pieces of the global tensor: a load fills them and gives the
    tensor itself back. Any other tensor is whole on every rank that has it, and the lowest of these writes it.

    A state dict keeps its form, and its keys are the path in it, joined by dots; what is no tensor stays: common state,
    and shards described already. Of modules the keys are the full names of torch's state-dict API, without what
    wrappers (checkpoint wrappers, torch.compile, FSDP, DDP) put into them; what is no tensor is stored once a name.
    With optimizers the result is ``{"model": ..., "optimizer": ...}`` and keys are ``model.<name>``,
    ``optimizer.state.<name>.exp_avg`` and, for the options of its group, ``optimizer.param_groups.<name>``. Hand what
    was loaded to :func:`load_into`.

    A parameter may have no state yet: no step was made, or it never had a gradient (an unused branch, an expert that no
    token reached). Then a save stores none, and a load leaves it out where none is stored: the optimizer makes it at
    the parameter's next step, as it would have. A load fills what is stored, whether the optimizer has state of the
    parameter already or not. State of which a part is missing is an error.

    Args:
        model_or_dict: A nest of dicts and lists, a module, or a list of the modules of this rank (pipeline or virtual
            stages); it stays as it is.
        optimizers: Of the modules; each has parameters of one of them.
        prefix: Put before every key as it is: ``"model."``.
        check_replicas: Whether a save compares what several ranks have under one key without a mesh to say that these
            are replicas, and raises where values differ; it reads all of them. Without, the lowest rank's is saved
            where any rank's will do: vectors and scalars (BatchNorm's statistics), objects, a module's buffers. A
            weight, of two and more axes, of which more than half of 32 elements spread over it differ between ranks is
            still an error: it is no copy (an expert of this rank's), and the others' would be lost.

    Raises:
        ShardingError: two modules or two optimizers have different things under one name, or arguments do not fit.
    """
    replicated: Replicated = True if check_replicas else "sampled"
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ShardingError(
                f"expected an optimizer, got a {type(optimizer).__name__}: optimizers are passed one by one, and "
                "prefix= by its name"
            )
    if isinstance(model_or_dict, Mapping):
        if optimizers:
            raise ShardingError("optimizers are described with their modules; put an optimizer's state into the dict")
        return {k: describe_nest(v, f"{prefix}{k}", replicated, objects=False) for k, v in model_or_dict.items()}
    return _describe_modules(model_or_dict, optimizers, prefix, replicated)


def load_into(
    loaded: StateDict,
    model_or_parts: Module | Sequence[Module],
    *optimizers: Optimizer,
    strict: bool = True,
) -> None:
    """Hand what was loaded to the modules and optimizers that were described, options of groups (lr, betas) included.

    Args:
        loaded: What ``load`` gave for ``to_sharded_state_dict(model_or_parts, *optimizers)``.
        model_or_parts: The same modules.
        optimizers: The same optimizers.
        strict: Whether everything must have been loaded; else what was not stays as it is.

    Raises:
        KeyMismatchError: something was not loaded; modules and optimizers stay as they are.
        CheckpointingException: parameters of one group of an optimizer were saved with different options, or what was
            loaded is of another form.
    """
    from shardckpt.adapters import handing_back, modules

    parts = modules.parts_of(model_or_parts)
    _check_form(loaded, with_optimizers=bool(optimizers))
    model, optimizer = (loaded["model"], loaded["optimizer"]) if optimizers else (loaded, {})
    options = {name: _options(values) for name, values in optimizer.get("param_groups", {}).items()}
    groups = [handing_back.groups_of(parts, each, number) for number, each in enumerate(optimizers)]
    if strict:
        trained = {name for each in groups for group in each for name in group["params"]}
        _refuse(modules.model_state(parts).keys() - model.keys(), "model")
        _refuse(trained - options.keys(), "optimizer")
    filled = [[handing_back.with_options(group, options) for group in each] for each in groups]
    for part in parts:
        handing_back.set_model(part, model)
    for number, each in enumerate(optimizers):
        handing_back.set_optimizer(modules.owner(parts, each, number), each, optimizer.get("state", {}), filled[number])


def _describe_modules(
    model: Module | Sequence[Module], optimizers: Sequence[Optimizer], prefix: str, replicated: Replicated
) -> ShardedStateDict:
    from shardckpt.adapters import modules  # torch's state-dict API is slow to import

    parts = modules.parts_of(model)
    values = modules.model_state(parts)
    buffers = modules.buffers_among(values, parts) if replicated == "sampled" else frozenset()

    def described_model(prefix: str) -> ShardedStateDict:
        kinds: dict[str, Replicated] = dict.fromkeys(buffers, "unchecked")
        return {n: describe_leaf(value, f"{prefix}{n}", kinds.get(n, replicated)) for n, value in values.items()}

    if not optimizers:
        return described_model(prefix)
    states, options = modules.optimizer_state(parts, optimizers)
    state, groups = f"{prefix}optimizer.state", f"{prefix}optimizer.param_groups"

    def described(found: dict[str, Any]) -> dict[str, Any]:
        return describe_nest(found, state, replicated, objects=True)  # type: ignore[no-any-return]

    def lacking() -> dict[str, Any]:
        made = modules.initial_state(parts, optimizers)
        return described({name: values for name, values in made.items() if name not in states})

    return {
        "model": described_model(f"{prefix}model."),
        "optimizer": {
            "state": OptionalEntries(described(states), f"{state}.", lacking),
            "param_groups": {n: _describe_options(o, f"{groups}.{n}", replicated) for n, o in options.items()},
        },
    }


def _describe_options(options: dict[str, Any], key: str, replicated: Replicated) -> dict[str, Any]:
    """The options of a parameter's group: what is no tensor as one object; a load must not fill the live tensors."""
    tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in options.items() if name not in tensors}
    copies = {n: describe_leaf(tensor.detach().clone(), f"{key}.{n}", replicated) for n, tensor in tensors.items()}
    return {"values": describe_object(plain, key, replicated), **({"tensors": copies} if copies else {})}


def _check_form(loaded: StateDict, *, with_optimizers: bool) -> None:
    """Whether it is what the description of these modules and optimizers is loaded as."""
    has_both = {"model", "optimizer"} <= loaded.keys()
    if with_optimizers and not has_both:
        raise ShardingError(
            "what was loaded has no model and optimizer: describe both, to_sharded_state_dict(model, optimizer)"
        )
    if has_both and not with_optimizers and all(isinstance(part, dict) for part in loaded.values()):
        raise ShardingError("what was loaded has an optimizer, too: pass the optimizers, or loaded['model'] alone")
    if has_both and not isinstance(loaded["optimizer"].get("param_groups", {}), dict):
        raise ShardingError(
            "the optimizer's part is not of to_sharded_state_dict(model, optimizer): hand a state dict of torch's form "
            "back by torch's set_model_state_dict and set_optimizer_state_dict"
        )


def _options(loaded: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`_describe_options` on what was loaded."""
    return {**loaded.get("values", {}), **loaded.get("tensors", {})}


def _refuse(missing: Collection[str], what: str) -> None:
    if missing:
        raise KeyMismatchError(
            f"the {what} has parameters that are not in what was loaded: {listed(sorted(missing))}; "
            "load with to_sharded_state_dict of the same modules and optimizers, or pass strict=False to keep theirs"
        )


__all__ = ["load_into", "to_sharded_state_dict"]
