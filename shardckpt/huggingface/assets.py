"""A model's files that are not weights: configuration and tokenizer, which are copied next to weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.engine.locations import expand_home, locate
from shardckpt.errors import CheckpointingException, StorageError, list_given, listed, show_given
from shardckpt.huggingface.adapters import find_adapter_mapping
from shardckpt.huggingface.names import ADAPTER, is_asset, is_copied
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.abilities import lacks_directory
from shardckpt.storage.filesystem import name_siblings, wrap_os_errors
from shardckpt.storage.input_file import read_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    PathLike = str | os.PathLike[str]

#: Most bytes of a file that is read: tokenizers have a few MiB.
_LIMIT = 1 << 30


def list_assets(assets: PathLike | Sequence[PathLike], mapping: object = None) -> list[Path]:
    """Return a model's files that are not weights: of a folder or the URL of one, or of a list of files.

    ``mapping`` is as a caller gives it: with an adapter's mapping, a folder's configuration alone counts. It is an
    error if there are no files, two have one name, or one is a folder, weights, or of a checkpoint.
    """
    if isinstance(assets, (str, os.PathLike)):
        files = _list_folder(assets, mapping)
    else:
        paths = list_given(assets)
        if wrong := [path for path in paths if not isinstance(path, (str, os.PathLike))]:
            raise CheckpointingException(
                f"assets: {show_given(wrong[0])} where a folder or a list of files is expected"
            )
        files = [Path(expand_home(path)) for path in paths]
    if not files:
        raise CheckpointingException(f"assets={assets}: it has no files other than weights")
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        raise CheckpointingException(f"assets: two files have one name, of {listed(sorted(names))}")
    if refused := [name for name in names if not is_copied(name)]:
        raise CheckpointingException(f"assets: {listed(refused)} cannot be copied: it is weights, or of a checkpoint")
    if folders := [str(path) for path in files if path.is_dir()]:
        raise CheckpointingException(f"assets: {listed(folders)} is a folder: give it alone, or files")
    return files


def _list_folder(assets: PathLike, mapping: object) -> list[Path]:
    """Return the files of a folder, or of a URL, that are copied."""
    if not os.fspath(assets):  # of a variable that is not set
        raise StorageError("assets='': the path is empty: give a directory ('.' is the current one) or a URL")
    folder = locate(assets, get_plugin_manager())
    if lacks_directory(folder):
        why = "that is a file: give the folder, or a list of files"
        if not folder.is_file():
            why = f"there is no such folder {name_siblings(folder)}".rstrip()
        raise StorageError(f"assets={assets}: {why}")
    with wrap_os_errors("list", folder):
        found = sorted(folder.iterdir(), key=lambda path: path.name)
        is_adapter = find_adapter_mapping(mapping) is not None
        is_wanted = is_asset if not is_adapter else (lambda name: name == ADAPTER)
        wanted = [path for path in found if is_wanted(path.name)]
        if lost := [path.name for path in wanted if path.is_symlink() and not path.exists()]:
            raise StorageError(f"assets={assets}: {listed(lost)} is a link to a missing file: restore the file")
        return [path for path in wanted if path.is_file()]


def read_asset(path: Path) -> bytes:
    """Return the content of a file of at most 1 GiB; links are followed, such as the Hub's cache has."""
    return read_file(path.resolve(), _LIMIT)
