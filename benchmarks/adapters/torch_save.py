"""torch.save of a rank's whole dict, an fsync added; torch.load and a copy into place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from benchmarks.adapters.base import Adapter

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import State


class TorchSave(Adapter):
    """One file a rank, which only a rank with the same shards can load."""

    syncs: ClassVar[str] = "the file (fsync added)"
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice"})

    def can(self, operation: str, world: int) -> bool:
        """Slices where one file has all."""
        return super().can(operation, world) and (operation != "slice" or world == 1)

    def version(self) -> str:
        """Of torch."""
        return str(torch.__version__)

    def save(self, described: State, path: Path) -> None:
        """Save, and sync."""
        path.mkdir(exist_ok=True)
        with _file(path).open("xb") as file:
            torch.save({piece.key: piece.tensor for piece in described.pieces}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, described: State, path: Path) -> None:
        """Load the whole; for a slice the file is mapped."""
        sliced = dist.get_world_size() == 1 and described.pieces[0].part.cells > 1
        loaded = torch.load(_file(path), mmap=sliced, weights_only=True)
        for piece in described.pieces:
            tensor, part = loaded[piece.key], piece.part
            if sliced:
                tensor = tensor.narrow(part.axis, part.start[part.axis], part.shape[part.axis])
            piece.tensor.copy_(tensor)


def _file(path: Path) -> Path:
    return path / f"{dist.get_rank()}.pt"


__all__ = ["TorchSave"]
