"""Megatron-Core's dist_checkpointing, in processes that have it on their path and no accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from benchmarks.adapters.base import Adapter
from benchmarks.workloads import SLICES

if not torch.cuda.is_available():  # it asks for the current device even so
    _cuda: Any = torch.cuda
    _cuda.current_device = lambda: torch.device("cpu")
    _cuda.synchronize = lambda *_, **__: None

from megatron.core import __version__, dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import State


class Megatron(Adapter):
    """Its defaults: two buckets a rank; background saves by a fork."""

    syncs: ClassVar[str] = "data files and .metadata; not common.pt, metadata.json or the directory"
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice", "reshard", "async"})

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue()

    def version(self) -> str:
        """Of megatron-core."""
        return str(__version__)

    def describe(self, state: State) -> dict[str, Any]:
        """Cells of regular grids."""
        return {
            piece.key: ShardedTensor.from_rank_offsets(
                piece.key, piece.tensor, (piece.part.axis, piece.part.cell, piece.part.cells)
            )
            for piece in state.pieces
        }

    def save(self, described: dict[str, Any], path: Path) -> None:
        """Save in the foreground."""
        self._make(path)
        dist_checkpointing.save(described, str(path))

    def load(self, described: dict[str, Any], path: Path) -> None:
        """Load; what it gives back in other memory is copied."""
        wanted = {key: shard.data for key, shard in described.items()}
        whole = all(max(shard.axis_fragmentations or ()) < SLICES for shard in described.values())
        loaded = dist_checkpointing.load(described, str(path), validate_access_integrity=whole)
        for key, tensor in wanted.items():
            if loaded[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[key])

    def start(self, described: dict[str, Any], path: Path) -> None:
        """Plan and fork."""
        self._make(path)
        self._queue.schedule_async_request(dist_checkpointing.save(described, str(path), async_sharded_save=True))

    def finish(self) -> None:
        """Wait for the fork, and write the metadata."""
        self._queue.maybe_finalize_async_calls(blocking=True)

    def release(self) -> None:
        """Another group counts its saves anew."""
        self._queue = AsyncCallsQueue()

    def _make(self, path: Path) -> None:
        """It wants the directory to be there."""
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()


__all__ = ["Megatron"]
