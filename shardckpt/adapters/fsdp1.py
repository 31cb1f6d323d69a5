"""State of optimizers whose parameters torch alone can name or lay out: flat ones of FSDP1, classes that rename."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardckpt.tensors.torch_private import step_without_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.nn import Module
    from torch.optim import Optimizer


def get_state(owner: Module, optimizer: Optimizer) -> Any:
    """Collective: return ``get_optimizer_state_dict``'s result; an optimizer without state gets none by it."""
    with _suppress_initial_state(optimizer):
        return get_optimizer_state_dict(owner, optimizer)


def make_state(owner: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Collective: return the state by name, with new state of parameters that have none.

    Flat parameters do not show its shapes. Its values are not meaningful, and the optimizer does not keep it.
    """
    with _temporary_state(optimizer):
        return get_state(owner, optimizer)["state"]  # type: ignore[no-any-return]


def set_state(owner: Module, optimizer: Optimizer, states: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Collective: give an optimizer its state and its groups' options, by ``set_optimizer_state_dict``."""
    mine = {name: dict(states[name]) for group in groups for name in group["params"] if name in states}
    with _suppress_initial_state(optimizer):
        set_optimizer_state_dict(
            owner,
            optimizer,
            {"state": mine, "param_groups": groups},  # type: ignore[dict-item]
            options=StateDictOptions(strict=False),
        )


@contextmanager
def _suppress_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch's state-dict functions from making state for an optimizer that has none."""
    # They make it by a step with a learning rate of 0. This takes memory, and it is not the true initial state: Rprop
    # and NAdam remember the learning rate.
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    is_fresh = not optimizer.state
    if is_fresh:
        # torch makes state only for an optimizer whose state is empty
        optimizer.state.update({param: {} for param in params})
    try:
        yield
    finally:
        if is_fresh and not any(optimizer.state.values()):
            optimizer.state.clear()


@contextmanager
def _temporary_state(optimizer: Optimizer) -> Iterator[None]:
    """Make state of parameters that have none, for the block: by a step with gradients and a learning rate of 0.

    Torch makes it in the same way.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    state = dict(optimizer.state)
    options = [dict(group) for group in optimizer.param_groups]
    # a step may change options that are tensors in place
    tensors = [(value, value.clone()) for group in options for value in group.values() if torch.is_tensor(value)]
    try:
        for param in params:
            # none where this rank has no elements of a parameter, as of FSDP1: Adafactor would divide by their number
            is_new = param.requires_grad and param.numel() and not state.get(param)
            param.grad = torch.zeros_like(param) if is_new else None
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        step_without_hooks(optimizer)
        yield
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(saved)
        for value, saved_value in tensors:
            value.copy_(saved_value)
        optimizer.state.clear()
        optimizer.state.update(state)
