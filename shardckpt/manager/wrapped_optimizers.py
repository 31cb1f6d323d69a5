"""Optimizers that have another inside: which of them are saved, and options that two of them have.

Of a container (torchtitan's) or a wrapper (torchft's) the optimizers inside are saved. A wrapper that adds state of its
own (the step of PostLocalSGDOptimizer) is saved itself. A partitioning optimizer (ZeroRedundancyOptimizer) has groups
of all parameters; the one inside, which is saved, has those of this rank's, and gets their options with a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.adapters.group_options import list_options
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Sequence


def unpack_optimizers(value: Any) -> list[Any]:
    """Return the optimizers in a container (torchtitan's) or wrapper that is itself an optimizer.

    A wrapper whose state dict has entries of its own stays.
    """
    inner = _get_inner(value)
    if isinstance(inner, torch.optim.Optimizer):
        return [value] if _adds_state(value, inner) else unpack_optimizers(inner)
    return [each for item in inner for each in unpack_optimizers(item)] if inner else [value]


def list_optimizers(value: Any) -> list[Any]:
    """Return a value, and all optimizers in it at any depth."""
    inner = _get_inner(value)
    items = [inner] if isinstance(inner, torch.optim.Optimizer) else inner
    return [value, *(each for item in items for each in list_optimizers(item))]


def is_partitioning(value: Any) -> bool:
    """Return whether an inner optimizer has the state of this rank's parameters, as of ZeroRedundancyOptimizer."""
    return hasattr(value, "consolidate_state_dict") and isinstance(getattr(value, "optim", None), torch.optim.Optimizer)


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the groups of an optimizer the options of another's groups."""
    if len(source.param_groups) != len(target.param_groups):
        raise CheckpointingException(
            f"the optimizer and the one inside of it have {len(source.param_groups)} and {len(target.param_groups)} "
            "parameter groups: add groups to the outer one alone"
        )
    for one, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update(list_options(one))


def _get_inner(value: Any) -> torch.optim.Optimizer | Sequence[Any]:
    """Return the optimizer that a wrapper has inside, or those of a container; nothing of any other value."""
    if not isinstance(value, torch.optim.Optimizer):
        return ()
    inner = getattr(value, "optimizers", None) or getattr(value, "optim", None)
    return inner if isinstance(inner, (torch.optim.Optimizer, list, tuple)) else ()


def _adds_state(wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    """Return whether a wrapper's state dict has other entries than its optimizer's, as the step of an averager."""
    if type(wrapper).state_dict is torch.optim.Optimizer.state_dict:
        return False  # torchft's has none
    if any(map(is_partitioning, list_optimizers(wrapper))):
        return False  # no rank alone has the state dict
    try:
        return wrapper.state_dict().keys() != inner.state_dict().keys()
    except NotImplementedError:
        return False
