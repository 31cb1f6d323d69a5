"""Arguments of public functions, compared with the annotations of these functions."""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from shardckpt.errors import CheckpointingException, show_given


class _Kind(NamedTuple):
    """A kind of arguments: its name in errors, and whether a value is of it."""

    expected: str
    accepts: Callable[[Any], bool]


def _is_bool(value: object) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # numpy's, too, which is not imported for it


def _read_index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _is_flag(value: Any) -> bool:
    if value is None or _is_bool(value):  # None, as Megatron's parser has it of --async-save that is not given
        return True
    # as int(os.environ["ASYNC"]) is, and a number that ranks have reduced
    return _read_index(value) in (0, 1) or (isinstance(value, Real) and value in (0, 1))


def is_integer(value: Any) -> bool:
    """Return whether a value is a whole number: numpy's and a tensor of one are, a flag is none."""
    return not _is_bool(value) and _read_index(value) is not None


def _are_texts(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return False
    # an iterator that can be used only once is its user's
    return not isinstance(value, Collection) or all(isinstance(each, str) for each in value)


_TEXTS = _Kind("a list of texts", _are_texts)
_LIST = _Kind("a list", lambda value: isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping))
_DICT = _Kind("a dict", lambda value: isinstance(value, Mapping))
#: The kinds by annotation; and by the text before the brackets of one.
_KINDS = {
    "None": _Kind("None", lambda value: value is None),
    "bool": _Kind("True or False", _is_flag),
    "int": _Kind("a whole number", is_integer),
    "float": _Kind("a number", lambda value: isinstance(value, Real) and not _is_bool(value)),
    "str": _Kind("one text", lambda value: isinstance(value, str)),
    "Collection[str]": _TEXTS,
    "Collection": _LIST,
    "Iterable[str]": _TEXTS,
    "Sequence[str]": _TEXTS,
    "Mapping": _DICT,
    "StateDict": _DICT,
    "dict": _DICT,
}

_Rule: TypeAlias = "tuple[str, tuple[_Kind, ...]]"


def check_annotated(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise CheckpointingException for an argument that does not match its parameter's annotation.

    A public function calls it with its ``locals()`` before all else, in a phase: all ranks raise the error that one of
    them raises. A decorator would raise on the rank alone, and the others would wait for it.

    Flags, numbers, texts, lists and dicts are checked: "false", as of a variable, would be true, and a text in
    the place of a list would stand for its letters. Integers are numpy's, too, and tensors of one. No dict or iterator
    is iterated over. An argument with another annotation, or with a reader that says more (``int | str``: a size; a
    dict of new names), is left to that, as paths are.

    Args:
        function: The function, or method.
        given: Its arguments by name, all or only some to be checked; other names are ignored.
    """
    for name, kinds in _read_rules(function):
        if name not in given:
            continue
        value = given[name]
        if not any(kind.accepts(value) for kind in kinds):
            call = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            shown = reprlib.repr(value) if isinstance(value, list | tuple | set) else show_given(value)
            raise CheckpointingException(f"{call}: {name}={shown}: {_name_expected(kinds, value)}")


def _name_expected(kinds: tuple[_Kind, ...], value: object) -> str:
    """Return the text of an error for a value that is of none of these kinds."""
    expected = "expected " + " or ".join(kind.expected for kind in kinds if kind.expected != "None")
    return f"{expected}, such as [{value!r:.100}]" if kinds[0] is _TEXTS and isinstance(value, str) else expected


@functools.cache
def _read_rules(function: Callable[..., Any]) -> tuple[_Rule, ...]:
    """Return the parameters that are checked, with the kinds of each."""
    # as text: most names in annotations are imported for type checkers alone
    return tuple(
        (name, kinds)
        for name, annotation in function.__annotations__.items()
        if name != "return" and (kinds := tuple(_find_kinds(str(annotation))))
    )


def _find_kinds(annotation: str) -> list[_Kind]:
    """Return the kinds of an annotation; none where it has one that is not known, or a reader of its own."""
    names = _split_union(annotation)
    found = [_KINDS.get(name) or _KINDS.get(name.partition("[")[0]) for name in names]
    kinds = [kind for kind in found if kind is not None]
    has_reader = {"int", "str"} <= {*names} or "Mapping[str, str]" in names
    return [] if len(kinds) < len(names) or has_reader else kinds


def _split_union(annotation: str) -> list[str]:
    """Return the parts of a union; not by ``ast``, whose call is one of ``compile`` to those who watch a load."""
    names, depth = [""], 0
    for char in annotation:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "|" and not depth:
            names.append("")
        else:
            names[-1] += char
    return [name.strip() for name in names]
