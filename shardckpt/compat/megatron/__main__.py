"""``python -m shardckpt.compat.megatron PATH ...``: port a code base, in place, and say which files changed.

``megatron.core.dist_checkpointing`` becomes ``shardckpt.compat.megatron.dist_checkpointing``, in imports and in texts;
where it is imported with other names, as in ``from megatron.core import mpu, dist_checkpointing``, it gets a line of
its own. Relative imports of it in Megatron's own tree are ported, too. Of a folder all ``*.py`` files are ported, but
not in hidden folders, ``site-packages`` and ``node_modules`` below it; of a file with another suffix, which must be
named, only the dotted name changes. What is to be ported by hand is listed, and the exit code is 1: uses without an
import of their own, notebooks, shell scripts and YAML files of a folder, and what cannot be read or written.
"""

from __future__ import annotations

import ast
import codecs
import os
import re
import sys
from importlib.util import resolve_name
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_THERE, _HERE, _NAME = "megatron.core", "shardckpt.compat.megatron", "dist_checkpointing"
_ROOT = _THERE.partition(".")[0]
_DOTTED = re.compile(rb"(?<![\w.])megatron\.core\.dist_checkpointing\b")
#: An import in a file that is no Python, such as a cell of a notebook.
_IMPORT = re.compile(rb"\bfrom +megatron(\.core)? +import\b.*\bdist_checkpointing\b")
_OTHER_PACKAGES = ("site-packages", "node_modules")
_OTHER_SUFFIXES = (".ipynb", ".sh", ".yaml", ".yml")


def main(arguments: Sequence[str]) -> int:
    """Port files and folders; return 0 if all is ported, 1 if work by hand is left, 2 if there is nothing to port."""
    if not arguments or arguments[0].startswith("-"):
        return _say(__doc__.replace("``", ""), 0 if arguments in (["-h"], ["--help"]) else 2)
    missing = [path for path in arguments if not Path(path).exists()]
    if missing:
        return _say(f"error: there is no {', '.join(missing)}: nothing was changed", 2)
    status, ported = 0, 0
    for path in chain.from_iterable(_list_files(Path(argument)) for argument in arguments):
        try:
            is_changed, leftovers = _port_file(path)
        except (SyntaxError, OSError) as exc:
            why = f": {exc.strerror}" if isinstance(exc, OSError) else f", since Python does not parse it: {exc}"
            status = _say(f"{path}: left as it is{why}", 1)
            continue
        if is_changed:
            ported += 1
            _say(f"{path}: ported", 0)
        for line, what in leftovers:
            status = _say(f"{path}:{line}: port by hand: {what}", 1)
    for path, why in chain.from_iterable(_list_unread(Path(argument)) for argument in arguments):
        status = _say(f"{path}: left as it is{why}", 1)
    if not ported and not status:
        return _say(f"error: nothing in {', '.join(arguments)} imports {_THERE}.{_NAME}: nothing was changed", 2)
    return _say(f"files ported: {ported}", status)


def _port_file(path: Path) -> tuple[bool, list[tuple[int, str]]]:
    """Port a file, and return whether it changed, and lines and texts of the rest to port by hand."""
    source = path.read_bytes()
    is_python = path.suffix == ".py"
    new = port(source, _find_package(path)) if is_python else _rename(source)
    leftovers = sorted(_list_leftovers(new) if is_python else _list_imports(new))
    if new != source:
        path.write_bytes(new)
    return new != source, leftovers


def port(source: bytes, package: str = "") -> bytes:
    """Return a module's source with Megatron's checkpoint modules replaced by those here.

    Relative imports are resolved by ``package``, which has the module. A source that is not Python is a SyntaxError.
    """
    if source.startswith(codecs.BOM_UTF8):  # Python counts columns behind it
        return codecs.BOM_UTF8 + port(source.removeprefix(codecs.BOM_UTF8), package)
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    edits: list[tuple[int, int, bytes]] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = _resolve(node, package)
        begin, end = _span(node, starts)
        if node.level and f"{module}.".startswith(f"{_THERE}.{_NAME}."):
            absolute = f"from {module} import".encode()
            edits.append((begin, end, re.sub(rb"from[\s.\w]+?\bimport\b", absolute, source[begin:end], count=1)))
        elif module == _THERE and _NAME in (alias.name for alias in node.names):
            edits.extend(_move_out(node, source, starts))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return _rename(source)


def _move_out(node: ast.ImportFrom, source: bytes, starts: list[int]) -> Iterator[tuple[int, int, bytes]]:
    """Yield the edits that give the name a line of its own before an import of several names."""
    place = next(place for place, alias in enumerate(node.names) if alias.name == _NAME)
    alias = node.names[place]
    begin, end = _span(node, starts)
    moved = f"from {_HERE} import {ast.unparse(alias)}".encode()
    if len(node.names) == 1:
        yield begin, end, moved
        return
    indent = source[starts[node.lineno - 1] : begin]
    line_end = b"\r\n" if source[: starts[node.lineno]].endswith(b"\r\n") else b"\n"
    yield begin, begin, moved + (b"; " if indent.strip() else line_end + indent)
    first, last = _span(alias, starts)
    if place + 1 < len(node.names):
        yield first, _span(node.names[place + 1], starts)[0], b""
    elif source[begin:end].endswith(b")"):  # the comma before it may stay, and a comment behind that
        comma = re.match(rb"\s*,?", source[last:end])
        yield len(source[:first].rstrip()), last + (comma.end() if comma else 0), b""
    else:
        yield len(source[:first].rstrip(b" \t\r\n\\,")), last, b""


def _rename(source: bytes) -> bytes:
    return _DOTTED.sub(f"{_HERE}.{_NAME}".encode(), source)


def _span(node: ast.stmt | ast.alias, starts: list[int]) -> tuple[int, int]:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column


def _resolve(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module that names are imported from; ``""`` if it is beyond the package."""
    try:
        return resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return ""


def _list_files(path: Path) -> list[Path]:
    """Return the files to port: a file, or the modules of a folder except those that are replaced."""
    if path.is_file():
        return [path]
    replaced = f"{_THERE}.{_NAME}."
    modules = [file for file in _walk(path) if file.suffix == ".py"]
    return [file for file in modules if not f"{_find_package(file)}.".startswith(replaced)]


def _list_unread(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder that are not ported and have the name, and all that cannot be read, and why."""
    faults: list[OSError] = []
    for file in _walk(path, faults) if path.is_dir() else ():
        if file.suffix in _OTHER_SUFFIXES:
            try:
                source = file.read_bytes()
            except OSError as exc:
                faults.append(exc)
                continue
            if _DOTTED.search(source) or _IMPORT.search(source):
                yield file, ", since it is no *.py file: name it, and its dotted names are ported"
    yield from ((Path(fault.filename), f": {fault.strerror}") for fault in faults)


def _walk(path: Path, faults: list[OSError] | None = None) -> list[Path]:
    """Return the files of a folder, without hidden folders and other people's packages.

    ``faults`` gets the errors of folders that cannot be listed.
    """
    found: list[Path] = []
    for folder, folders, files in os.walk(path, onerror=None if faults is None else faults.append):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _OTHER_PACKAGES]
        found.extend(Path(folder, name) for name in files)
    return sorted(found)


def _list_imports(source: bytes) -> Iterator[tuple[int, str]]:
    """Yield line and text of imports in files of other languages."""
    for number, line in enumerate(source.splitlines(), 1):
        if _IMPORT.search(line):
            yield number, f"an import of Megatron's; import {_HERE}.{_NAME}"


def _find_package(path: Path) -> str:
    """Return the package of a module in Megatron's tree, else ``""``."""
    folders = Path(os.path.realpath(path)).parts[:-1]  # resolve() raises at links in a circle
    return ".".join(folders[len(folders) - 1 - folders[::-1].index(_ROOT) :]) if _ROOT in folders else ""


def _list_leftovers(source: bytes) -> Iterator[tuple[int, str]]:
    """Yield line and text of uses without an import, ``core.dist_checkpointing`` by ``from megatron import core``."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [
        (node, alias) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
    ]
    bound = {
        alias.asname or alias.name
        for node, alias in imports
        if isinstance(node, ast.Import) or node.module == "megatron"
    }
    is_served = any(f"{name}.".startswith(f"{_HERE}.{_NAME}.") for name in bound)
    has_root = any((alias.asname or alias.name).partition(".")[0] == _ROOT for _, alias in imports)
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr == _NAME:
            owner = ast.unparse(node.value)
            if owner == _HERE and not is_served:
                yield node.lineno, f"nothing imports {ast.unparse(node)}; import {_HERE}.{_NAME}"
            elif owner != _HERE and owner in bound:
                yield node.lineno, f"{ast.unparse(node)} is Megatron's; import {_HERE}.{_NAME}"
        elif is_served and not has_root and isinstance(node, ast.Name) and node.id == _ROOT:
            yield node.lineno, f"{_ROOT} was imported with {_NAME} alone; import {_THERE}"
        elif isinstance(node, ast.Call):  # getattr(core, "dist_checkpointing"), or a function that imports by a text
            texts = [arg.value if isinstance(arg, ast.Constant) else getattr(arg, "id", "") for arg in node.args]
            if _NAME in texts and {_THERE, *bound}.intersection(texts):
                yield node.lineno, f"{ast.unparse(node)} is Megatron's; give it {_HERE}"


def _say(text: str, status: int) -> int:
    print(text, file=sys.stderr if status else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
