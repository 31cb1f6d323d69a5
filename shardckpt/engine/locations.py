"""The location of a checkpoint: a directory of this machine, or a URL that a plugin serves."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardckpt.commit import NAME_MAX, freed_bytes
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest import MARKER_NAME
from shardckpt.storage import RemotePath, is_there, list_objects, mask_password, on_store

if TYPE_CHECKING:
    from shardckpt.plugins import PluginManager
    from shardckpt.storage import RemoteFolder

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:_-]*://")
_CUT_URL = re.compile(r"([A-Za-z][A-Za-z0-9+._-]+:)/[^/]")


def locate(path: str | os.PathLike[str], plugins: PluginManager) -> Path:
    """Return the directory or store folder that a path or URL names; it need not exist.

    Args:
        path: A path, of which links and ``..`` are resolved; a ``file://`` URL, which is a path; or another URL.
        plugins: The plugin manager, whose plugins serve URLs.

    Returns:
        An absolute path, or a :class:`shardckpt.storage.RemotePath`.

    Raises:
        StorageError: no plugin serves the URL, or a name in the path is too long.
    """
    text = os.fspath(path)
    if (local := _find_local(text)) is not None:
        return local
    url = text.rstrip("/")
    if "://" not in url:
        raise StorageError(f"{text} names a store: give a URL with the checkpoint's name in it")
    return RemotePath(open_folder(url, plugins))


def locate_local(path: str | os.PathLike[str], action: str) -> Path:
    """Return the directory that a path names, for an action that stores cannot do.

    Args:
        path: A path, or a ``file://`` URL, as for :func:`locate`.
        action: The action, for the error: "take keys out of".

    Raises:
        CheckpointingException: it is another URL.
    """
    text = os.fspath(path)
    if (local := _find_local(text)) is None:
        raise CheckpointingException(
            f"cannot {action} {mask_password(text)}: it takes a directory of this machine, because a store cannot "
            "change several objects in one step; give a path, or load what is to be kept and save it to another URL"
        )
    return local


def find_save_time(directory: Path) -> float | None:
    """Return when the last file of a commit was written, or else the directory changed, in seconds since 1970.

    None on a store, whose plugins do not say.
    """
    if on_store(directory) is not None:
        return None
    marker = directory / MARKER_NAME
    return (marker if is_there(marker) else directory).stat().st_mtime


def measure(directory: Path) -> int:
    """Return the bytes on disk that a checkpoint's directory or URL takes, other files in it included."""
    remote = on_store(directory)
    return freed_bytes(directory) if remote is None else sum(list_objects(remote.folder).values())


def open_folder(url: str, plugins: PluginManager) -> RemoteFolder:
    """Return the store folder that the first plugin that serves a URL makes for it.

    Args:
        url: The URL.
        plugins: The plugin manager.

    Raises:
        StorageError: no plugin serves the URL, or the one that does has failed.
    """
    hook = plugins.hook.shardckpt_filesystem
    try:
        folder: RemoteFolder | None = hook(url=url)
    except CheckpointingException:
        raise
    except Exception as exc:  # a plugin may fail in any way
        raise StorageError(f"cannot open {mask_password(url)}: {type(exc).__name__}: {exc}") from exc
    if folder is None:
        names = ", ".join(sorted(impl.plugin_name for impl in hook.get_hookimpls())) or "none"
        raise StorageError(
            f"cannot open {mask_password(url)}: no installed plugin serves {url.partition('://')[0]}:// (plugins that "
            f"serve URLs: {names}). pip install 'shardckpt[obstore]' for s3://, gs:// and az://, or "
            "pip install 'shardckpt[fsspec]' and what fsspec needs for the protocol (gcsfs for gs://), or pip install "
            f"'shardckpt[msc]' for msc://{plugins.faults_text()}"
        )
    return folder


def check_names(path: Path) -> Path:
    """Return the path itself, if no name in it is too long: else a save would fail after all is written.

    Raises:
        StorageError: a name is too long for file systems.
    """
    for part in path.parts:
        if len(os.fsencode(part)) > NAME_MAX:
            raise StorageError(
                f"{path}: the name {part:.40}... has {len(os.fsencode(part))} bytes, and file systems allow "
                f"{NAME_MAX}: give a shorter one"
            )
    return path


def _find_local(text: str) -> Path | None:
    """Return the directory that a path or a ``file://`` URL names; None for another URL."""
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StorageError(
                f"{text} names a file of another machine, {parts.netloc}; file:///path has three slashes"
            )
        text = url2pathname(parts.path)
    elif _URL.match(text):
        return None
    cut = _CUT_URL.match(text)
    if cut and not os.path.lexists(cut[1]):
        raise StorageError(
            f"{text} looks like a URL in which pathlib has replaced two slashes by one: give URLs as str, not as Path "
            f"(a local directory of that name can be given as ./{text})"
        )
    return check_names(Path(os.path.realpath(text)))
