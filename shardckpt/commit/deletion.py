"""Delete objects from a store, by few requests; to delete what is gone is no error."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.errors import format_many
from shardckpt.storage import DeletesMany, RemotePath, attempt

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.storage import RemoteFolder


def delete_objects(folder: RemoteFolder, names: Collection[str]) -> None:
    """Delete objects from a store, by few requests where it can; it is no error if they are gone.

    Raises:
        StorageError: the store failed in every attempt.
    """
    if names and isinstance(folder, DeletesMany):
        delete_many = folder.delete_many
        attempt(f"delete {format_many(len(names), 'object')} of", RemotePath(folder), lambda: delete_many(names))
        return
    if len(names) < 2:  # noqa: PLR2004
        for name in names:
            delete_object(folder, name)
        return
    with ThreadPoolExecutor(settings.remote_threads(), "shardckpt-delete") as threads:
        list(threads.map(functools.partial(delete_object, folder), names))


def delete_object(folder: RemoteFolder, name: str) -> None:
    """Delete an object from a store; it is no error if it is gone.

    Raises:
        StorageError: the store failed in every attempt.
    """

    def delete() -> None:
        with suppress(FileNotFoundError):
            folder.delete(name)

    attempt("delete", RemotePath(folder) / name, delete)
