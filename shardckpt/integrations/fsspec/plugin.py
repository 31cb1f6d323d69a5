"""The entry point: serves URLs, and imports fsspec when the first one is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from shardckpt.storage import RemoteFolder


@hookimpl
def shardckpt_filesystem(url: str) -> RemoteFolder | None:
    """The folder at a URL of a protocol that fsspec knows."""
    try:
        from shardckpt.integrations.fsspec.folder import open_folder
    except ModuleNotFoundError as exc:
        if exc.name == "fsspec":
            return None
        raise
    return open_folder(url)
