from __future__ import annotations

import ast
import re

from tests.tree import ROOT

TABLE = ROOT / "shardckpt" / "compat" / "megatron" / "README.md"


def test_every_row_has_a_test_that_exists() -> None:
    """The table of Megatron's faults has its 30 rows, and the test that each of them names is there and runs."""
    rows = re.findall(r"^\| (\d+) \|.*\| `([\w/.]+)::(\w+)` \|$", TABLE.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 31))
    for _, file, test in rows:
        tree = ast.parse((ROOT / file).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
        marks = " ".join(map(ast.unparse, found.decorator_list))
        assert "skip" not in marks, test
        assert "xfail" not in marks, test
