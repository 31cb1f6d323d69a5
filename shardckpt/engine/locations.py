"""The location of a checkpoint: a directory of this machine, or a URL that a plugin serves."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from shardckpt.commit.staging_names import NAME_MAX
from shardckpt.errors import CheckpointingException, StorageError, show_given
from shardckpt.manifest.names import MARKER_NAME
from shardckpt.plugins.stores import open_folder
from shardckpt.storage.abilities import has_links, takes_requests
from shardckpt.storage.disk_usage import freed_bytes, used_bytes
from shardckpt.storage.filesystem import is_there, wrap_os_errors
from shardckpt.storage.places import read_listing, resolve_name
from shardckpt.storage.remote import RemotePath
from shardckpt.storage.store_errors import mask_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardckpt.plugins.manager import PluginManager

#: The index of a checkpoint of DCP, which plain DCP has and Megatron's, with ``metadata.json``, too.
_DCP_INDEX = ".metadata"
#: The libraries whose layouts have no index or marker that says so, by the backends that read them.
_LIBRARIES = {"deepspeed": "DeepSpeed", "huggingface": "Hugging Face", "torch_save": "torch.save"}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:_-]*://")
_CUT_URL = re.compile(r"([A-Za-z][A-Za-z0-9+._-]+:)/[^/]")


def locate(path: str | os.PathLike[str], plugins: PluginManager) -> Path:
    """Return the directory or store folder that a path or URL names; it need not exist.

    Of a path ``~``, links and ``..`` are resolved; a ``file://`` URL is a path. It is a StorageError if no plugin
    serves the URL, or a name in the path is too long.
    """
    text = _read_path(
        path, "checkpoint", ": the state dict is first, then the path: save(state, path), load(state, path)"
    )
    if (local := find_local(text)) is not None:
        return local
    url = text.rstrip("/")
    if "://" not in url:
        raise StorageError(f"{text} names a store: give a URL with the checkpoint's name in it")
    return RemotePath(open_folder(url, plugins))


def locate_local(path: str | os.PathLike[str], action: str) -> Path:
    """Return the directory that a path or ``file://`` URL names, for an action that stores cannot do.

    Another URL is an error that names the action: "take keys out of".
    """
    text = _read_path(path, "checkpoint")
    if (local := find_local(text)) is None:
        raise CheckpointingException(
            f"cannot {action} {mask_password(text)}: it takes a directory of this machine, because a store cannot "
            "change several objects in one step; give a path, or load the keys to keep and save them to another URL"
        )
    return local


def locate_file(path: str | os.PathLike[str], action: str) -> Path:
    """Return the file that a path or ``file://`` URL names, links unresolved, for an action that stores cannot do.

    Another URL is an error that names the action.
    """
    text = _read_path(path, "file")
    if (local := find_local_text(text)) is None:
        raise CheckpointingException(
            f"cannot {action} {mask_password(text)}: it takes a file of this machine; give a path, and copy the file "
            "from the store before, or to it afterwards"
        )
    return check_names(Path(local))


def _read_path(path: object, what: str, advice: str = "") -> str:
    """Return the text of a caller's path or URL; an error if it is neither."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointingException(f"{show_given(path)} in the place of a {what}'s path or URL{advice}")
    return os.fspath(path)


def refuse_overlap(sources: Iterable[Path], target: Path, *, in_place: bool = False) -> None:
    """Raise an error if the target would replace a source, or be a part of it.

    Call it before anything is written. Paths are as :func:`locate` returned them, and compared as files are: by links,
    too. With ``in_place`` the target may be a source as a whole, which it replaces in one step when it is complete. The
    target need not exist. The error names both.
    """
    for source in sources:
        found = _find_overlap(source, target)
        if found == _SAME and in_place:
            continue
        if found:
            raise CheckpointingException(
                f"{target} {found.format(source=source)}: it would replace its own source. Nothing was written; "
                "give another target"
            )


def is_same_place(source: Path, target: Path) -> bool:
    """Return whether two places, as :func:`locate` returned them, are one: by links, and all schemes of a store."""
    return _find_overlap(source, target) == _SAME


#: How a target may overlap a source.
_SAME = "is the source"
_INSIDE = "is in the source, {source}"
_AROUND = "has the source, {source}, in it"
_MEMBER = "is a file of the source, {source}"


def _find_overlap(source: Path, target: Path) -> str:
    """Return how a target overlaps a source, or ``""``."""
    one, other = resolve_name(source), resolve_name(target)
    if one == other:
        return _SAME
    if one in other.parents:
        return _INSIDE
    if other in one.parents:
        return _AROUND
    return _find_shared_file(source, target) if has_links(source) and has_links(target) else ""


def _find_shared_file(source: Path, target: Path) -> str:
    """Return how two local paths overlap by hard links, or by links in the source's directory."""
    with wrap_os_errors("access", target):
        if not target.exists():
            return ""
        if target.is_file():
            known = target.stat()
            for path in [source] if source.is_file() else source.rglob("*"):
                if path.is_file() and os.path.samestat(path.stat(), known):
                    return _SAME if path == source else _MEMBER
            return ""
        real = Path(os.path.realpath(target))
        links = (path for path in source.rglob("*") if path.is_symlink()) if source.is_dir() else ()
        return next((_AROUND for path in links if real in Path(os.path.realpath(path)).parents), "")


def find_save_time(directory: Path) -> float | None:
    """Return when a checkpoint's marker was written, or else its directory changed, in seconds since 1970.

    None on a store, which does not say.
    """
    if takes_requests(directory):
        return None
    marker = directory / MARKER_NAME
    return (marker if is_there(marker) else directory).stat().st_mtime


def name_library(place: Path, backend: str) -> str:
    """Return the library that wrote a checkpoint of another library, such as ``Megatron-Core``, by its files.

    Where the files do not show it, that is the name of the backend.
    """
    if backend in _LIBRARIES:
        return "safetensors" if place.suffix == ".safetensors" else _LIBRARIES[backend]
    if is_there(place / MARKER_NAME):
        return "Megatron-Core"
    if is_there(place / _DCP_INDEX):
        return "PyTorch DCP"
    # a format that is recognised by content has the name of the library that writes it
    return backend


def measure(directory: Path, count: Callable[[Path], int] = used_bytes) -> int:
    """Return the bytes that a checkpoint's directory or URL takes, other files in it and hard links included."""
    found = read_listing(directory)
    return count(directory) if found is None else sum(found.values())


def measure_freed(directory: Path) -> int:
    """Return the bytes that a removal of a checkpoint or folder frees: of files without a hard link elsewhere."""
    return measure(directory, freed_bytes)


def check_names(path: Path) -> Path:
    """Return the path itself, if no name in it is too long: else a save would fail after all is written."""
    for part in path.parts:
        if len(os.fsencode(part)) > NAME_MAX:
            raise StorageError(
                f"{path}: the name {part:.40}... has {len(os.fsencode(part))} bytes, and file systems allow "
                f"{NAME_MAX}: give a shorter one"
            )
    return path


def expand_home(path: str | os.PathLike[str]) -> str:
    """Return a path with the home directory in the place of ``~`` or ``~user`` where it begins so; URLs stay."""
    return os.path.expanduser(path)  # noqa: PTH111 - as text: a Path would make one slash of two


def find_local(text: str) -> Path | None:
    """Return the directory that a path or a ``file://`` URL names; None for another URL.

    An empty path, and a URL that lacks a slash, or that names another machine, is a StorageError.
    """
    local = find_local_text(text)
    if local is None:
        return None
    try:
        return _make_path(os.path.realpath(local))
    except FileNotFoundError as exc:
        raise StorageError(
            f"{text} is a relative path, and the current directory of this process is gone: give an absolute path"
        ) from exc


def find_local_text(text: str) -> str | None:
    """Return the path that :func:`find_local` resolves, links unresolved; None for a URL that is not ``file://``."""
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StorageError(
                f"{text} names a file of another machine, {parts.netloc}; file:///path has three slashes"
            )
        text = unquote(parts.path)
    elif _URL.match(text):
        return None
    if not text:  # an empty path would mean the current directory; it comes from a setting that was not made
        raise StorageError("the path is empty: give a directory ('.' is the current one), a file or a URL")
    if "\0" in text:
        raise StorageError(f"{text!r} has a null byte, which no file system has in a name")
    cut = _CUT_URL.match(text)
    if cut and not is_there(Path(cut[1])):
        raise StorageError(
            f"{text} looks like a URL that lacks a slash: give {text.replace(':/', '://', 1)}, in Python as str, since "
            f"pathlib replaces two slashes by one (a local directory of that name can be given as ./{text})"
        )
    return expand_home(text)


@functools.lru_cache(16)  # the same few checkpoints, or folders of them, are loaded from again and again
def _make_path(text: str) -> Path:
    return check_names(Path(text))
