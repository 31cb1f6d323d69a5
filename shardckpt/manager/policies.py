"""Policies of a configuration: small dataclasses that JSON can have, or functions of the user's own."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import core_schema

from shardckpt.errors import ask_nearest


class PolicyKind:
    """One kind of policies: to keep steps, or to save them.

    ``what`` is the expected value in errors, with a built-in policy as the example of the form in a file.
    """

    def __init__(self, *built_in: type[Any], what: str, example: Any) -> None:
        self._built_in = {each.__name__: each for each in built_in}
        self._what = f"{what}; in JSON {json.dumps(self.describe(example))}"

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        """Return how a setting with such policies is parsed, and described."""
        describe_all = core_schema.plain_serializer_function_ser_schema(
            lambda policies: [*map(self.describe, policies)]
        )
        return core_schema.no_info_plain_validator_function(self.parse_all, serialization=describe_all)

    def __get_pydantic_json_schema__(self, _core: Any, _handler: Any) -> dict[str, Any]:
        """Return the JSON schema of a setting with such policies, as :meth:`describe` returns them."""
        return {"type": "array", "items": {"anyOf": [_make_schema(each) for each in self._built_in.values()]}}

    def parse(self, given: Any) -> Any:
        """Return a policy of a configuration.

        It is a callable of one argument, or the dict that :meth:`describe` returned for a built-in policy; else it is a
        ValueError.
        """
        if isinstance(given, dict) and isinstance(given.get("policy"), str) and given["policy"] in self._built_in:
            options = {name: value for name, value in given.items() if name != "policy"}
            return self._built_in[given["policy"]](**options)
        if not callable(given) or isinstance(given, type) or not _takes_one(given):
            name = given.get("policy") if isinstance(given, dict) else given
            raise ValueError(f"{given!r:.100} is not {self._what}; {ask_nearest(name, self._built_in)}".rstrip("; "))
        return given

    def parse_all(self, given: Any) -> tuple[Any, ...]:
        """Return the policies of a setting, which has one or a list of them.

        The ValueError has a line for each that is none.
        """
        found, faults = [], []
        for each in given if isinstance(given, (list, tuple)) else [given]:
            try:
                found.append(self.parse(each))
            except ValueError as exc:  # noqa: PERF203 - there are few
                faults.append(str(exc))
        if faults:
            raise ValueError("\n".join(faults))
        return tuple(found)

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


def _make_schema(policy: type[Any]) -> dict[str, Any]:
    schema = TypeAdapter(policy).json_schema()
    return schema | {
        "properties": {"policy": {"const": policy.__name__, "type": "string"}, **schema.get("properties", {})},
        "required": ["policy", *schema.get("required", ())],
    }


def _takes_one(function: Any) -> bool:
    """Return whether a function can be called with one argument; True where it does not say."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a built-in function nothing is known
        return True
    return True
