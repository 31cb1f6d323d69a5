from __future__ import annotations

from typing import Any

import pytest

from shardckpt.adapters import register_tensor_class
from shardckpt.errors import CheckpointingException
from shardckpt.tensors.inner import get_outer_key
from tests.tables import table


@table(
    ("cls", "shared", "message"),
    [
        ("lib.Packed", "table", r"shared='table': expected a list, such as \['table'\]"),
        ("Packed", [], "'Packed': expected a class or 'module.Class'"),
        (None, [], "None: expected a class or 'module.Class'"),
    ],
)
def test_what_names_no_class_or_tensors_is_refused(cls: Any, shared: Any, message: str) -> None:
    """A text in the place of a list would name its letters, and its tensors would be stored as parts."""
    with pytest.raises(CheckpointingException, match=message):
        register_tensor_class(cls, shared=shared)


@table(
    ("key", "outer"),
    [("w.(inner).a", "w"), ("w.(shared).a.(inner).b", "w"), ("w.(inner).a.(shared).b", "w"), ("w", "")],
)
def test_the_outer_key_is_that_of_the_outermost_tensor(key: str, outer: str) -> None:
    """A tensor inside a tensor that is inside another belongs to the one that the user has."""
    assert get_outer_key(key) == outer
