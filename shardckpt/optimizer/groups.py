"""Rebuild an optimizer's parameter groups from stored options."""

from __future__ import annotations

from typing import Any

from shardckpt.state_dict import are_equal


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
        same = None if apart else next((group for group in groups if _has_options(group, values)), None)
        if same is None:
            groups.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return groups


def _has_options(group: dict[str, Any], options: dict[str, Any]) -> bool:
    """Return whether the options of a group are these."""
    return group.keys() - {"params"} == options.keys() and all(are_equal(group[key], options[key]) for key in options)
