from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "shardckpt"
STRATEGIES = ROOT / "strategies"

#: The house from the cellar to the roof; a room imports from rooms below it, and from itself.
FLOORS = (
    ("errors",),
    ("settings", "manifest", "tensors"),
    ("mapping",),
    ("state_dict", "distributed", "planning"),
    ("storage", "quantized"),
    ("strategy",),
    ("plugins", "validation", "adapters", "parallel"),
    ("engine",),
    ("background", "local", "maintenance", "optimizer"),
    ("dist_checkpointing", "async_save", "optimizer_state"),
    ("huggingface",),
    ("manager",),
    ("integrations",),
    ("demo", "compat"),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

#: The rooms inside torch_dist, as above.
TORCH_DIST_FLOORS = ("archive", "dialects", "plan", "dcp")

#: What a strategy may use of the core.
PUBLIC = tuple(
    f"shardckpt.{name}."
    for name in (
        "mapping",
        "state_dict",
        "strategy",
        "manifest",
        "planning",
        "storage",
        "errors",
        "distributed.comm",
        "tensors.copier",
        "tensors.memory",
        "tensors.raw_memory",
        "tensors.wrappers",
        "plugins.hookspecs",
        "plugins.registry",
        "parallel",
        "adapters",
        "validation",
        "engine.externally_coordinated",
    )
)


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, for types or for real."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _rooms(path: Path) -> set[str]:
    """Rooms of the core that a file imports."""
    names = {name.split(".")[1] for name in _imports(path) if name.startswith("shardckpt.")}
    return names & set(LEVEL)


def _core_files() -> list[Path]:
    return sorted(path for path in CORE.rglob("*.py") if path != CORE / "__init__.py")


def _room(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", _core_files(), ids=lambda path: str(path.relative_to(CORE)))
def test_arrows_point_down(path: Path) -> None:
    """A file of the core imports from floors below its own and from its own room, inside functions too."""
    room = _room(path)
    wrong = {other for other in _rooms(path) if other != room and LEVEL[other] >= LEVEL[room]}
    assert not wrong


def test_no_file_imports_itself_in_a_circle() -> None:
    """Inside a room, too, there is no circle."""
    files = {
        f"shardckpt.{path.relative_to(CORE).with_suffix('').as_posix().replace('/', '.')}": path
        for path in _core_files()
    }
    files |= {
        path.relative_to(STRATEGIES).with_suffix("").as_posix().replace("/", "."): path
        for path in STRATEGIES.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: {other for other in _imports(path) if other in files} for name, path in files.items()}
    while leaves := [name for name, needs in graph.items() if not needs]:
        for leaf in leaves:
            del graph[leaf]
        for needs in graph.values():
            needs.difference_update(leaves)
    assert not graph, f"circle among {sorted(graph)}"


def test_arrows_point_down_in_torch_dist() -> None:
    """A room inside torch_dist imports from those below it, and never from its strategies."""
    root = STRATEGIES / "shardckpt_torch_dist"
    upper = {f"{root.name}.{path.stem}" for path in root.glob("*.py") if path.stem not in ("__init__", "torch_private")}
    for level, room in enumerate(TORCH_DIST_FLOORS):
        above = {f"{root.name}.{name}" for name in TORCH_DIST_FLOORS[level + 1 :]}
        above |= upper if room != "dcp" else set()
        for path in (root / room).rglob("*.py"):
            assert not {".".join(name.split(".")[:2]) for name in _imports(path)} & above, path
    assert {path.name for path in root.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(
        TORCH_DIST_FLOORS
    )


def test_few_modules_stand_at_the_top() -> None:
    """At the top of the core stand the faces and the vocabulary, each with a floor; what they need lies in rooms."""
    modules = {path.stem for path in CORE.glob("*.py")}
    assert modules <= {room for rooms in FLOORS for room in rooms} | {"__init__"}
    assert len(modules) <= 12


def test_the_core_names_no_strategy() -> None:
    """No file of the core imports a strategy package or names a backend; what maps another library's names may."""
    packages = {path.name for path in STRATEGIES.iterdir() if path.is_dir()}
    for path in CORE.rglob("*.py"):
        if _room(path) == "compat":
            continue
        assert not {name.split(".")[0] for name in _imports(path)} & packages, path
        if _room(path) not in ("demo", "cli"):
            assert "torch_dist" not in path.read_text(), path


def test_nothing_imports_the_names_of_other_libraries() -> None:
    """shardckpt.compat is for users' code: no file of the core or of a strategy imports it."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        if "compat" not in path.parts:
            assert not {name for name in _imports(path) if name.startswith("shardckpt.compat")}, path


def test_strategies_use_public_rooms_only() -> None:
    """A built-in strategy takes from the core only what a third party may take."""
    for path in STRATEGIES.rglob("*.py"):
        taken = {name for name in _imports(path) if name.startswith("shardckpt.") and name.split(".")[1] in LEVEL}
        assert not [name for name in taken if not f"{name}.".startswith(PUBLIC)], path


def test_only_comm_calls_collectives() -> None:
    """torch.distributed's collectives are called in comm.py alone (the demo is a training job, and has its own)."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        calls = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        used = calls & {"all_reduce", "all_gather_object", "broadcast_object_list", "gather_object", "barrier"}
        assert not used or path == CORE / "distributed" / "comm.py" or path.parent == CORE / "demo", f"{path}: {used}"


def test_pickles_are_read_in_one_guarded_place() -> None:
    """No torch.load, pickle.load, eval or exec: the one Unpickler is unpickle.py's, with its allow-list.

    Only what ranks of a job send each other is unpickled as it is, in comm.py; and huggingface/torch_file.py reads
    files of torch.save by torch's own allow-list, ``weights_only=True``.
    """
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                sent = name == "pickle.loads" and path == CORE / "distributed" / "comm.py"
                sent |= name == "torch.load" and path == CORE / "huggingface" / "torch_file.py"
                assert sent or name not in ("torch.load", "pickle.load", "pickle.loads", "dill.load"), path
                assert name not in ("pickle.Unpickler", "pickle._Unpickler") or path.name == "unpickle.py", path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, node.keywords), path


def test_no_assert_statements() -> None:
    """Users' mistakes are errors of the family: no assert, which vanishes under -O."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)], path


def test_private_torch_names_stand_in_one_file() -> None:
    """Private names of torch are imported in torch_private.py alone."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        private = {n for n in _imports(path) if n.startswith("torch.") and any(p.startswith("_") for p in n.split("."))}
        assert not private or path.name == "torch_private.py", f"{path}: {private}"
