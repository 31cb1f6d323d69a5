"""The table of names in shardckpt/compat/README.md: what stands there is imported, and takes the original's arguments.

A new row needs nothing here: it has the origin, the original's name and signature as Python writes it, and our path.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any, NamedTuple

import pytest

from tests.readmes import READMES
from tests.tables import table

TABLE = READMES["shardckpt/compat/README.md"].partition("## Names and signatures")[2]
_ROW = re.compile(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


class Row(NamedTuple):
    """A row: where the name is from, its signature there, and its path here."""

    origin: str
    signature: str
    path: str


ROWS = [Row(*found) for found in _ROW.findall(TABLE)]


def _find(path: str) -> tuple[Any, bool]:
    """The object at a path, and whether it is a method of a class, whose first argument is the instance."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        parent: Any = None
        for name in parts[end:]:
            parent, found = found, getattr(found, name)
        bound = inspect.isfunction(found) and inspect.isclass(parent)
        return found, bound and not isinstance(inspect.getattr_static(parent, parts[-1]), staticmethod)
    raise ModuleNotFoundError(path)


def _signature(found: Any) -> inspect.Signature:
    """A function's or class's signature; of a class that passes ``*args`` on, that of the class that takes them."""
    takers = [each for each in found.__mro__ if "__init__" in vars(each)] if inspect.isclass(found) else [found]
    for each in takers:
        signature = inspect.signature(each)
        if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
            return signature
    raise TypeError(f"{found} takes any arguments")


def _check(row: Row) -> None:
    """Import the name, and bind the original's arguments by place, by keyword, and without those that have defaults."""
    found, is_method = _find(row.path)
    name, parenthesis, _ = row.signature.partition("(")
    assert re.fullmatch(r"\w+(\.\w+)*", name), row
    if not parenthesis:
        return
    (function,) = ast.parse(f"def f({row.signature.partition('(')[2]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    placed = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    named = [argument.arg for argument in arguments.kwonlyargs]
    signature, own = _signature(found), ["self"] if is_method else []
    by_place = signature.bind(*own, *placed, **{each: each for each in named})
    by_keyword = signature.bind(*own, **{each: each for each in (*placed, *named)})
    for each in (*placed, *named):
        assert each in signature.parameters, (row, each)
        assert by_place.arguments[each] == by_keyword.arguments[each] == each, (row, each)
    optional = [each for each, default in zip(named, arguments.kw_defaults, strict=True) if default is not None]
    needed = placed[: len(placed) - len(arguments.defaults)]
    signature.bind(*own, *needed, **{each: each for each in named if each not in optional})
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    assert not arguments.kwarg or inspect.Parameter.VAR_KEYWORD in kinds, row


@table("row", ROWS, ids=lambda row: f"{row.origin}: {row.signature.partition('(')[0]}")
def test_every_name_is_imported_and_every_argument_bound(row: Row) -> None:
    """A call of the original, by place or by keyword, with or without its optional arguments, is a call here."""
    _check(row)


def test_every_row_is_read() -> None:
    """No row is overlooked for its form, no name stands twice, and each document has its rows."""
    lines = [line for line in TABLE.splitlines() if line.startswith("|")]
    assert len(lines) - 2 == len(ROWS)
    assert len({(row.origin, row.signature.partition("(")[0]) for row in ROWS}) == len(ROWS)
    assert {"MindSpeed-LLM", "EPLoadPlanner", "Megatron-Core"} <= {row.origin for row in ROWS}


@table(
    ("signature", "path"),
    [
        ("save(state_dict)", "shardckpt.huggingface.no_such_name"),
        ("save_state_dict(state_dict, path)", "shardckpt.huggingface.save_state_dict"),
        ("save_state_dict(path_to_save, state_dict)", "shardckpt.huggingface.save_state_dict"),
        ("save_state_dict(state_dict, path_to_save=None)", "shardckpt.huggingface.save_state_dict"),
        ("save_state_dict(state_dict, path_to_save, **kwargs)", "shardckpt.huggingface.save_state_dict"),
    ],
)
def test_a_wrong_row_is_found(signature: str, path: str) -> None:
    """A name that is absent, and an argument that is called otherwise, moved, needed or not taken, fails."""
    with pytest.raises((AttributeError, AssertionError, TypeError)):
        _check(Row("", signature, path))
