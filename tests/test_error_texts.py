from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "shardckpt").rglob("*.py")), *sorted((ROOT / "strategies").rglob("*.py"))]
#: Arguments of others' functions that texts advise to use: torch's, and a transformers Trainer's.
OF_OTHERS = {"stride", "group_dst", "enable_plan_caching", "use_collectives", "resume_from_checkpoint"}


def _texts(tree: ast.AST) -> list[str]:
    """The literal text of everything that is raised or logged in a file."""
    found: list[str] = []
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        logged = (
            isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "logger"
        )
        if isinstance(node, ast.Raise) or logged:
            found += [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and _is_text(part)]
    return found


def _is_text(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def _names(tree: ast.AST) -> set[str]:
    """Names of parameters and fields that a file declares."""
    found = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    fields = (node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    return found | {field.id for field in fields if isinstance(field, ast.Name)}


@pytest.mark.ci
def test_errors_name_arguments_that_exist() -> None:
    """Whatever an error tells the user to pass (``name=...``) is an argument of ours, torch's or transformers'."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    texts = {path: _texts(tree) for path, tree in trees.items()}
    known = set().union(*map(_names, trees.values())) | OF_OTHERS
    unknown = {
        (path.name, name)
        for path, found in texts.items()
        for text in found
        for name in re.findall(r"(?<![\w.])([a-z_][a-z0-9_]*)=", text)
        if name not in known
    }
    assert not unknown
    mentioned = [text for found in texts.values() for text in found if re.search(r"\b[a-z_]+=", text)]
    assert len(mentioned) > 10  # the search finds what it looks for
