"""A DCP save planner that understands expert parallelism; usable with ``dcp.save`` as it is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import is_main_replica
from shardckpt.planning import Box
from shardckpt_ep.coverage import Claim, refuse_faults
from shardckpt_ep.experts import Experts, expert_shards
from shardckpt_ep.names import SECTIONS

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    from shardckpt.mapping import ShardedTensor
    from shardckpt_ep.layout import ExpertLayout


@dataclass(frozen=True)
class ExpertSavePlan(SavePlan):
    """A rank's plan, and what all that have experts of a tensor must agree on.

    Attributes:
        claims: One a tensor or box of this rank's experts.
    """

    claims: tuple[Claim, ...] = field(default=())


class EPSavePlanner(DefaultSavePlanner):
    """Plans expert tensors as this rank's boxes of the tensor of all experts; all else as DCP does.

    What is written is what DCP writes for a DTensor of all experts; of copies it chooses one, by bytes a rank. It does
    not compare them: only :func:`shardckpt_ep.expert_sharded_state_dict` finds plain tensors on the wrong mesh.

    Args:
        layouts: The layout of every expert parameter that this rank has; its optimizer state is found by its name.
        sections: What may stand before a parameter's name in a key.
        is_expert: As for :func:`shardckpt_ep.expert_sharded_state_dict`.
        **kwargs: Of DCP's DefaultSavePlanner; without its plan cache, which takes one job's plan for another's.

    Raises:
        CheckpointingException: the plan cache is asked for.
    """

    def __init__(
        self,
        layouts: Mapping[str, ExpertLayout],
        *,
        sections: Iterable[str] = SECTIONS,
        is_expert: Callable[[str], bool] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("enable_plan_caching"):
            raise CheckpointingException(
                "EPSavePlanner does not take enable_plan_caching: DCP's cache is one for all planners of a name, and "
                "compares neither dtypes nor layouts"
            )
        super().__init__(**kwargs)
        self._experts = Experts(layouts, sections, is_expert)
        self._claims: list[Claim] = []
        self._shards: dict[MetadataIndex, ShardedTensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Describe the experts; see :class:`torch.distributed.checkpoint.SavePlanner`."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._claims.clear()
        self._shards.clear()
        rest = {}
        for key, value in self.state_dict.items():
            layout = self._experts.layout_of(key, value)
            if layout is None:
                rest[key] = value
            else:
                self._describe(key, value, layout)
        self.state_dict = rest

    def create_local_plan(self) -> SavePlan:
        """One item a box of this rank's experts, then DCP's own."""
        plan = super().create_local_plan()
        items = [_item(index, shard) for index, shard in self._shards.items()]
        kept = {part.name: getattr(plan, part.name) for part in fields(plan)}
        kept["items"] = [*items, *plan.items]
        self.plan = ExpertSavePlan(**kept, claims=tuple(self._claims))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's global plan, once every expert is known to be there exactly once.

        Raises:
            ShardingError: names the experts that no rank has, or several.
        """
        refuse_faults([plan.claims if isinstance(plan, ExpertSavePlan) else () for plan in all_plans])
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The part of a tensor that is written for an item."""
        shard = self._shards.get(write_item.index)
        if shard is None or shard.data is None:
            return super().resolve_data(write_item)
        return shard.data

    def _describe(self, key: str, value: torch.Tensor, layout: ExpertLayout) -> None:
        for shard in expert_shards(key, value, layout):
            box = Box(shard.global_offset, shard.local_shape)
            main = is_main_replica(shard.replica_id)
            self._claims.append(Claim(key, shard.global_shape, str(shard.dtype), layout.expert_dim, main, box))
            if box.volume:
                self._shards[MetadataIndex(key, torch.Size(box.offset))] = shard


def _item(index: MetadataIndex, shard: ShardedTensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.global_offset), torch.Size(shard.local_shape))
    properties = TensorProperties(dtype=shard.dtype)
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shard.global_shape)),
    )


__all__ = ["EPSavePlanner", "ExpertSavePlan"]
