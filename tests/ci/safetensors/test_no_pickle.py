"""A load of (safetensors, 1) unpickles nothing that is stored: by what its code imports, and by what it calls."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.safetensors.no_pickle import save_by_name
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = "shardckpt_safetensors"


#: Where a load begins: the call, the modules that entry points name, and all of the strategy's package.
STARTS = (
    "shardckpt.dist_checkpointing",
    "shardckpt.integrations.fsspec.plugin",
    "shardckpt.integrations.obstore.plugin",
)


#: What unpickles, or reads what may be pickled, by the top of its name.
UNPICKLERS = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "pickletools", "shelve"}


#: Functions that unpickle files.
CALLS = {"eval", "exec", "numpy.load", "np.load", "torch.load", "torch.package.PackageImporter"}


#: Reached modules that may import pickle, and why; the tests that run a load check that it is so.
MAY_PICKLE = {
    # Messages between the ranks of a job, and to the process that writes: values that a process of this job has
    # pickled a moment before. Nothing that was stored goes there as a pickle, and nobody else can write there.
    "shardckpt.distributed.pickling",
    # Raises pickle.PicklingError, which those who pickle a stub expect; it neither pickles nor unpickles.
    "shardckpt.stubs.stub",
}


def _name(path: Path) -> str:
    root = ROOT if path.is_relative_to(ROOT / "shardckpt") else ROOT / "strategies"
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


FILES = {_name(path): path for folder in ("shardckpt", "strategies") for path in (ROOT / folder).rglob("*.py")}


@functools.cache
def _parse(name: str) -> list[ast.AST]:
    """The nodes of a module, but those of ``if TYPE_CHECKING:``, which nothing runs."""
    return list(_nodes(ast.parse(FILES[name].read_text())))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _nodes(child)


def _imports(name: str) -> Iterator[str]:
    """What a module imports, at its top or in a function: modules, and ``module.name`` of each name."""
    for node in _parse(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _calls(name: str) -> Iterator[str]:
    """What a module calls, as it stands there."""
    return (ast.unparse(node.func) for node in _parse(name) if isinstance(node, ast.Call))


def _find_lazy(package: str, attribute: str) -> str:
    """The module that a package imports when the name is first used, by its stub; else itself."""
    stub = FILES[package].with_suffix(".pyi")
    for node in ast.walk(ast.parse(stub.read_text())) if stub.exists() else ():
        if isinstance(node, ast.ImportFrom) and attribute in {alias.asname for alias in node.names}:
            return node.module if node.module != package else f"{package}.{attribute}"
    return package


def _reached() -> dict[str, str]:
    """Every module of ours that a load may import, with one that imports it."""
    found: dict[str, str] = {}
    waiting = [(name, "the start") for name in (*STARTS, *FILES) if name in STARTS or name.split(".")[0] == PACKAGE]
    waiting += [(name, "an entry point") for name in FILES if name.endswith(".plugin") and name.count(".") == 1]
    while waiting:
        name, importer = waiting.pop()
        package, _, attribute = name.rpartition(".")
        if name not in FILES and package in FILES:  # a name of a module, or of a package that imports it lazily
            name = _find_lazy(package, attribute)
        if name not in FILES or name in found:
            continue
        found[name] = importer
        waiting += [(each, name) for each in _imports(name)]
        if above := name.rpartition(".")[0]:
            waiting.append((above, name))
    return found


def test_nothing_that_a_load_imports_reads_pickles() -> None:
    """No module of ours that a load can reach imports pickle, the archives or another format, or calls torch.load."""
    reached = _reached()
    assert {"shardckpt.engine.loading", "shardckpt.chunks.requested", "shardckpt_zarr.plugin"} <= reached.keys()
    assert not [name for name in reached if name.startswith("shardckpt.archive")], reached
    for name, importer in reached.items():
        top, _, inner = name.partition(".")
        assert top in ("shardckpt", PACKAGE) or inner in ("", "plugin"), f"{name}, which {importer} imports"
        imported = set(_imports(name))
        if name not in MAY_PICKLE:
            assert not {each.split(".")[0] for each in imported} & UNPICKLERS, f"{name}, which {importer} imports"
        assert not imported & CALLS, name
        assert not set(_calls(name)) & CALLS, name
    assert reached.keys() >= MAY_PICKLE


def test_the_walk_finds_what_a_load_imports(tmp_path: Path) -> None:
    """A load in a new interpreter, with everything that unpickles replaced by errors, reads all; the walk was right."""
    path = save_by_name(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.safetensors.unpickling", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"shardckpt.engine.loading", "shardckpt_safetensors.load"} <= imported
    assert imported - _reached().keys() == set()
