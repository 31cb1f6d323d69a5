"""A DCP save planner for expert parallelism, to pass to ``dcp.save``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.state_dict import nested_items
from shardckpt_ep.coverage import Claim, check_claims, make_claim
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
    """A rank's plan, with the data that the coordinator needs to check the experts of all ranks."""

    #: One for each box of this rank's expert tensors, also for copies that are not written.
    claims: tuple[Claim, ...] = field(default=())


class EPSavePlanner(DefaultSavePlanner):
    """Plans expert tensors as this rank's boxes of the tensor of all experts; plans everything else as DCP does.

    It writes the same as DCP for a DTensor of all experts. Of several copies DCP writes one, balancing the bytes of
    ranks. Copies are not compared: only :func:`shardckpt_ep.expert_sharded_state_dict` detects plain tensors that were
    described with the wrong mesh.

    Args:
        layouts: The layout of every expert parameter that this rank has; its optimizer state is found by its name.
        sections: Keys that may precede a parameter's name, such as ``model``.
        is_expert: As for :func:`shardckpt_ep.expert_sharded_state_dict`.
        **kwargs: Arguments of DCP's DefaultSavePlanner, except ``enable_plan_caching``.

    Raises:
        CheckpointingException: ``enable_plan_caching`` is passed.

    Example::

        dcp.save(state, checkpoint_id="step-1", planner=EPSavePlanner(expert_layouts(model, mesh, "layers.*.experts")))
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
                "EPSavePlanner does not take enable_plan_caching: DCP shares one cache among all planners of a class "
                "name, and compares neither dtypes nor layouts. Leave it out"
            )
        super().__init__(**kwargs)
        self._experts = Experts(layouts, sections, is_expert)
        self._claims: list[Claim] = []
        self._shards: dict[MetadataIndex, ShardedTensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the experts out of the state dict and describe them; DCP calls it before it plans."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        # a planner may serve several saves
        self._claims.clear()
        self._shards.clear()
        rest = {}
        for key, value in self.state_dict.items():
            layout = self._experts.layout_of(key, value)
            if layout is None:
                self._refuse_nested(key, value)
                rest[key] = value
                continue
            for shard in expert_shards(key, value, layout):
                claim = make_claim(shard, layout.expert_dim)
                self._claims.append(claim)
                if claim.box.volume:  # an empty box is not written, but its claim is checked
                    self._shards[MetadataIndex(key, torch.Size(claim.box.offset))] = shard
        self.state_dict = rest

    def _refuse_nested(self, key: str, value: Any) -> None:
        """Raise ShardingError for experts in a dict or list that DCP pickles whole: of one rank alone."""
        for path, leaf in () if self.flatten_state_dict else nested_items(value, (key,)):
            name = ".".join(map(str, path))
            if name != key and self._experts.layout_of(name, leaf) is not None:
                raise ShardingError(
                    f"{name!r} is an expert's tensor inside {key!r}, which DCP would pickle on one rank, and lose on "
                    "others: leave out flatten_state_dict=False"
                )

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan: an item for each box of its experts, then DCP's own items."""
        items = []
        for index, shard in self._shards.items():
            chunk = ChunkStorageMetadata(torch.Size(shard.global_offset), torch.Size(shard.local_shape))
            size, properties = torch.Size(shard.global_shape), TensorProperties(dtype=shard.dtype)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)))
        plan = super().create_local_plan()
        plan = replace(plan, items=[*items, *plan.items])
        # vars(): the fields of SavePlan differ between releases of torch
        self.plan = ExpertSavePlan(**vars(plan), claims=tuple(self._claims))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that every expert is stored exactly once, and make DCP's global plan; the coordinator calls it.

        ``all_plans`` are in rank order. The ShardingError names the experts that no rank has, or several.
        """
        check_claims([plan.claims if isinstance(plan, ExpertSavePlan) else () for plan in all_plans])
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor or bytes that are written for an item."""
        shard = self._shards.get(write_item.index)
        if shard is None or shard.data is None:
            return super().resolve_data(write_item)
        return shard.data
