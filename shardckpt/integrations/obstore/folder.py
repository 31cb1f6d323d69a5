"""The folder at a URL, by obstore, which takes credentials, region and endpoint from the environment."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
import obstore.exceptions
from obstore.store import from_url

from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.integrations.obstore.streamed_object import StreamedObject
from shardckpt.storage import find_problem, mask_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

#: Variables with an endpoint; a server on loopback or in a cluster may have an http:// one.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_REFUSED = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
#: What obstore adds to the text of its errors, for its authors.
_DEBUG = "\n\nDebug source:"


class _Runtime:
    """The process that has used obstore: its threads do not survive a fork, and calls of the child would hang."""

    pid = 0


class ObstoreFolder:
    """The objects below a URL.

    Args:
        url: The URL, without a slash at its end.
        store: obstore's store of the bucket.
        prefix: The folder's path in the bucket, without slashes at its ends.
        reopen: Makes the folder in another process, given the URL: a pickle has neither store nor credentials.
    """

    def __init__(
        self, url: str, store: ObjectStore, prefix: str, reopen: Callable[[str], ObstoreFolder] | None = None
    ) -> None:
        self.url = url
        self._store = store
        self._prefix = prefix
        self._reopen = reopen

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each object directly below, by name."""
        with self._calling():
            found = obstore.list_with_delimiter(self._store, self._prefix or None)
        return {self._relative(item["path"]): item["size"] for item in found["objects"]}

    def tree(self) -> dict[str, int]:
        """Return the size in bytes of each object below the URL at any depth, by path: one request for 1,000."""
        with self._calling():
            found = obstore.list(self._store, self._prefix or None).collect()
        return {self._relative(item["path"]): item["size"] for item in found}

    def folders(self) -> list[str]:
        """Return the names of the folders directly below."""
        with self._calling():
            found = obstore.list_with_delimiter(self._store, self._prefix or None)
        return [self._relative(path) for path in found["common_prefixes"]]

    def remove_folder(self, name: str) -> None:
        """Do nothing: these stores have no folders without objects."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of an object from ``offset`` on; fewer where it ends."""
        return bytes(self._get(name, offset, nbytes))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the start of the buffer from ``offset`` of an object on; one copy, from the client's memory."""
        found = self._get(name, offset, buffer.nbytes)
        buffer[: found.nbytes] = found
        return found.nbytes

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file as an object, a large one in parts."""
        with self._calling():
            obstore.put(
                self._store,
                self._path(name),
                path,
                chunk_size=settings.remote_part_mib() << 20,
                max_concurrency=settings.remote_parts(),
            )

    def open_write(self, name: str, part_bytes: int) -> StreamedObject:
        """Begin an object whose parts are sent as they come."""
        return StreamedObject(self._store, self._path(name), part_bytes, self._calling)

    def create(self, name: str, data: bytes) -> None:
        """Write an object by a conditional request; FileExistsError if it is there."""
        with self._calling():
            obstore.put(self._store, self._path(name), data, mode="create")

    def delete(self, name: str) -> None:
        """Delete an object."""
        with self._calling():
            obstore.delete(self._store, self._path(name))

    def delete_many(self, names: Collection[str]) -> None:
        """Delete objects: on S3 one request for 1,000."""
        try:
            with self._calling():
                obstore.delete(self._store, [self._path(name) for name in names])
        except FileNotFoundError:  # of stores that say so, and delete the others or not
            for name in names:
                with suppress(FileNotFoundError):
                    self.delete(name)

    def _get(self, name: str, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        try:
            with self._calling():
                return memoryview(obstore.get_range(self._store, self._path(name), start=offset, length=nbytes))
        except obstore.exceptions.BaseError as exc:
            if find_problem(exc) is not None:
                raise
            with self._calling():
                size = obstore.head(self._store, self._path(name))["size"]
            if offset < size:
                raise
            return memoryview(b"")  # stores take a range behind the end for an error

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _relative(self, path: str) -> str:
        return path[len(self._prefix) + 1 :] if self._prefix else path

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Return a context manager for a call of obstore: refuse it in a fork, and raise Python's kinds of errors."""
        pid = os.getpid()
        if _Runtime.pid not in (0, pid):
            raise StorageError(
                f"cannot use {self.url} in a fork of process {_Runtime.pid}, which has used obstore: its threads are "
                "not in the fork; start processes by multiprocessing's spawn or forkserver, or set "
                "SHARDCKPT_DISABLED_PLUGINS=obstore, and fsspec serves the URL"
            )
        _Runtime.pid = pid
        try:
            yield
        except obstore.exceptions.AlreadyExistsError as exc:
            raise FileExistsError(_shorten(exc)) from None
        except FileNotFoundError as exc:
            raise FileNotFoundError(_shorten(exc)) from None
        except _REFUSED as exc:
            raise PermissionError(_shorten(exc)) from None
        except obstore.exceptions.BaseError as exc:
            raise type(exc)(_shorten(exc)) from None

    def __reduce__(self) -> tuple[Callable[[str], ObstoreFolder], tuple[str]]:
        if self._reopen is None:
            raise TypeError("it was made of a store, which another process does not have")
        return self._reopen, (self.url,)


def open_folder(url: str) -> ObstoreFolder:
    """Open the folder at a URL such as ``s3://bucket/path``; no request is sent."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    store = from_url(
        f"{scheme}://{bucket}",
        client_options={
            "timeout": timedelta(seconds=settings.remote_timeout()),
            "allow_http": any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS),
        },
        # the client repeats requests; the errors that it gives up at are tried again by shardckpt's own attempts
        retry_config={"max_retries": settings.remote_attempts() - 1},
    )
    return ObstoreFolder(url.rstrip("/"), store, prefix.strip("/"), open_folder)


def _shorten(error: BaseException) -> str:
    """Return the text of an error without the request that the store's answer may repeat, which has secrets."""
    return mask_secrets(str(error).partition(_DEBUG)[0])
