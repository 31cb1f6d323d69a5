"""torch.distributed.checkpoint: plain tensors in one process, DTensors in several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.adapters.base import Adapter
from benchmarks.workloads import SLICES

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem

    from benchmarks.state import Piece, State


class _SlicePlanner(DefaultLoadPlanner):
    """Plans one chunk of every tensor, by DCP's own arithmetic: for one process DCP has no words for a slice."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(allow_partial_load=True)
        self._pieces = {piece.key: piece for piece in pieces}

    def create_local_plan(self) -> LoadPlan:
        """Read items for the chunks."""
        items: list[ReadItem] = []
        for key, piece in self._pieces.items():
            chunk = ChunkStorageMetadata(torch.Size(piece.part.start), torch.Size(piece.part.shape))
            items += create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        """The tensor that a chunk is loaded into."""
        return self._pieces[index.fqn].tensor


class _Dcp(Adapter):
    threads: ClassVar[int]
    syncs: ClassVar[str] = "every file (sync_files=True); not the directory"
    operations: ClassVar[frozenset[str]] = frozenset({"save", "load", "slice", "reshard", "async"})

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None
        self._future: Future[Any] | None = None

    def version(self) -> str:
        """Of torch."""
        return str(torch.__version__)

    def describe(self, state: State) -> Any:
        """A flat state dict; for slices the pieces themselves."""
        if state.pieces[0].part.cells == SLICES:
            return list(state.pieces)
        if dist.get_world_size() == 1:
            return {piece.key: piece.tensor for piece in state.pieces}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {
            piece.key: DTensor.from_local(piece.tensor, mesh, [Shard(piece.part.axis)], run_check=False)
            for piece in state.pieces
        }

    def save(self, described: Any, path: Path) -> None:
        """Save in the foreground."""
        dcp.save(described, storage_writer=self._writer(path))

    def load(self, described: Any, path: Path) -> None:
        """Load in place."""
        if isinstance(described, list):
            state = {piece.key: piece.tensor for piece in described}
            dcp.load(state, checkpoint_id=path, planner=_SlicePlanner(described))
        else:
            dcp.load(described, checkpoint_id=path)

    def start(self, described: Any, path: Path) -> None:
        """Copy into the memory of the last copy, and save in a thread."""
        if self._stager is None:
            pinned = torch.accelerator.is_available()
            self._stager = DefaultStager(StagingOptions(pinned, False, False, False))  # keeps its memory
        self._future = dcp.async_save(described, storage_writer=self._writer(path), async_stager=self._stager)

    def finish(self) -> None:
        """Wait for the thread."""
        if self._future is not None:
            self._future.result()
        self._future = None

    def release(self) -> None:
        """Free the copies."""
        if self._stager is not None:
            self._stager.close()
        self._stager = None

    def _writer(self, path: Path) -> Any:
        return dcp.FileSystemWriter(path, thread_count=self.threads, sync_files=True)


class OneThread(_Dcp):
    """DCP's default."""

    threads = 1


class TwoThreads(_Dcp):
    """Two writers a rank."""

    threads = 2


__all__ = ["OneThread", "TwoThreads"]
