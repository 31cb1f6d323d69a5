"""The options of an optimizer's parameter groups, put together again."""

from __future__ import annotations

from typing import Any

import torch


def with_tensors(groups: list[dict[str, Any]], tensors: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that were stored whole, with those of their options that were stored as tensors."""
    return [{**group, **tensors.get(number, {})} for number, group in enumerate(groups)]


def regrouped(options: dict[str, dict[str, Any]], *, apart: bool) -> list[dict[str, Any]]:
    """Groups for options that were stored by parameter.

    Args:
        options: By the parameter's full name.
        apart: Whether each parameter gets a group of its own, from which torch's ``set_optimizer_state_dict`` fills any
            grouping; else those with equal options share one.
    """
    found: list[dict[str, Any]] = []
    for name, values in options.items():
        same = None if apart else next((group for group in found if _is_equal(group, {**values, "params": 0})), None)
        if same is None:
            found.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return found


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two groups have the same options."""
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one if key != "params")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


__all__ = ["regrouped", "with_tensors"]
