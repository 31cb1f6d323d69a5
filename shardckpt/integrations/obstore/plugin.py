"""The entry point: opens the URLs of clouds by obstore, which is imported when the first of them is opened."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from shardckpt.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from shardckpt.storage.remote import RemoteFolder

#: fsspec serves all other protocols, memory:// and http:// among them.
_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})


def serves(scheme: str) -> bool:
    """Return whether URLs of a scheme are served here; nothing is opened."""
    return scheme in _SCHEMES and importlib.util.find_spec("obstore") is not None


@hookimpl(tryfirst=True)  # before fsspec, which spools
def shardckpt_filesystem(url: str, options: dict[str, str]) -> RemoteFolder | None:
    """Return the folder at a URL, or None if obstore is not installed or does not serve the protocol."""
    if url.partition("://")[0] not in _SCHEMES:
        return None
    try:
        from shardckpt.integrations.obstore.folder import open_folder
    except ModuleNotFoundError as exc:
        if exc.name == "obstore":
            return None
        raise
    return open_folder(url, options)
