"""Write a file in one go, or replace one; each is durable when the call returns."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardckpt.commit.commit import discard_staging
from shardckpt.engine.locations import check_names
from shardckpt.engine.pruning import open_staging
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.huggingface.assets import read_asset
from shardckpt.huggingface.torch_file import is_torch_file
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.filesystem import open_new, sync_directory, sync_file, wrap_os_errors
from shardckpt.storage.safetensors_header import HEADER_LIMIT, LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardckpt.storage.journal import Journal

#: The name of a file in its staging directory.
_STAGED = "file"


def _is_safetensors_file(path: Path) -> bool:
    with wrap_os_errors("open", path), path.open("rb") as file:
        first = file.read(LENGTH_BYTES + 1)
    return int.from_bytes(first[:LENGTH_BYTES], "little") <= HEADER_LIMIT and first[LENGTH_BYTES:] == b"{"


_IS_KIND = {"torch.save": is_torch_file, "safetensors": _is_safetensors_file}
#: Files of such names may be damaged, or pointers of Git LFS: they are replaced whatever is in them.
_SUFFIXES = {"torch.save": (".bin", ".ckpt", ".pt", ".pth"), "safetensors": (".safetensors",)}


def refuse_other_file(path: Path, kind: Literal["torch.save", "safetensors"]) -> None:
    """Raise an error if a file that a new one would replace has neither a name nor content of its kind.

    Such a name is mistyped. An empty file is replaced.
    """
    with wrap_os_errors("access", path):
        is_filled = path.is_file() and path.stat().st_size > 0
    if is_filled and not path.name.endswith(_SUFFIXES[kind]) and not _IS_KIND[kind](path):
        raise CheckpointingException(
            f"{path} is no file of {kind}, and it would be replaced: nothing was written; give another path, or "
            "remove it first"
        )


@contextmanager
def replace_file(path: Path, journal: Journal | None = None) -> Iterator[Path]:
    """Yield a staging path for a file; at the end, the written and durable file replaces the one at ``path``."""
    check_names(path)
    if path.is_dir():
        raise StorageError(f"{path} is a directory: give the name of a file")
    staging, _ = open_staging(path, lambda *_: False, restore=False, journal=journal)
    try:
        staged = staging / _STAGED
        yield staged
        with wrap_os_errors(f"rename {staged} to", path):
            staged.replace(path)
    finally:
        if journal is not None:
            journal.close()
        discard_staging(staging)
    # the rename is durable only when the directory is
    sync_directory(path.parent)


def write_pickled(path: Path, state_dict: Mapping[Any, Any]) -> None:
    """Write a state dict to a new file by ``torch.save``."""
    with wrap_os_errors("write", path):
        with open(open_new(path), "wb") as file:  # noqa: PTH123 - a descriptor: the file must be new
            try:
                torch.save(dict(state_dict), file)
            except RuntimeError as exc:
                # where the disk is full, torch hides the file's error behind one of positions in its archive
                if isinstance(exc.__context__, OSError):
                    raise exc.__context__ from exc
                raise
        sync_file(path)


def copy_new(source: Path, path: Path) -> None:
    """Copy a file, or an object of a store, to a new file; links are followed."""
    with wrap_os_errors(f"copy {source} to", path):
        if has_local_files(source):
            shutil.copyfile(source, path)
        else:
            path.write_bytes(read_asset(source))
    sync_file(path)
