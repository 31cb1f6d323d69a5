"""Where a checkpoint is: a directory of this machine, or a URL that some plugin serves."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage import NAME_MAX, RemotePath, masked

if TYPE_CHECKING:
    from shardckpt.plugins import PluginHost
    from shardckpt.storage import RemoteFolder

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:_-]*://")
_CUT_URL = re.compile(r"([A-Za-z][A-Za-z0-9+._-]+:)/[^/]")


def locate(path: str | os.PathLike[str], host: PluginHost) -> Path:
    """The directory or URL that a caller means.

    Args:
        path: A path, with links and ``..`` resolved here; a ``file://`` URL, which is a path; or another URL.
        host: The plugins that serve URLs.

    Raises:
        StorageError: no plugin serves the URL.
    """
    text = os.fspath(path)
    if not _URL.match(text):
        return _local(text)
    if text.lower().startswith("file://"):
        return _local(_path_of(text))
    url = text.rstrip("/")
    if "://" not in url:
        raise StorageError(f"{text} names a whole store: give a URL with the checkpoint's name in it")
    return RemotePath(open_folder(url, host))


def locate_local(path: str | os.PathLike[str], action: str) -> Path:
    """The directory that a caller means, for what cannot be done on a store.

    Args:
        path: As for :func:`locate`.
        action: What cannot, for the error: "take keys out of".
    """
    text = os.fspath(path)
    if _URL.match(text) and not text.lower().startswith("file://"):
        raise CheckpointingException(
            f"cannot {action} {masked(text)}: that takes a directory of this machine, because a store has no "
            "step that changes several objects at once; give a path, or load what is wanted and save it to another URL"
        )
    return _local(_path_of(text) if _URL.match(text) else text)


def open_folder(url: str, host: PluginHost) -> RemoteFolder:
    """What the first plugin that serves the URL gives for it."""
    hook = host.hook.shardckpt_filesystem
    try:
        folder: RemoteFolder | None = hook(url=url)
    except CheckpointingException:
        raise
    except Exception as exc:  # a plugin may fail in any way
        raise StorageError(f"cannot open {masked(url)}: {type(exc).__name__}: {exc}") from exc
    if folder is None:
        names = ", ".join(sorted(impl.plugin_name for impl in hook.get_hookimpls())) or "none"
        raise StorageError(
            f"cannot open {masked(url)}: no installed plugin serves {url.partition('://')[0]}:// (plugins that serve "
            f"URLs: {names}). pip install 'shardckpt[fsspec]' and what fsspec needs for the protocol (s3fs for s3://, "
            f"gcsfs for gs://), or pip install 'shardckpt[msc]' for msc://{host.faults_text()}"
        )
    return folder


def check_names(path: Path) -> Path:
    """The path itself, if a file system can have its names: a save would find out when all is written.

    Raises:
        StorageError: one of them is too long.
    """
    for part in path.parts:
        if len(os.fsencode(part)) > NAME_MAX:
            raise StorageError(
                f"{path}: the name {part:.40}... has {len(os.fsencode(part))} bytes, and file systems have names of "
                f"{NAME_MAX} at most: give a shorter one"
            )
    return path


def _local(text: str) -> Path:
    cut = _CUT_URL.match(text)
    if cut and not os.path.lexists(cut[1]):
        raise StorageError(
            f"{text} looks like a URL of which pathlib has made one slash of two: give URLs as str, not as Path (a "
            f"local directory of that name can be given as ./{text})"
        )
    return check_names(Path(os.path.realpath(text)))


def _path_of(url: str) -> str:
    """The path that a ``file://`` URL says."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise StorageError(f"{url} names a file of another machine, {parts.netloc}; file:///path has three slashes")
    return url2pathname(parts.path)


__all__ = ["check_names", "locate", "locate_local", "open_folder"]
