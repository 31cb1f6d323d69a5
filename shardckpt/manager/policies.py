"""Policies of a configuration: small dataclasses that JSON can have, or functions of the user's own."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from shardckpt.errors import ask_nearest


class PolicyKind:
    """One kind of policies: to keep steps, or to save them.

    Args:
        built_in: The classes of its built-in policies.
        what: What is expected, for the error about something else.
    """

    def __init__(self, *built_in: type[Any], what: str) -> None:
        self._built_in = {each.__name__: each for each in built_in}
        self._what = what

    def parse(self, given: Any) -> Any:
        """Return a policy of a configuration.

        Args:
            given: A callable of one argument, or what :meth:`describe` returned for a built-in policy.

        Returns:
            The callable, or the built-in policy.

        Raises:
            ValueError: ``given`` is neither.
        """
        if isinstance(given, dict) and isinstance(given.get("policy"), str) and given["policy"] in self._built_in:
            options = {name: value for name, value in given.items() if name != "policy"}
            return self._built_in[given["policy"]](**options)
        if not callable(given) or isinstance(given, type) or not _takes_one(given):
            name = given.get("policy") if isinstance(given, dict) else given
            raise ValueError(f"{given!r:.100} is not {self._what}; {ask_nearest(name, self._built_in)}".rstrip("; "))
        return given

    def describe(self, policy: Any) -> Any:
        """Return a policy as JSON: the options of a built-in one, the name of another, which cannot be read back."""
        if type(policy) in self._built_in.values():
            options = dataclasses.asdict(policy)
            return {
                "policy": type(policy).__name__,
                **{name: sorted(value) if isinstance(value, frozenset) else value for name, value in options.items()},
            }
        named = policy if hasattr(policy, "__qualname__") else type(policy)
        return f"{named.__module__}.{named.__qualname__}"


def _takes_one(function: Any) -> bool:
    """Return whether a function can be called with one argument; True where it does not say."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a built-in function nothing is known
        return True
    return True
