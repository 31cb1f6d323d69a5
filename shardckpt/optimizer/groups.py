"""Rebuild an optimizer's parameter groups from stored options."""

from __future__ import annotations

from typing import Any

import torch


def merge_tensor_options(groups: list[dict[str, Any]], tensors: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups that were stored by number, with the options that were stored apart, as tensors."""
    return [{**group, **tensors.get(number, {})} for number, group in enumerate(groups)]


def group_options(options: dict[str, dict[str, Any]], *, apart: bool) -> list[dict[str, Any]]:
    """Group parameters whose options were stored by parameter.

    Args:
        options: Options by the parameter's full name.
        apart: Whether each parameter gets its own group, from which torch's ``set_optimizer_state_dict`` can fill any
            grouping; else parameters with equal options share a group.

    Returns:
        The groups, with parameter names under ``params``.
    """
    groups: list[dict[str, Any]] = []
    for name, values in options.items():
        # the key params only makes both dicts have the same keys: its value is not compared
        same = None if apart else next((group for group in groups if _is_equal(group, {**values, "params": 0})), None)
        if same is None:
            groups.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return groups


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two groups have the same options."""
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one if key != "params")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


__all__ = ["group_options", "merge_tensor_options"]
