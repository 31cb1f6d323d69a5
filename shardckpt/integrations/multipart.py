"""Multipart uploads to S3 that have not ended: listed and aborted by s3fs, since obstore does neither.

Their parts are no objects: listings do not show them, and they are paid for.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from shardckpt.integrations.s3_options import SCHEMES, make_s3fs_options
from shardckpt.storage.store_abilities import PendingUpload

if TYPE_CHECKING:
    from collections.abc import Mapping


def list_uploads(url: str, options: Mapping[str, str]) -> list[PendingUpload] | None:
    """Return the uploads below a URL, at any depth, that are neither complete nor aborted; None without s3fs.

    Credentials, region and endpoint come from where botocore looks for them; ``options`` of the bucket are added. A
    store that refuses is an OSError, as s3fs says it; botocore's errors pass, too.
    """
    if (client := _make_client(url, options)) is None:
        return None
    bucket, prefix = _split(url)
    found: list[Any] = []
    markers: dict[str, str] = {}
    while True:
        answer = client.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
        # a server may not know the prefix
        found += [each for each in answer.get("Uploads", ()) if each["Key"].startswith(prefix)]
        before = markers
        markers = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker", "")}
        # a server that does not know the markers would give the first page for ever
        if not answer.get("IsTruncated") or not markers["KeyMarker"] or markers == before:
            break
    return [
        PendingUpload(each["Key"][len(prefix) :], each["UploadId"], each["Initiated"].timestamp()) for each in found
    ]


def abort_upload(url: str, upload: PendingUpload, options: Mapping[str, str]) -> None:
    """Abort an upload that :func:`list_uploads` found below this URL, and delete its parts.

    To abort one that has ended is no error.
    """
    client = _make_client(url, options)
    bucket, prefix = _split(url)
    try:
        client.call_s3("abort_multipart_upload", Bucket=bucket, Key=f"{prefix}{upload.name}", UploadId=upload.id)
    except FileNotFoundError:  # NoSuchUpload
        return


def _split(url: str) -> tuple[str, str]:
    """Return the bucket of a URL, and the prefix of the keys below the URL."""
    bucket, _, path = url.partition("://")[2].partition("/")
    return bucket, f"{path.strip('/')}/" if path.strip("/") else ""


def _make_client(url: str, options: Mapping[str, str]) -> Any:
    # a client reads its configuration once: with another one there is another client
    variables = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    return _open_client(variables, url.partition("://")[0], tuple(sorted(options.items())))


@functools.lru_cache(4)
def _open_client(_: tuple[tuple[str, str], ...], scheme: str, options: tuple[tuple[str, str], ...]) -> Any:
    """Make a client, or return an earlier one of an equal environment; None if s3fs is not installed."""
    try:
        from s3fs import S3FileSystem  # type: ignore[import-untyped]
    except ModuleNotFoundError as exc:
        if exc.name == "s3fs":
            return None
        raise
    return S3FileSystem(skip_instance_cache=True, **make_s3fs_options(f"{scheme}://", dict(options)))


__all__ = ["SCHEMES", "abort_upload", "list_uploads"]
