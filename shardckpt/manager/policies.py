"""Policies of a configuration: small dataclasses that JSON can have, or functions of the user's own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse_policy(given: Any, built_in: Mapping[str, type[Any]], what: str) -> Any:
    """Return a policy of a configuration.

    Args:
        given: A callable, or what :func:`describe_policy` returned for a built-in policy.
        built_in: The classes of the built-in policies, by name.
        what: What is expected, for the error.

    Returns:
        The callable, or the built-in policy.

    Raises:
        ValueError: ``given`` is neither.
    """
    if isinstance(given, dict) and isinstance(given.get("policy"), str) and given["policy"] in built_in:
        options = {name: value for name, value in given.items() if name != "policy"}
        return built_in[given["policy"]](**options)
    if not callable(given) or isinstance(given, type):
        raise ValueError(f"{given!r:.100} is not {what}")
    return given


def describe_policy(policy: Any, built_in: Mapping[str, type[Any]]) -> Any:
    """Return a policy as JSON: the options of a built-in one, the name of another, which cannot be read back."""
    if type(policy) in built_in.values():
        options = dataclasses.asdict(policy)
        return {
            "policy": type(policy).__name__,
            **{name: sorted(value) if isinstance(value, frozenset) else value for name, value in options.items()},
        }
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}.{named.__qualname__}"
