"""The entry point: opens URLs by fsspec, which is imported when the first URL is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardckpt.storage.remote import RemoteFolder


def serves(scheme: str) -> bool:
    """Return whether fsspec knows a protocol, each of ``outer::inner``, and has its package; nothing is opened."""
    try:
        from fsspec import get_filesystem_class  # type: ignore[import-untyped]

        return all(get_filesystem_class(each) for each in scheme.split("::"))
    except (ImportError, ValueError):
        return False


@hookimpl
def shardckpt_filesystem(url: str, options: dict[str, str]) -> RemoteFolder | None:
    """Return the folder at a URL, or None if fsspec is not installed or does not know the protocol."""
    try:
        from shardckpt.integrations.fsspec.folder import open_folder
    except ModuleNotFoundError as exc:
        if exc.name == "fsspec":
            return None
        raise
    return open_folder(url, options)
