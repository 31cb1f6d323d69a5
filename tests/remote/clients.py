"""Which client serves ``s3://`` URLs in a test."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shardckpt.integrations.fsspec import folder as fsspec_folder
from shardckpt.plugins import hookimpl
from tests.plugged import registered


class _PrefersFsspec:
    @staticmethod
    @hookimpl(tryfirst=True)
    def shardckpt_filesystem(url: str) -> Any:
        return fsspec_folder.open_folder(url)


def served_by(client: str) -> AbstractContextManager[Any]:
    """Serve them by ``"obstore"``, as without this, or by ``"s3fs"``; a context manager."""
    return registered(_PrefersFsspec()) if client == "s3fs" else nullcontext()
