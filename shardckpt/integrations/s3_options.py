"""Options of a bucket in ``SHARDCKPT_STORES``, as the clients of S3 call them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, name_known
from shardckpt.storage.store_errors import mask_password

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The URLs whose store is S3.
SCHEMES = frozenset({"s3", "s3a"})
#: The names that obstore, and then s3fs, have for the options of all clients.
_NAMES = {
    "endpoint": ("endpoint", "endpoint_url"),
    "region": ("region", "region_name"),
    "access_key_id": ("access_key_id", "key"),
    "secret_access_key": ("secret_access_key", "secret"),
    "session_token": ("session_token", "token"),
}
_PROFILE = "profile"


def make_obstore_options(url: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of ``obstore.store.from_url`` by the options of a URL; other stores' options are obstore's own.

    An option of S3 that is not known is an error; a profile needs boto3.
    """
    if url.partition("://")[0] not in SCHEMES:
        return {"config": dict(options)} if options else {}
    check_options(url, options)
    found: dict[str, Any] = {"config": {_NAMES[name][0]: text for name, text in options.items() if name != _PROFILE}}
    if _PROFILE in options:
        try:
            import boto3  # type: ignore[import-untyped]
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ModuleNotFoundError as exc:
            raise CheckpointingException(
                f"{url}: the option 'profile' needs boto3: pip install boto3, or give access_key_id and "
                "secret_access_key"
            ) from exc
        session = boto3.Session(profile_name=options[_PROFILE])
        found["credential_provider"] = Boto3CredentialProvider(session)
        if session.region_name:
            found["config"].setdefault("region", session.region_name)
    return found


def make_s3fs_options(url: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of fsspec for the options of a URL; other stores' options are the filesystem's own.

    An option of S3 that is not known is an error.
    """
    if url.partition("://")[0] not in SCHEMES:
        return dict(options)
    check_options(url, options)
    found: dict[str, Any] = {_NAMES[name][1]: text for name, text in options.items() if name in _NAMES}
    if "region_name" in found:
        found["client_kwargs"] = {"region_name": found.pop("region_name")}
    return found | {name: text for name, text in options.items() if name == _PROFILE}


def check_options(url: str, options: Mapping[str, str]) -> None:
    """Raise the error of an option that S3 does not know; other stores' options are not known here."""
    unknown = options.keys() - {*_NAMES, _PROFILE}
    if unknown and url.partition("://")[0] in SCHEMES:
        wrong = min(unknown)
        raise CheckpointingException(
            f"{mask_password(url)}: SHARDCKPT_STORES has the option {wrong!r}, which S3 does not "
            f"{name_known(wrong, [*_NAMES, _PROFILE], 'options', limit=10)}"
        )
