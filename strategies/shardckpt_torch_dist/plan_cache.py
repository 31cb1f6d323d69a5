"""The global plan of a save, and when the last one may be used again: only if no rank's shards have changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from shardckpt.comm import Comm
    from shardckpt_torch_dist.save_planner import ShardedSavePlanner


@dataclass(frozen=True)
class GlobalPlan:
    """What all ranks write; empty but on the main rank.

    Attributes:
        metadata: DCP's, without the places of items.
        items: Every rank's items, in the order in which it numbers them.
    """

    metadata: Metadata
    items: list[list[MetadataIndex]]


class PlanCache:
    """Makes global plans; every rank keeps its own plan and tells the main rank of it.

    Args:
        reuse: Whether a plan is used again while no rank's items change. Items are compared by a digest of key,
            dtype, global shape, offset and extents; replicas that become main ones change them too, and so do other
            ranks. All ranks use the last plan, or all make a new one.
    """

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._fingerprint = ""
        self._plan: GlobalPlan | None = None
        #: How many plans were gathered, and how many used again.
        self.gathered = 0
        self.reused = 0

    def global_plan(self, planner: ShardedSavePlanner, local: SavePlan, comm: Comm) -> GlobalPlan:
        """The global plan that belongs to this rank's local one."""
        fingerprint = _fingerprint(local, comm) if self._reuse else ""
        changed, *_ = comm.largest(self._plan is None or not fingerprint or fingerprint != self._fingerprint)
        if self._plan is not None and not changed:
            self.reused += 1
            return self._plan
        self._plan = None
        plan = _gathered(planner, local, comm)
        self.gathered += 1
        if self._reuse:
            self._fingerprint, self._plan = fingerprint, plan
        return plan


def _gathered(planner: ShardedSavePlanner, local: SavePlan, comm: Comm) -> GlobalPlan:
    plans = comm.gather(local)
    plan = GlobalPlan(Metadata({}), [])
    with comm.phase("planning for all ranks"):
        if comm.is_main:
            _, metadata = planner.create_global_plan(plans)
            plan = GlobalPlan(metadata, [[item.index for item in part.items] for part in plans])
    return plan


def _fingerprint(plan: SavePlan, comm: Comm) -> str:
    digest = hashlib.sha256(repr((comm.rank, comm.members)).encode())
    for item in plan.items:
        data = item.tensor_data
        shape = None if data is None else (data.chunk.offsets, data.chunk.sizes, data.size, data.properties.dtype)
        digest.update(repr((item.type.name, item.index.fqn, item.index.offset, item.index.index, shape)).encode())
    return digest.hexdigest()


__all__ = ["GlobalPlan", "PlanCache"]
