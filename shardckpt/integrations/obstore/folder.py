"""The folder at a URL, by obstore; credentials, region and endpoint come from its options or the environment."""

from __future__ import annotations

import functools
import logging
import os
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
import obstore.exceptions
from obstore.store import from_url

from shardckpt import settings
from shardckpt.errors import StorageError, is_first_warning
from shardckpt.integrations import multipart
from shardckpt.integrations.fsspec.plugin import shardckpt_filesystem as open_by_fsspec
from shardckpt.integrations.obstore.streamed_object import StreamedObject
from shardckpt.integrations.s3_options import SCHEMES, make_obstore_options
from shardckpt.plugins.stores import find_options
from shardckpt.storage.memory_budget import fit_parts, plan_upload
from shardckpt.storage.store_errors import find_problem, mask_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from obstore.store import ObjectStore

    from shardckpt.storage.store_abilities import PendingUpload

logger = logging.getLogger(__name__)

#: Variables with an endpoint; a server on loopback or in a cluster may have an http:// one.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
#: Prefixes of the names of the variables that configure a client.
_CONFIGURING = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_", "HTTPS_", "NO_PROXY", "SSL_", "http_", "https_", "no_proxy")
#: Seconds for which a client is used again: files that it has read, such as keys, may have changed since.
_SECONDS_OF_USE = 900
#: Bytes that a longer range is taken over in at a time: else the client holds all of it until the last byte is there,
#: in each of the reader's threads. A load of 1 GiB by 16 threads took 81 MiB more than its tensors instead of 222 MiB.
_PIECE_BYTES = 1 << 20
#: Bytes of the largest object that S3 copies by one request.
_MOST_COPIED = 5 << 30
_REFUSED = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
#: The beginning of the text that obstore adds to its errors, for its authors.
_DEBUG = "\n\nDebug source:"


class _Runtime:
    """The process that has used obstore: its threads do not survive a fork, and calls of the child would hang."""

    pid = 0


class ObstoreFolder:
    """The objects below a URL, which has no slash at its end.

    ``store`` is obstore's of the bucket, ``prefix`` the folder's path in it, without slashes at its ends. ``reopen``
    makes the folder in another process, given the URL: a pickle has neither store nor credentials. ``options`` are as
    for :func:`open_folder`.
    """

    def __init__(
        self,
        url: str,
        store: ObjectStore,
        prefix: str,
        reopen: Callable[[str], ObstoreFolder] | None = None,
        options: Mapping[str, str] = {},
    ) -> None:
        self.url = url
        self._store = store
        self._prefix = prefix
        self._reopen = reopen
        self._options = options
        #: Bytes of parts that an upload may hold; None for as many as the settings say.
        self._room: int | None = None

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each object directly below, by name."""
        found: dict[str, int] = self._list_level(
            "files", lambda found: {self._relative(item["path"]): item["size"] for item in found["objects"]}
        )
        return found

    def tree(self) -> dict[str, int]:
        """Return the size in bytes of each object below the URL at any depth, by path: one request for 1,000."""
        found: dict[str, int] = self._list_all("tree", lambda item: item["size"])
        return found

    def times(self) -> dict[str, float]:
        """Return when each object below the URL was written, by path, in seconds since 1970."""
        found: dict[str, float] = self._list_all("times", lambda item: item["last_modified"].timestamp())
        return found

    def folders(self) -> list[str]:
        """Return the names of the folders directly below."""
        found: list[str] = self._list_level("folders", lambda found: [*map(self._relative, found["common_prefixes"])])
        return found

    def remove_folder(self, name: str) -> None:
        """Do nothing: these stores have no folders without objects."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of an object from ``offset`` on; fewer where it ends."""
        return bytes(self._get(name, offset, nbytes))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the start of the buffer from ``offset`` of an object on; one copy, from the pieces that come."""
        if buffer.nbytes <= _PIECE_BYTES:
            found = self._get(name, offset, buffer.nbytes)
            buffer[: found.nbytes] = found
            return found.nbytes
        filled = 0
        with self._reading(name, offset) as path:
            answer = obstore.get(self._store, path, options={"range": (offset, offset + buffer.nbytes)})
            for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                buffer[filled : filled + len(piece)] = memoryview(piece)
                filled += len(piece)
        return filled

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file as an object, a large one in parts."""
        limits = plan_upload(self._room, path.stat().st_size)
        with self._calling():
            obstore.put(
                self._store,
                self._path(name),
                path,
                chunk_size=limits.part_bytes,
                max_concurrency=limits.parts,
            )

    def open_write(self, name: str, part_bytes: int) -> StreamedObject:
        """Begin an object whose parts are sent as they come."""
        parts = fit_parts(self._room, part_bytes)
        return StreamedObject(self._store, self._path(name), part_bytes, parts, self._calling)

    def limit_uploads(self, nbytes: int) -> None:
        """Hold at most so many bytes of an object at a time."""
        self._room = nbytes

    def create(self, name: str, data: bytes) -> None:
        """Write an object by a conditional request; FileExistsError if it is there."""
        with self._calling():
            obstore.put(self._store, self._path(name), data, mode="create")

    def read_tagged(self, name: str) -> tuple[bytes, object]:
        """Return all bytes of an object, and the tag by which :meth:`replace` knows that it is still the same."""
        with self._calling():
            found = obstore.get(self._store, self._path(name))
            tag = {key: found.meta[key] for key in ("e_tag", "version") if found.meta[key] is not None}
            return found.bytes().to_bytes(), tag or None

    def replace(self, name: str, data: bytes, tag: Any) -> None:
        """Write an object in the place of the one with that tag, by a conditional request; else FileExistsError."""
        with self._calling():
            try:
                obstore.put(self._store, self._path(name), data, mode=tag)
            except obstore.exceptions.PreconditionError as exc:
                raise FileExistsError(_shorten(exc)) from None

    def copy(self, source: str, name: str, nbytes: int) -> bool:
        """Copy an object of the same bucket by one request; False for another bucket, and for one of 5 GiB and more."""
        bucket, path = _split_url(source)
        if bucket != _split_url(self.url)[0] or nbytes > _MOST_COPIED:
            return False
        with self._calling():
            obstore.copy(self._store, path, self._path(name))
        return True

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

    def uploads(self) -> list[PendingUpload] | None:
        """Return the multipart uploads that have not ended, by s3fs; None without it, or of another store than S3."""
        is_s3 = self.url.partition("://")[0] in SCHEMES
        return multipart.list_uploads(self.url, self._options) if is_s3 else None

    def abort_upload(self, upload: PendingUpload) -> None:
        """Abort one of these."""
        multipart.abort_upload(self.url, upload, self._options)

    def _list_level(self, method: str, convert: Callable[[Any], Any]) -> Any:
        try:
            with self._calling():
                return convert(obstore.list_with_delimiter(self._store, self._prefix or None))
        except obstore.exceptions.InvalidPathError as exc:
            return self._list_otherwise(method, exc)

    def _list_all(self, method: str, convert: Callable[[Any], Any]) -> Any:
        try:
            with self._calling():
                found = obstore.list(self._store, self._prefix or None).collect()
        except obstore.exceptions.InvalidPathError as exc:
            return self._list_otherwise(method, exc)
        return {self._relative(item["path"]): convert(item) for item in found}

    def _list_otherwise(self, method: str, error: Exception) -> Any:
        """List by fsspec: obstore gives no listing with an object that it cannot name (``run//notes.txt``) in it.

        If fsspec, or its package for the protocol, is not installed, that is a StorageError.
        """
        try:
            folder = open_by_fsspec(self.url, {**self._options})
        except StorageError:  # it has no package for the protocol
            folder = None
        if folder is None:
            raise StorageError(
                f"cannot list {self.url}: {error}. No file of a checkpoint is named so: remove the object, or install "
                "a package that lists it, too (s3fs for s3://, gcsfs for gs://, adlfs for az://)"
            ) from error
        if is_first_warning(__name__, self.url):
            logger.warning(
                "%s: %s. No file of a checkpoint is named so, and fsspec lists in the place of obstore, by more "
                "requests: remove the object",
                self.url,
                error,
            )
        return getattr(folder, method)()

    def _get(self, name: str, offset: int, nbytes: int) -> memoryview:
        found = memoryview(b"")
        if nbytes:
            with self._reading(name, offset) as path:
                found = memoryview(obstore.get_range(self._store, path, start=offset, length=nbytes))
        return found

    @contextmanager
    def _reading(self, name: str, offset: int) -> Iterator[str]:
        """Return a context manager that gives an object's path to read from; to begin behind its end is no error."""
        path = self._path(name)
        try:
            with self._calling():
                yield path
        except obstore.exceptions.BaseError as exc:
            if find_problem(exc) is not None:
                raise
            with self._calling():
                size = obstore.head(self._store, path)["size"]
            if offset < size:  # else the store takes a range behind the end for an error
                raise

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


@functools.lru_cache(8)
def _open_store(
    bucket: str,
    variables: tuple[tuple[str, str], ...],
    options: tuple[tuple[str, str], ...],
    timeout: int,
    attempts: int,
    _: int,
) -> ObjectStore:
    """Open a bucket by its URL; one that was opened before is used again, with its connections.

    To make a client takes 6 ms of processor time, and each of its first requests a handshake. ``variables`` are the
    environment that configures it, ``timeout`` is the seconds that a request may take, ``attempts`` is how often it is
    sent at most. Another number at the end makes another client.
    """
    endpoints = [value for name, value in variables if name in _ENDPOINTS]
    endpoints += [value for name, value in options if name == "endpoint"]
    return from_url(
        bucket,
        **make_obstore_options(bucket, dict(options)),
        client_options={
            "timeout": timedelta(seconds=timeout),
            "allow_http": any(value.startswith("http://") for value in endpoints),
        },
        # The client repeats requests that fail at once; the errors that it gives up at are tried again by shardckpt's
        # own attempts. A request that took all its time is not repeated by both: the attempts would be squared.
        retry_config={"max_retries": attempts - 1, "retry_timeout": timedelta(seconds=timeout)},
    )


def _split_url(url: str) -> tuple[str, str]:
    """Return the URL of the bucket, and the path in it without slashes at its ends."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path.strip("/")


def open_folder(url: str, options: Mapping[str, str] = {}) -> ObstoreFolder:
    """Open the folder at a URL such as ``s3://bucket/path``; no request is sent.

    ``options`` are of the bucket, in addition to the environment's.
    """
    bucket, prefix = _split_url(url)
    # a client reads its configuration once: with another one, and after a while, there is another client
    variables = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_CONFIGURING)))
    limits = settings.remote_timeout(), settings.remote_attempts()
    given = tuple(sorted(options.items()))
    store = _open_store(bucket, variables, given, *limits, int(time.monotonic() / _SECONDS_OF_USE))
    return ObstoreFolder(url.rstrip("/"), store, prefix, _reopen, options)


def _reopen(url: str) -> ObstoreFolder:
    return open_folder(url, find_options(url))


def _shorten(error: BaseException) -> str:
    """Return the text of an error without the request that the store's answer may repeat, which has secrets."""
    return mask_secrets(str(error).partition(_DEBUG)[0])
