"""Wrong settings and arguments, which pydantic finds, in our words: the given value, and the expected one."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BeforeValidator, ValidationError

from shardckpt.errors import ConfigurationError, SettingFault, ask_nearest, show_given
from shardckpt.storage.store_errors import mask_password

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_C = TypeVar("_C", bound=type[Any])

#: The expected value, by the type of pydantic's fault, or its first word.
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "True or False",
    "string": "text",
    "tuple": "a list",
    "frozen": "a list",
    "literal": "{expected}",
    "enum": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge} or more",
}
#: The expected value of a setting, where the fault's type does not say it.
_EXPECTED_OF = {
    **dict.fromkeys(("folder", "initial_load_path", "hf_assets_path"), "a path or URL"),
    "latest_pointer": "the name of a file, as 'latest'",
    **dict.fromkeys(("best_metric", "metric"), "the name of a metric, as 'loss'"),
    "hf_mapping": "the name of a key mapping, as 'llama', or the path of a file",
    "exclude_from_last_save": "names of tensors, as ('freqs_cis',)",
    "exclude_from_loading": "names of states, as ('lr_scheduler',)",
    "keep_options": "names of options, as ('lr', 'weight_decay')",
    "rename": "names by name, as {'net': 'model'}",
    "strategy": "a backend, as 'safetensors', 'safetensors@1' or ('safetensors', 1)",
    "memory_budget": "bytes, as 2**30 or '2GiB'",
}


#: The right word in a text of :func:`ask_nearest`: nested errors, also of plugins, have it in this form alone.
_NEAREST = re.compile(r"did you mean (.+?)\?")

#: Returns a hint about a setting that does not exist, ``""`` if there is none, and its right name, if any.
Hint = Callable[[str], tuple[str, str | None]]


def list_faults(
    error: ValidationError,
    given: Mapping[str, Any],
    names: Sequence[str],
    find_hint: Hint = lambda _: ("", None),
) -> list[SettingFault]:
    """Return the faults that pydantic found in the settings.

    Args:
        error: The error of the settings' class.
        given: The settings by name.
        names: All settings that exist, in the order of a call without names.
        find_hint: As :data:`Hint`.
    """
    found = [fault for each in error.errors() for fault in _describe_fault(each, given, names, find_hint)]
    return [*{fault.message: fault for fault in found}.values()]


def make_fault(given: Mapping[str, Any], setting: str, message: str, suggestion: str | None = None) -> SettingFault:
    """Return a fault with the given value, without a URL's password, and the suggestion in its text."""
    value, nearest = given.get(setting), _NEAREST.search(message)
    shown = mask_password(value) if isinstance(value, str) else value
    return SettingFault(setting, shown, message, suggestion or (nearest and nearest[1]))


def describe_unknown(
    name: str, names: Sequence[str], find_hint: Hint, given: Mapping[str, Any] = MappingProxyType({})
) -> SettingFault:
    """Return the fault of a setting that does not exist; the arguments are as for :func:`list_faults`."""
    hint, ours = find_hint(name)
    hint = hint or ask_nearest(name, [each for each in names if each not in given]).rstrip()
    return make_fault(given, name, f"there is no setting {name!r}{f': {hint}' if hint else ''}", ours)


def _describe_fault(
    fault: Mapping[str, Any], given: Mapping[str, Any], names: Sequence[str], find_hint: Hint
) -> Sequence[SettingFault]:
    if not fault["loc"] and isinstance(error := fault.get("ctx", {}).get("error"), ConfigurationError):
        return error.faults  # of several settings, which contradict each other
    first, *inner = fault["loc"] or ("",)  # for a union, the rest names one of its types; for a list, a position
    # an argument that was given without its name has its place
    name = first if isinstance(first, str) else "".join(names[first : first + 1])
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return [describe_unknown(name, names, find_hint, given)]
    if fault["type"] != "value_error":
        return [make_fault(given, name, _describe_value(fault, name, inner, names))]
    texts = str(fault["msg"]).removeprefix("Value error, ").split("\n")
    return [make_fault(given, name, text if text.startswith(name) else f"{name}: {text}") for text in texts]


def _describe_value(fault: Mapping[str, Any], name: str, inner: Sequence[Any], names: Sequence[str]) -> str:
    kind, given = str(fault["type"]), fault["input"]
    if kind == "unexpected_positional_argument":
        return f"{show_given(given)} is one argument too many: it takes {', '.join(names)}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "multiple_argument_values":
        return f"{name} is given twice: by its place and by its name"
    usual = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0], "another value")
    what = _EXPECTED_OF.get(name) or usual.format_map(fault.get("ctx") or {})
    question = ask_nearest(given, re.findall("'([^']*)'", what)) if kind in ("literal_error", "enum") else ""
    place = f"an item of {name} is " if inner and isinstance(inner[0], int) else f"{name}="
    return f"{place}{show_given(given)}: {question}expected {what}"


def refuse_truth(given: Any) -> Any:
    """Refuse True and False for a number: YAML reads yes, on and true as True, which Python takes for 1."""
    if isinstance(given, bool):
        raise ValueError(f"expected a number, not {given}")
    return given


#: For numbers of pydantic's models and dataclasses.
NUMBER = BeforeValidator(refuse_truth)


def explain_faults(policy: _C) -> _C:
    """Let a dataclass of pydantic's raise a ConfigurationError of our words; a decorator."""
    init = policy.__init__
    names = [field.name for field in dataclasses.fields(policy)]

    @functools.wraps(init)
    def explained(self: Any, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except ValidationError as exc:
            given = {**dict(zip(names, args, strict=False)), **options}
            raise ConfigurationError.list_all(f"{policy.__name__}: ", list_faults(exc, given, names)) from exc

    policy.__init__ = explained
    return policy
