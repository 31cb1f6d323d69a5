"""The folder of a URL: made by the first plugin that serves it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardckpt import settings
from shardckpt.errors import CheckpointingException, PluginError, StorageError, name_known
from shardckpt.storage.abilities import on_store
from shardckpt.storage.places import list_folders
from shardckpt.storage.remote import RemotePath
from shardckpt.storage.store_errors import mask_password, mask_secrets

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.remote import RemoteFolder

#: A scheme at the start of a URL, or of a part of one that chains several.
_SCHEME = re.compile(r"(?:^|(?<=::))[A-Za-z][A-Za-z0-9+.-]*(?=::|://)")

#: The end of an error about a URL without objects. The command adds the names next to it.
ABSENT = "does not exist, or has no objects"
#: The URL of a bucket, without a path and a slash at its end.
_BUCKET = r"^[a-z][a-z0-9+.-]*://[^/]+$"
#: The methods of every RemoteFolder, in addition to its ``url``.
_METHODS = ("files", "read", "upload", "delete")


def open_folder(url: str, plugins: PluginManager) -> RemoteFolder:
    """Return the store folder that the first plugin that serves a URL makes for it.

    Plugins get its scheme in lower case. It is a StorageError if no plugin serves the URL, or the one that does has
    failed; an object that is no store is a PluginError.
    """
    url = _SCHEME.sub(lambda scheme: scheme[0].lower(), url)  # schemes are equal in any case, and plugins compare them
    hook = plugins.hook.shardckpt_filesystem
    try:
        folder: RemoteFolder | None = hook(url=url, options=find_options(url))
    except CheckpointingException:
        raise
    except Exception as exc:  # a plugin may fail in any way
        from shardckpt.plugins.origin import bracket_origin  # slow to import

        origin = bracket_origin(exc, plugins)
        # the error may quote the URL
        said = mask_secrets(f"cannot open {url}: {type(exc).__name__}: {exc}{origin}")
        raise StorageError(said) from exc
    if folder is None:
        raise _unserved_error(url, plugins)
    lacks = [name for name in _METHODS if not callable(getattr(folder, name, None))]
    if lacks or not isinstance(getattr(folder, "url", None), str):
        raise PluginError(
            f"cannot open {mask_password(url)}: the hook shardckpt_filesystem of a plugin returned {folder!r:.100}, "
            f"which is no shardckpt.storage.RemoteFolder: it lacks {', '.join(lacks) or 'url'}. Let it return such an "
            f"object, or None for a URL that it does not serve (plugins that serve URLs: {_name_servers(plugins)})"
        )
    return folder


def open_below(place: Path, name: str, plugins: PluginManager) -> Path:
    """Return a folder in a directory, or at a URL the folder below it; ``""`` is the place itself."""
    if not name:
        return place
    if (remote := on_store(place)) is None:
        return place / name
    return RemotePath(open_folder(f"{remote.url}/{name}", plugins))


def check_served(url: str, plugins: PluginManager) -> None:
    """Check that a plugin may serve a URL, without opening it; plugins with ``serves(scheme)`` are asked."""
    scheme = url.partition("://")[0].lower()
    found = [getattr(impl.plugin, "serves", None) for impl in plugins.hook.shardckpt_filesystem.get_hookimpls()]
    if not any(serves is None or serves(scheme) for serves in found):
        raise _unserved_error(url, plugins)


def _unserved_error(url: str, plugins: PluginManager) -> StorageError:
    return StorageError(
        f"cannot open {mask_password(url)}: no installed plugin serves {url.partition('://')[0]}:// (plugins that "
        f"serve URLs: {_name_servers(plugins)}). `pip install 'shardckpt[obstore]'` for s3://, gs:// and az://, or "
        "`pip install 'shardckpt[fsspec]'` and fsspec's package for the protocol (gcsfs for gs://), or "
        f"`pip install 'shardckpt[msc]'` for msc://{plugins.faults_text()}"
    )


def _name_servers(plugins: PluginManager) -> str:
    found = plugins.hook.shardckpt_filesystem.get_hookimpls()
    return ", ".join(sorted(impl.plugin_name for impl in found)) or "none"


def find_options(url: str) -> dict[str, str]:
    """Return the options in the file of ``SHARDCKPT_STORES`` for the bucket of a URL; ``{}`` without any."""
    scheme, _, rest = url.partition("://")
    return read_stores().get(f"{scheme}://{rest.partition('/')[0]}", {})


def read_stores() -> dict[str, dict[str, str]]:
    """Return the options in the file of ``SHARDCKPT_STORES`` by bucket; ``{}`` if there is none.

    It is an error if the file cannot be read, or is no object of buckets with an object of texts each.
    """
    file = settings.stores_file()
    if file is None:
        return {}
    from pydantic import ValidationError  # slow to import, and mostly there is no such file

    try:
        return _make_parser().validate_json(Path(file).read_bytes())
    except OSError as exc:
        raise CheckpointingException(f"{settings.STORES}={file}: cannot read it: {exc.strerror}") from exc
    except ValidationError as exc:
        # not the values: they may be keys
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in exc.errors()[:3])
        raise CheckpointingException(
            f'{settings.STORES}={file}: expected {{"s3://bucket": {{"endpoint": "https://...", ...}}, ...}}: {wrong}'
        ) from None


@functools.cache
def _make_parser() -> TypeAdapter[dict[str, dict[str, str]]]:
    from pydantic import Field, TypeAdapter

    return TypeAdapter(dict[Annotated[str, Field(pattern=_BUCKET)], dict[str, str]])


def name_stored_siblings(url: str, plugins: PluginManager) -> str:
    """Return, for an error that nothing is at a URL, the nearest name next to it, and the first of the others."""
    above, _, name = url.rstrip("/").rpartition("/")
    try:
        folders = list_folders(RemotePath(open_folder(above, plugins)))
    except CheckpointingException:  # a bucket, a store that lists no folders, or one that may not be listed
        return ""
    siblings = [folder for folder in folders if not folder.startswith(".")]
    return name_known(name, siblings, f"in {mask_password(above)}")
