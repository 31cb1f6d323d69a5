"""A code base of Megatron's ports by one command, and who tries another way is told of it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from importlib.util import find_spec, module_from_spec, resolve_name
from pkgutil import resolve_name as resolve_object
from typing import TYPE_CHECKING

import pytest

from shardckpt.compat.megatron.__main__ import main, port
from tests.compat.test_names import MEMBERS, NAMES, PACKAGE, list_modules
from tests.readmes import BLOCKS, READMES
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sites import Sites

COMMAND = next(block.code.strip() for block in BLOCKS if block.name == "port-megatron" and block.kind == "command")


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
    ported = [port(line.strip().encode()).decode() for line in lines]
    assert not [line for line in ported if "megatron.core" in line]
    for line in ported:
        exec(line, {})


H = "from shardckpt.compat.megatron import dist_checkpointing"


@table(
    ("source", "ported"),
    [
        ("from megatron.core import dist_checkpointing as dc  # noqa", f"{H} as dc  # noqa"),
        ("from megatron.core import dist_checkpointing, mpu", f"{H}\nfrom megatron.core import mpu"),
        ("from megatron.core import mpu, dist_checkpointing", f"{H}\nfrom megatron.core import mpu"),
        (
            "from megatron.core import mpu, dist_checkpointing as dc, utils",
            f"{H} as dc\nfrom megatron.core import mpu, utils",
        ),
        ("from megatron.core import mpu, \\\n    dist_checkpointing", f"{H}\nfrom megatron.core import mpu"),
        ("from megatron.core import (\n    dist_checkpointing,\n)", H),
        ("from megatron.core import (mpu, dist_checkpointing)", f"{H}\nfrom megatron.core import (mpu,)"),
        (
            "from megatron.core import (\n    mpu,  # why\n    dist_checkpointing,\n)",
            f"{H}\nfrom megatron.core import (\n    mpu,  # why\n)",
        ),
        (
            "if a:\n    from megatron.core import (\n        dist_checkpointing,\n        mpu,\n    )",
            f"if a:\n    {H}\n    from megatron.core import (\n        mpu,\n    )",
        ),
        ("\ufefffrom megatron.core import mpu, dist_checkpointing", f"\ufeff{H}\nfrom megatron.core import mpu"),
        (
            "if a:\r\n    from megatron.core import (\r\n        mpu,\r\n        dist_checkpointing,\r\n    )\r\n",
            f"if a:\r\n    {H}\r\n    from megatron.core import (\r\n        mpu,\r\n    )\r\n",
        ),
        (
            "\ufefffrom megatron.core import mpu, \\\r\n    dist_checkpointing\r\n",
            f"\ufeff{H}\r\nfrom megatron.core import mpu\r\n",
        ),
        ("x = 'é'; from megatron.core import mpu, dist_checkpointing", f"x = 'é'; {H}; from megatron.core import mpu"),
        (
            "from megatron.core.dist_checkpointing import (\n    load,\n    ShardedTensor,\n)",
            "from shardckpt.compat.megatron.dist_checkpointing import (\n    load,\n    ShardedTensor,\n)",
        ),
        (
            "import os, megatron.core.dist_checkpointing as dc",
            "import os, shardckpt.compat.megatron.dist_checkpointing as dc",
        ),
        (
            "patch('megatron.core.dist_checkpointing.save')",
            "patch('shardckpt.compat.megatron.dist_checkpointing.save')",
        ),
        ("import nemo.megatron.core.dist_checkpointing", "import nemo.megatron.core.dist_checkpointing"),
        (
            "from megatron.core.dist_checkpointing_utils import x",
            "from megatron.core.dist_checkpointing_utils import x",
        ),
    ],
)
def test_imports_beside_other_names_are_ported(source: str, ported: str) -> None:
    """In every form in which Megatron-LM and NeMo import it, the name moves, and what stands beside it stays."""
    assert port(source.encode()).decode() == ported


@table(
    ("source", "ported"),
    [
        ("from ..core import mpu, dist_checkpointing", f"{H}\nfrom ..core import mpu"),
        (
            "from ..core.dist_checkpointing.serialization import (\n    load,\n)",
            "from shardckpt.compat.megatron.dist_checkpointing.serialization import (\n    load,\n)",
        ),
        ("from .dist_checkpointing import x", "from .dist_checkpointing import x"),
    ],
)
def test_relative_imports_are_ported(source: str, ported: str, tmp_path: Path) -> None:
    """A trainer in Megatron's tree imports it relatively; other packages of that name are left alone."""
    file = tmp_path / "megatron" / "training" / "checkpointing.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert main([str(tmp_path)]) == (2 if source == ported else 0)
    assert file.read_text() == ported


def _imports(file: Path, package: str) -> Iterator[str]:
    """The full names of what a file imports."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_megatrons_own_tree_is_ported(sites: Sites, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the command no module of Megatron-Core imports Megatron's checkpoints, and what each imports is here."""
    core = tmp_path / "megatron" / "core"
    source = sites("megatron-core-0.16.1") / "megatron" / "core"
    for file in source.rglob("*.py"):
        if b"dist_checkpointing" in (text := file.read_bytes()):
            (copy := core / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text)
    assert main([str(tmp_path)]) == 0
    assert re.search(r"files ported: [1-9]", capsys.readouterr().out)
    found = set()
    for file in core.rglob("*.py"):
        package = ".".join(file.relative_to(tmp_path).parent.parts)
        if not package.startswith("megatron.core.dist_checkpointing"):
            found.update(_imports(file, package))
    assert not [name for name in found if name.startswith("megatron.core.dist_checkpointing")]
    here = [name for name in found if name.startswith(PACKAGE)]
    assert len(here) > 15
    for name in here:
        resolve_object(name)


@table(
    ("name", "text", "status", "said"),
    [
        ("a.py", "from megatron import core\ncore.dist_checkpointing.load", 1, "a.py:2: port by hand: core.dist_check"),
        (
            "a.py",
            "import megatron.core\nmegatron.core.dist_checkpointing.load",
            1,
            "a.py:2: port by hand: nothing im",
        ),
        (
            "a.py",
            "import megatron.core.dist_checkpointing\nmegatron.core.f()",
            1,
            "a.py:2: port by hand: megatron was",
        ),
        ("a.py", "from megatron import core\ngetattr(core, 'dist_checkpointing')", 1, "a.py:2: port by hand: getattr("),
        ("a.py", "f('megatron.core', 'dist_checkpointing')", 1, "a.py:1: port by hand: f('megatron.core', "),
        ("a.ipynb", '[\n"from megatron.core import mpu, dist_checkpointing"]', 1, "a.ipynb:2: port by hand: an im"),
        (
            "a.py",
            "import megatron.core.dist_checkpointing\nmegatron.core.dist_checkpointing.load",
            0,
            "files ported: 1",
        ),
        ("a.py", "print 'megatron.core.dist_checkpointing'", 1, "a.py: left as it is, since Python does not parse it"),
        ("a.py", "import torch", 2, "imports megatron.core.dist_checkpointing"),
        ("a.yaml", "_target_: megatron.core.dist_checkpointing.load", 0, "a.yaml: ported"),
    ],
)
def test_what_needs_a_hand_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, status: int, said: str
) -> None:
    """A use that no import serves, a file that is no Python, and nothing to port are told, with an exit code."""
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_files_of_a_folder_that_are_no_python_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script with Megatron's name stays as it is, beside ported modules, and is listed; one without it is not."""
    (tmp_path / "a.py").write_text("from megatron.core import dist_checkpointing")
    script = "python -c 'from megatron.core import dist_checkpointing'"
    (tmp_path / "run.sh").write_text(script)
    (tmp_path / "other.sh").write_text("true")
    assert main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "a.py: ported" in captured.out
    assert captured.err.startswith(f"{tmp_path / 'run.sh'}: left as it is, since it is no *.py file: name it")
    assert "other.sh" not in captured.err
    assert (tmp_path / "run.sh").read_text() == script


@table("folder", [".venv", ".git/hooks", "venv/lib/site-packages/megatron", "web/node_modules/gyp"])
def test_other_peoples_packages_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """Hidden folders, site-packages and node_modules below a folder are not ported; where they are named, they are."""
    other = tmp_path / folder
    other.mkdir(parents=True)
    for file in (tmp_path / "a.py", other / "b.py", other / "run.sh"):
        file.write_text("from megatron.core import dist_checkpointing")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.py'}: ported\nfiles ported: 1\n"
    assert (other / "b.py").read_text() == "from megatron.core import dist_checkpointing"
    (other / "run.sh").unlink()
    assert main([str(other)]) == 0
    assert (other / "b.py").read_text() == H


def test_what_cannot_be_read_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links that lead nowhere, or in a circle, are listed as left as they are, and the other files are ported."""
    (tmp_path / "a.py").symlink_to("absent.py")
    (tmp_path / "b.py").symlink_to("b.py")
    (tmp_path / "c.sh").symlink_to("absent.sh")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "z.py").write_text("from megatron.core import dist_checkpointing")
    assert main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'z.py'}: ported\n"
    left = [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.sh"]
    assert [line.partition(": left as it is: ")[0] for line in captured.err.splitlines()[:-1]] == [*map(str, left)]
    assert (tmp_path / "z.py").read_text() == H


def test_a_wrong_path_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one path is mistyped, nothing is ported, and the path is named."""
    (tmp_path / "a.py").write_text("from megatron.core import dist_checkpointing")
    assert main([str(tmp_path), str(tmp_path / "b.py")]) == 2
    assert f"there is no {tmp_path / 'b.py'}" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == "from megatron.core import dist_checkpointing"


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
