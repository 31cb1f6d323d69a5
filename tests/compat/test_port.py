"""A code base of Megatron's ports by one command, and who tries another way is told of it."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec, module_from_spec

import pytest

from tests.compat.test_names import MEMBERS, NAMES, PACKAGE, list_modules
from tests.readmes import BLOCKS, READMES
from tests.tables import table

COMMAND = next(block.code.strip() for block in BLOCKS if block.name == "port-megatron" and block.kind == "command")


def _port(text: str) -> str:
    """What the command makes of a file: Python's regular expressions are sed's here."""
    found = re.fullmatch(r"sed -i -E 's/(?P<there>.+)/(?P<here>.+)/' FILES", COMMAND)
    assert found is not None
    return re.sub(found["there"], found["here"], text)


def _lines() -> list[str]:
    """Import lines for all that Megatron's modules have here, each as its users write it."""
    lines = [
        "from megatron.core import dist_checkpointing",
        "import megatron.core.dist_checkpointing as dist_checkpointing",
        "import megatron.core.dist_checkpointing.strategies.torch",
        "    from megatron.core.dist_checkpointing.strategies import base, torch",
    ]
    for path in list_modules():
        there = ".".join(filter(None, ("megatron.core.dist_checkpointing", path)))
        here = importlib.import_module(".".join(filter(None, (PACKAGE, path))))
        names = {*here.__all__, *NAMES.get(path, "").split()} - {*getattr(here, "REFUSED", ())}
        names.update(name for owner in MEMBERS for module, _, name in [owner.rpartition(".")] if module == path)
        lines.extend(f"from {there} import {name}" for name in sorted(names))
    return lines


def test_one_command_ports_every_import() -> None:
    """The README's command makes every import of Megatron's modules one that works."""
    lines = _lines()
    assert len(lines) > 150
    ported = [_port(line) for line in lines]
    assert not [line for line in ported if "megatron.core" in line]
    for line in ported:
        exec(line.strip(), {})


def test_the_first_page_has_the_command_too() -> None:
    """The README that all read first, and the error of a wrong way, have the same command."""
    assert COMMAND in READMES["README.md"]
    with pytest.raises(ImportError, match=re.escape(COMMAND)):
        importlib.import_module("shardckpt.dist_checkpointing.strategies")


@table(
    ("line", "where"),
    [
        ("from shardckpt.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy", "strategies"),
        ("from shardckpt.dist_checkpointing.mapping import ShardedTensor", "mapping"),
        ("import shardckpt.dist_checkpointing.utils", "utils"),
        ("from shardckpt.dist_checkpointing import strategies", "strategies"),
    ],
)
def test_a_module_that_is_not_here_says_where_it_is(line: str, where: str) -> None:
    """Megatron's modules, looked for in the module of Megatron's functions, are an error with their place."""
    with pytest.raises(ImportError, match=rf"is at {re.escape(PACKAGE)}\.{where}\. A code base ports by one rule"):
        exec(line, {})


def test_a_module_that_is_nowhere_is_missing_as_usual() -> None:
    """What Megatron does not have either is Python's own error."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'shardckpt\.dist_checkpointing\.stratgies'"):
        importlib.import_module("shardckpt.dist_checkpointing.stratgies")


@table(("module",), [("utils",), ("strategies",), ("mapping",)])
def test_asking_whether_a_module_is_there_raises_nothing(module: str) -> None:
    """``find_spec`` of Megatron's modules answers as of any module; it is their import that says where they are."""
    spec = find_spec(f"shardckpt.dist_checkpointing.{module}")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=rf"is at {re.escape(PACKAGE)}\.{module}\."):
        spec.loader.exec_module(module_from_spec(spec))


def test_a_module_loaded_again_finds_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the module is loaded, it adds one finder to Python's."""
    monkeypatch.setattr(sys, "meta_path", before := list(sys.meta_path))
    for name in ("first", "second"):
        spec = find_spec("shardckpt.dist_checkpointing")
        assert spec is not None, name
        assert spec.loader is not None
        spec.loader.exec_module(module_from_spec(spec))
    assert sys.meta_path == before
    assert len({repr(each) for each in sys.meta_path}) == len(sys.meta_path)
