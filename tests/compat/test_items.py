"""The table of the documents' items: it is whole, and what it names is there."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.compat.items import AS_WRITTEN, BETTER, DIFFERENCE, DOCUMENTS, ITEMS, Item
from tests.readmes import READMES
from tests.tables import table
from tests.tree import ROOT

_ROWS = [item for items in ITEMS.values() for item in items]


@functools.cache
def _functions(file: str) -> dict[str, list[str]]:
    """The functions of a test file, each with its decorators."""
    nodes = ast.parse((ROOT / file).read_text()).body
    return {
        node.name: [ast.unparse(mark) for mark in node.decorator_list]
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    }


def _check(item: Item) -> None:
    """A row's test is there and runs before a release, too; its difference stands in a README."""
    file, _, name = item.test.partition("::")
    assert not file.startswith("tests/proof/"), item
    assert name.startswith("test_"), item
    marks = _functions(file)[name]
    assert not any(mark.startswith(("pytest.mark.skip", "pytest.mark.xfail", "pytest.mark.proof")) for mark in marks)
    assert (item.verdict == DIFFERENCE) == bool(item.documented), item
    assert not item.documented or any(item.documented in READMES[document] for document in DOCUMENTS), item


def test_every_item_of_the_five_documents_is_shown() -> None:
    """148 items: as written, better, or a difference that is documented; none is missing, and none does harm."""
    counts = {document: len(items) for document, items in ITEMS.items()}
    assert counts == {"MindSpeed-LLM": 36, "Megatron-Core": 39, "EPLoadPlanner": 15, "torch": 14, "torchtitan": 44}
    assert len(_ROWS) == len(set(_ROWS)) == 148
    assert {item.verdict for item in _ROWS} == {AS_WRITTEN, BETTER, DIFFERENCE}
    for items in ITEMS.values():
        assert len({item.item for item in items}) == len(items)


@table("item", _ROWS, ids=lambda item: item.item)
def test_every_row_names_a_test_and_a_place(item: Item) -> None:
    """The test that a row names is there and is not skipped; what differs stands in a README."""
    _check(item)


@table(
    "item",
    [
        Item("no such file", AS_WRITTEN, "tests/compat/test_no.py::test_no"),
        Item("no such test", AS_WRITTEN, "tests/compat/test_items.py::test_no"),
        Item("no test", AS_WRITTEN, "tests/compat/test_items.py::_check"),
        Item("proof", AS_WRITTEN, "tests/proof/interop/test_matrix.py::test_plain_dcp_needs_megatron_for_its_classes"),
        Item("undocumented", DIFFERENCE, "tests/compat/test_items.py::test_a_wrong_row_is_found"),
        Item("nowhere", DIFFERENCE, "tests/compat/test_items.py::test_a_wrong_row_is_found", "this stands nowhere"),
    ],
    ids=lambda item: item.item,
)
def test_a_wrong_row_is_found(item: Item) -> None:
    """A test that is absent or runs before a release alone, and a difference that nothing documents, fails."""
    with pytest.raises((AssertionError, KeyError, FileNotFoundError)):
        _check(item)
