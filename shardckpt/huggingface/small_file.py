"""Write small files in one go; each is durable when the call returns."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.engine import check_names, clear_leftovers
from shardckpt.storage import (
    STAGING,
    NewFile,
    claim,
    naming,
    new_save_id,
    open_new,
    release,
    sync_directory,
    sync_file,
    temporary_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a staging path for a file; at the end, the written and durable file replaces the one at ``path``."""
    check_names(path)
    staged = path.with_name(temporary_name(path.name, STAGING, new_save_id()))
    clear_leftovers(path, lambda *_: False, restore=False)
    # no other save of this process clears away a claimed file as a leftover
    claim(staged.name)
    try:
        yield staged
        with naming(f"rename {staged} to", path):
            staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    finally:
        release(staged.name)
    # the rename is durable only when the directory is
    sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Write bytes to a new file."""
    file = NewFile(path)
    try:
        file.write(memoryview(data), 0)
        file.finish(len(data))
    finally:
        file.close()


def write_pickled(path: Path, state_dict: Mapping[Any, Any]) -> None:
    """Write a state dict to a new file by ``torch.save``."""
    with naming("write", path):
        with open(open_new(path), "wb") as file:  # noqa: PTH123 - a descriptor: the file must be new
            torch.save(dict(state_dict), file)
        sync_file(path)


def copy_new(source: Path, path: Path) -> None:
    """Copy a file to a new one; links are followed."""
    with naming(f"copy {source} to", path):
        shutil.copyfile(source, path)
    sync_file(path)


__all__ = ["copy_new", "replace_file", "write_new", "write_pickled"]
