"""safetensors: a file a rank, an fsync added; tensors by ``safe_open`` and a copy into place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import safetensors
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.adapters.base import Adapter

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import State


class Safetensors(Adapter):
    """One file a rank, which only a rank with the same shards can load."""

    syncs: ClassVar[str] = "the file (fsync added)"
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice"})
    maps_files: ClassVar[bool] = True

    def can(self, operation: str, world: int) -> bool:
        """Slices where one file has all."""
        return super().can(operation, world) and (operation != "slice" or world == 1)

    def version(self) -> str:
        """Of safetensors."""
        return str(safetensors.__version__)

    def save(self, described: State, path: Path) -> None:
        """Save, and sync."""
        path.mkdir(exist_ok=True)
        save_file({piece.key: piece.tensor for piece in described.pieces}, _file(path))
        with _file(path).open("rb") as file:
            os.fsync(file.fileno())

    def load(self, described: State, path: Path) -> None:
        """Load every tensor, or its rows."""
        with safetensors.safe_open(_file(path), "pt") as file:
            for piece in described.pieces:
                rows = slice(piece.part.start[0], piece.part.start[0] + piece.part.shape[0])
                if dist.get_world_size() == 1 and piece.part.cells > 1:
                    piece.tensor.copy_(file.get_slice(piece.key)[rows])
                else:
                    piece.tensor.copy_(file.get_tensor(piece.key))


def _file(path: Path) -> Path:
    return path / f"{dist.get_rank()}.safetensors"


__all__ = ["Safetensors"]
