"""shardckpt, with its defaults: validation on, digests written and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import shardckpt
from benchmarks.adapters.base import Adapter
from benchmarks.workloads import SLICES
from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue, release_memory
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import State


class Shardckpt(Adapter):
    """(torch_dist, 1); background saves by a process of its own.

    Attributes:
        strategy: Backend and version that it saves.
    """

    strategy: ClassVar[tuple[str, int]] = ("torch_dist", 1)

    syncs: ClassVar[str] = "every file, the manifest, the directories; then one rename"
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice", "reshard", "async"})

    def __init__(self) -> None:
        self._queue: AsyncCallsQueue | None = None

    def version(self) -> str:
        """Of shardckpt."""
        return shardckpt.__version__

    def describe(self, state: State) -> dict[str, ShardedTensor]:
        """Cells of regular grids."""
        return {
            piece.key: ShardedTensor.from_rank_offsets(
                piece.key, piece.tensor, (piece.part.axis, piece.part.cell, piece.part.cells)
            )
            for piece in state.pieces
        }

    def save(self, described: dict[str, ShardedTensor], path: Path) -> None:
        """Save in the foreground."""
        dist_checkpointing.save(described, path, self.strategy)

    def load(self, described: dict[str, ShardedTensor], path: Path) -> None:
        """Load in place; the shards of all ranks are validated as always, which slices cannot be."""
        whole = all(max(shard.axis_fragmentations or ()) < SLICES for shard in described.values())
        dist_checkpointing.load(described, path, validate_access_integrity=whole)

    def start(self, described: dict[str, ShardedTensor], path: Path) -> None:
        """Plan, copy, hand over."""
        self._queue = self._queue or AsyncCallsQueue(persistent=True)
        request = dist_checkpointing.save(described, path, self.strategy, async_sharded_save=True)
        if request is not None:
            self._queue.schedule_async_request(request)

    def finish(self) -> None:
        """Wait and commit."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def release(self) -> None:
        """End the process, and free the copies."""
        if self._queue is not None:
            self._queue.close()
        self._queue = None
        release_memory()


class ShardckptSafetensors(Shardckpt):
    """(safetensors, 1); all else as for torch_dist, so that the two columns differ by the format alone."""

    strategy: ClassVar[tuple[str, int]] = ("safetensors", 1)


__all__ = ["Shardckpt", "ShardckptSafetensors"]
