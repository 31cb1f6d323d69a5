from __future__ import annotations

import ast
import functools
import importlib
import re
from typing import TYPE_CHECKING

from tests.tables import table
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CORE = ROOT / "shardckpt"
STRATEGIES = ROOT / "strategies"

#: What a strategy may use of the core: these doors, beside the face.
DOORS_FOR_STRATEGIES = {
    "adapters",
    "archive",
    "chunks",
    "distributed",
    "engine",
    "errors",
    "huggingface",
    "manifest",
    "mapping",
    "parallel",
    "planning",
    "plugins",
    "settings",
    "state_dict",
    "storage",
    "strategy",
    "stubs",
    "tensors",
    "validation",
}

#: What asks, above storage and commit, whether a place is a directory or on a store: each makes an object for the one
#: or the other.
ASK_FOR_A_STORE = {"engine.committers", "plugins.stores"}
#: What asks whether the system opens files there: for another library, for a copy by the system or an identity that it
#: gives, or for what is written at any offset.
ASK_FOR_LOCAL_FILES = {
    "compat.megatron.path_adapter",
    "huggingface.folder",
    "huggingface.review",
    "huggingface.small_file",
    "huggingface.store_export",
    "integrations.prometheus",
    "maintenance.conversion",
    "maintenance.convert",
    "maintenance.sources",
    "manager.listing",
    "manager.writer",
}

#: Folders whose modules are doors themselves: users name each of them.
OPEN_FOLDERS = ("shardckpt", "shardckpt.compat", "shardckpt.integrations")


@functools.cache
def _parse(path: Path) -> ast.Module:
    """A file of the tree, which no test changes; each is asked for by many tests."""
    return ast.parse(path.read_text())


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return [*ast.walk(_parse(path))]


@functools.cache
def _imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, for types or for real."""
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _module(path: Path) -> str:
    root = ROOT if path.is_relative_to(CORE) else STRATEGIES
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _door(path: Path) -> Path:
    """A file, or the stub that lists what a package offers."""
    stub = path.with_suffix(".pyi")
    return stub if stub.exists() else path


FILES = {_module(path): _door(path) for path in sorted([*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")])}
FOLDERS = {name for name, path in FILES.items() if path.stem == "__init__"}


def _folders(name: str) -> list[str]:
    """The folders that a module is in, the outermost first; a folder's __init__ is in it."""
    parts = name.split(".")
    return [folder for end in range(1, len(parts) + 1) if (folder := ".".join(parts[:end])) in FOLDERS]


@functools.cache
def _imported(path: Path) -> list[tuple[str, str]]:
    """Ours of a file's imports, as (module, name); the name is empty where the module itself is imported."""
    found = []
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name in FILES]
        elif isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((inner, "") if inner in FILES else (node.module, alias.name))
    return found


def _offered(folder: str) -> set[str]:
    """What a folder's __init__ offers, by its stub or its ``__all__``."""
    if FILES[folder].suffix == ".pyi":
        return set(importlib.import_module(folder).__all__)
    assigned = [node for node in _parse(FILES[folder]).body if isinstance(node, ast.Assign)]
    return next((set(ast.literal_eval(a.value)) for a in assigned if ast.unparse(a.targets[0]) == "__all__"), set())


OFFERED = {folder: _offered(folder) for folder in FOLDERS}


def _is_open(folder: str) -> bool:
    return folder in OPEN_FOLDERS or folder.startswith("shardckpt.compat.")


def _circle(graph: dict[str, set[str]]) -> set[str]:
    """What is left of a graph without all that leads to no circle."""
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    return set(graph)


@table("name", [name for name in FILES if name.split(".")[0] != "shardckpt"])
def test_strategies_enter_rooms_by_their_doors(name: str) -> None:
    """A strategy takes of another folder what its __init__ offers, never one of its insides."""
    own = _folders(name)
    for module, taken in _imported(FILES[name]):
        closed = [folder for folder in _folders(module) if folder not in own and not _is_open(folder)]
        if closed:
            assert module == closed[0], f"{module} is inside {closed[0]}"
            assert not taken or taken in OFFERED[module], f"{module} does not offer {taken}"


#: The one door of the core that is also the module that has its names: the command is its ``main``.
_OWN_NAMES = "shardckpt.cli"


@table("name", [name for name in FILES if name.split(".")[0] == "shardckpt" and name not in FOLDERS])
def test_modules_of_the_core_import_modules(name: str) -> None:
    """A module of the core takes a name from the module that has it, and no private one of another folder."""
    for module, taken in _imported(FILES[name]):
        is_door = module in FOLDERS and module.startswith("shardckpt.") and module != _OWN_NAMES
        assert not taken or not is_door, f"{module} does not have {taken}, but shows it to others"
        is_own = module.rpartition(".")[0] == name.rpartition(".")[0] or _is_open(module.rpartition(".")[0])
        assert is_own or taken.startswith("__") or not taken.startswith("_"), f"{taken} is private to {module}"


#: Rooms that are not for users, but for authors of strategies.
_INNER_ROOMS = (
    *("archive", "background", "chunks", "commit", "deepspeed", "demo", "distributed", "engine", "pages", "parallel"),
    *("planning", "storage", "stubs", "tensors", "validation"),
)


@table("room", _INNER_ROOMS)
def test_doors_of_inner_rooms_are_for_strategies(room: str) -> None:
    """What the door of a room without users of its own offers, a strategy uses, or a page or docstring shows.

    Of storage, authors of plugins see the abilities of stores, too.
    """
    used = {
        taken
        for name, path in FILES.items()
        for module, taken in _imported(path)
        if name.split(".")[0] != "shardckpt" and module == f"shardckpt.{room}"
    }
    if room == "storage":
        used |= set(re.findall(r"class (\w+)", FILES["shardckpt.storage.store_abilities"].read_text()))
        used |= set(re.findall(r"class (\w+)", FILES["shardckpt.storage.remote"].read_text()))
    texts = [path.read_text() for path in [*ROOT.glob("**/README.md"), *FILES.values()]]
    shown = {name for name in OFFERED[f"shardckpt.{room}"] - used if any(f"{room}.{name}" in text for text in texts)}
    listed = {name for text in texts for name in re.findall(r"`(\w+)[`(]", text)}
    assert OFFERED[f"shardckpt.{room}"] - used - shown <= listed


def test_doors_offer_what_is_there() -> None:
    """Every name that a door offers can be had there, lazily or not, and is not one of the folder's modules."""
    for folder, names in OFFERED.items():
        door = importlib.import_module(folder)
        for name in names:
            assert hasattr(door, name), f"{folder}.{name}"
            assert folder == "shardckpt" or f"{folder}.{name}" not in FILES, f"{folder}.{name} is a module, too"


def test_no_room_needs_itself() -> None:
    """Arrows between rooms point one way: no room needs, over others, itself; nor does a module or an inner folder."""
    rooms: dict[str, set[str]] = {}
    modules: dict[str, set[str]] = {}
    for name, path in FILES.items():
        top = name.split(".")[0] != "shardckpt"
        room = name.split(".")[0] if top else ".".join(name.split(".")[:2])
        needs = {module for module, _ in _imported(path)}
        if name != "shardckpt":
            reached = {m.split(".")[0] if m.split(".")[0] != "shardckpt" else ".".join(m.split(".")[:2]) for m in needs}
            rooms.setdefault(room, set()).update(reached - {room, "shardckpt"})
        if name not in FOLDERS:
            modules[name] = needs - FOLDERS
    assert not _circle(rooms)
    assert not _circle(modules)
    for package in (path.name for path in STRATEGIES.iterdir() if path.is_dir()):
        inner: dict[str, set[str]] = {}
        for name, path in FILES.items():
            if name.startswith(f"{package}."):
                part = ".".join(name.split(".")[:2])
                reached = {".".join(m.split(".")[:2]) for m, _ in _imported(path) if m.startswith(f"{package}.")}
                inner.setdefault(part, set()).update(reached - {part})
        assert not _circle(inner), package


@table("ability, allowed", [("on_store", ASK_FOR_A_STORE), ("has_local_files", ASK_FOR_LOCAL_FILES)])
def test_few_ask_what_kind_of_place_it_is(ability: str, allowed: set[str]) -> None:
    """A directory and a store have one set of operations, and abilities: above storage and commit they look alike."""
    asking = {
        name.removeprefix("shardckpt.")
        for name, path in FILES.items()
        if any(taken == ability for _, taken in _imported(path))
    }
    assert {name for name in asking if name.split(".")[0] not in ("storage", "commit")} == allowed


def test_few_modules_stand_at_the_top() -> None:
    """At the top of the core stand the faces and the vocabulary; what they need lies in rooms."""
    assert len(list(CORE.glob("*.py"))) <= 12


def test_the_core_names_no_strategy() -> None:
    """No file of the core imports a strategy package or names a backend; what maps another library's names may."""
    packages = {path.name for path in STRATEGIES.iterdir() if path.is_dir()}
    for path in CORE.rglob("*.py"):
        if path.relative_to(CORE).parts[0] == "compat":
            continue
        assert not {name.split(".")[0] for name in _imports(path)} & packages, path
        if path.relative_to(CORE).parts[0] not in ("demo", "cli"):
            assert "torch_dist" not in path.read_text(), path


def test_nothing_imports_the_names_of_other_libraries() -> None:
    """shardckpt.compat is for users' code: no file of the core or of a strategy imports it."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        if "compat" not in path.parts:
            assert not {name for name in _imports(path) if name.startswith("shardckpt.compat")}, path


def test_strategies_use_few_doors() -> None:
    """A built-in strategy takes from the core only what a third party may take."""
    for name, path in FILES.items():
        taken = {module for module, _ in _imported(path) if module.startswith("shardckpt.")}
        if name.split(".")[0] != "shardckpt":
            assert {module.split(".")[1] for module in taken} <= DOORS_FOR_STRATEGIES, name


def test_strategies_use_few_names_of_storage() -> None:
    """Of storage's many names a strategy uses only those that storage/README.md lists for authors."""
    section = (CORE / "storage" / "README.md").read_text().partition("## For authors of strategies\n")[2]
    names = {name for line in section.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    used = {
        taken
        for name, path in FILES.items()
        for module, taken in _imported(path)
        if name.split(".")[0] != "shardckpt" and module == "shardckpt.storage"
    }
    assert names <= OFFERED["shardckpt.storage"]
    assert used <= names


def test_a_base_does_not_know_what_is_derived_from_it() -> None:
    """torch_dist does not name ep, which is made of it."""
    for path in (STRATEGIES / "shardckpt_torch_dist").rglob("*.py"):
        assert not re.search(r"shardckpt_ep|\bEP[A-Z]|\"ep\"", path.read_text()), path


def test_only_comm_calls_collectives() -> None:
    """torch.distributed's collectives are called in comm.py alone; the demo and authors' tests have their own."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        calls = {node.attr for node in _nodes(path) if isinstance(node, ast.Attribute)}
        used = calls & {"all_reduce", "all_gather_object", "broadcast_object_list", "gather_object", "barrier"}
        own = path.parent == CORE / "demo" or CORE / "testing" in path.parents
        assert not used or path == CORE / "distributed" / "comm.py" or own, f"{path}: {used}"


def test_pickles_are_read_in_one_guarded_place() -> None:
    """No torch.load, pickle.load, eval or exec: the one Unpickler is unpickle.py's, with its allow-list.

    That of archive/dict_names.py finds nothing: it builds dicts and lists, with stubs for all else. Only what ranks of
    a job send each other is unpickled as it is, in pickling.py; and huggingface/torch_file.py reads files of torch.save
    by torch's own allow-list, ``weights_only=True``.
    """
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        for node in _nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                sent = name == "pickle.loads" and path == CORE / "distributed" / "pickling.py"
                sent |= name == "torch.load" and path == CORE / "huggingface" / "torch_file.py"
                assert sent or name not in ("torch.load", "pickle.load", "pickle.loads", "dill.load"), path
                guarded = path.name == "unpickle.py" or path == CORE / "archive" / "dict_names.py"
                assert guarded or name not in ("pickle.Unpickler", "pickle._Unpickler"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, node.keywords), path


def test_no_assert_statements() -> None:
    """Users' mistakes are errors of the family: no assert, which vanishes under -O."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        assert not [node for node in _nodes(path) if isinstance(node, ast.Assert)], path


def test_private_torch_names_stand_in_one_file() -> None:
    """Private names of torch are imported in torch_private.py alone, and its threaded process group for tests."""
    for path in [*CORE.rglob("*.py"), *STRATEGIES.rglob("*.py")]:
        private = {n for n in _imports(path) if n.startswith("torch.") and any(p.startswith("_") for p in n.split("."))}
        assert not private or path.name in ("torch_private.py", "rank_threads.py"), f"{path}: {private}"


def test_patterns_of_fields_match_whole_texts() -> None:
    """Every ``pattern=`` of a model is anchored: pydantic searches, and a name with anything around it would pass."""
    found = 0
    for name, path in FILES.items():
        for node in _nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "pattern":
                value = node.value
                names = vars(importlib.import_module(name))
                pattern = ast.literal_eval(value) if isinstance(value, ast.Constant) else names[ast.unparse(value)]
                # `$` is the end of the text to pydantic's engine, and not also the place before a last newline
                assert re.fullmatch(r"\^(?:\(\?:.*\)\??|[^|]*)\$", pattern), f"{path}: {pattern}"
                found += 1
    assert found


def _said(path: Path) -> list[str]:
    """The literal texts of everything that is raised or logged in a file."""
    said = [
        node
        for node in _nodes(path)
        if isinstance(node, ast.Raise)
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "logger"
        )
    ]
    parts = [part for node in said for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [part.value for part in parts if isinstance(part.value, str)]


def test_errors_name_arguments_that_exist() -> None:
    """Whatever an error tells the user to pass (``name=...``) is an argument of ours, torch's or transformers'."""
    known = {"stride", "group_dst", "enable_plan_caching", "use_collectives", "resume_from_checkpoint"}  # of others
    for path in FILES.values():
        known |= {node.arg for node in _nodes(path) if isinstance(node, ast.arg)}
        fields = (node.target for node in _nodes(path) if isinstance(node, ast.AnnAssign))
        known |= {field.id for field in fields if isinstance(field, ast.Name)}
    advice = r"(?<![\w.])([a-z_][a-z0-9_]*)="
    named = [
        (name, found) for name, path in FILES.items() for text in _said(path) for found in re.findall(advice, text)
    ]
    assert not [(name, found) for name, found in named if found not in known]
    assert len(named) > 10  # the search finds what it looks for
