"""What tests of storage share: a checkpoint of one file, its manifest, and memory at a given alignment."""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING

from shardckpt.manifest import FileRecord, Manifest, Record
from shardckpt.storage.digest import preferred
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def write(directory: Path, name: str, records: Sequence[Sequence[bytes]]) -> FileRecord:
    """A file of records, each of several parts."""
    with CheckpointWriter(directory, 3) as writer:
        file = writer.create(name)
        for parts in records:
            views = [memoryview(part) for part in parts]
            file.append(sum(view.nbytes for view in views), lambda views=views: views)
        return writer.finish(file)


def manifest(*files: FileRecord, algorithm: str | None = None) -> Manifest:
    """A manifest that names the files."""
    record = Record(
        save_id="ab" * 16,
        backend="b",
        version=1,
        reader="",
        writer={},
        world_size=1,
        digest_algorithm=algorithm or preferred(),
        files=files,
    )
    return Manifest(backend="b", version=1, record=record)


def memory(nbytes: int, remainder: int, seed: int = 0) -> memoryview:
    """Random bytes at an address that leaves this remainder when divided by a page."""
    whole = bytearray(nbytes + 2 * PAGE)
    start = (remainder - ctypes.addressof(ctypes.c_char.from_buffer(whole))) % PAGE
    whole[start : start + nbytes] = random.Random(seed).randbytes(nbytes)
    return memoryview(whole)[start : start + nbytes]
