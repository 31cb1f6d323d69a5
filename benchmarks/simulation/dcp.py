"""torch.distributed.checkpoint: gathered plans, ``create_global_plan``, plans sent back, ``.metadata``."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.simulation.figures import COLUMNS, ROWS, Figures


def simulate(ranks: int, shards: int, full: int, folder: str) -> Figures:  # noqa: ARG001 - it has no validation apart
    """Plan for ``ranks`` ranks with ``shards`` shards each, and read the metadata of as many chunks."""
    figures = Figures()
    torch.set_num_threads(1)
    sent = [pickle.dumps(_plan(rank, ranks, shards)) for rank in range(ranks)]
    figures.sent("planning", len(sent[-1]))
    figures.received("planning", sum(map(len, sent)))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with figures.cpu("planning: CPU of rank 0"):
        plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent])  # noqa: S301 - our own
        for plan in plans:
            pickle.dumps(plan)  # to be sent back
    figures.peak()
    _read(figures, plans, metadata, Path(folder))
    return figures


def _read(figures: Figures, plans: list[SavePlan], metadata: Metadata, folder: Path) -> None:
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", number * 2048, 2048)
        for rank, plan in enumerate(plans)
        for number, item in enumerate(plan.items)
    }
    folder.mkdir()
    try:
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        figures["metadata on disk", "MiB"] = (folder / ".metadata").stat().st_size / (1 << 20)
        FileSystemReader(folder).read_metadata()  # imports what it takes
        with figures.cpu("open metadata: CPU"):
            FileSystemReader(folder).read_metadata()
    finally:
        shutil.rmtree(folder)


def _plan(rank: int, ranks: int, count: int) -> SavePlan:
    return SavePlan([_item(f"layers.{number}.weight", rank, ranks) for number in range(count)])


def _item(key: str, rank: int, ranks: int) -> WriteItem:
    offset = torch.Size((rank * ROWS, 0))
    return WriteItem(
        MetadataIndex(key, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, torch.Size((ROWS, COLUMNS))),
            properties=TensorProperties(dtype=torch.bfloat16),
            size=torch.Size((ranks * ROWS, COLUMNS)),
        ),
    )


__all__ = ["simulate"]
