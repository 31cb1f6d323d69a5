"""A DCP load planner that understands expert parallelism; usable with ``dcp.load`` as it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan

from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.planning import refuse_cast
from shardckpt.tensors import is_quantized
from shardckpt_ep.experts import Experts
from shardckpt_ep.meshes import local_of
from shardckpt_ep.names import SECTIONS
from shardckpt_ep.read_items import expert_read_items, stored_tensor
from shardckpt_torch_dist import load_bytes, put_rest

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

    from shardckpt_ep.layout import ExpertLayout


class LocalExpertsLoadPlanner(DefaultLoadPlanner):
    """Reads into tensors that hold one rank's experts, from tensors that hold all; all else as DCP does.

    Subclasses say by :meth:`layout_of` what is whose. Objects go through an allow-list, never through plain pickle.
    Checkpoints are of torch 2.4 or newer: no names of older ones are tried.

    Args:
        allow_globals: Classes and functions that objects may name besides the plain ones.
        allow_dtype_cast: As for :func:`shardckpt.dist_checkpointing.load`.
        **kwargs: Of DCP's DefaultLoadPlanner.
    """

    def __init__(self, *, allow_globals: Iterable[Any] = (), allow_dtype_cast: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.allow_dtype_cast = allow_dtype_cast
        self._allow_globals = tuple(allow_globals)
        self._locals: dict[str, torch.Tensor] = {}

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:  # noqa: ARG002 - for subclasses
        """Where a value of the state dict lies in the tensor of all experts; None if it is no expert's."""
        return None

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Raises:
            KeyMismatchError: an expert tensor is not stored, unless partial loads are allowed.
            ShapeMismatchError: the tensor of all experts is stored in another shape.
            DtypeMismatchError: it is stored in a dtype that the wanted one cannot hold.
        """
        if self.metadata is None:
            raise CheckpointingException("the planner was given no metadata: the storage reader has none")
        plan, experts = local_plan(self.state_dict, self.metadata, self.layout_of, strict=not self.allow_partial_load)
        self._locals = {key: local_of(self.state_dict[key]) for key in experts}
        for key, local in self._locals.items() if not self.allow_dtype_cast else ():
            refuse_cast(key, stored_tensor(key, self.metadata).properties.dtype, local.dtype)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The whole of what this rank has of an expert tensor; other tensors as DCP finds them."""
        found = self._locals.get(index.fqn)
        return super().lookup_tensor(index) if found is None else found

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a read object into its place in the caller's state dict."""
        key = read_item.dest_index.fqn
        loaded = load_bytes(value.getvalue(), f"object {key!r}", self._allow_globals)
        put_rest(self.original_state_dict, self.mappings.get(key, (key,)), loaded)


class EPLoadPlanner(LocalExpertsLoadPlanner):
    """Fills this rank's experts from a checkpoint of all experts, of any layout and in any number of chunks.

    Args:
        layouts: The layout of every expert parameter that this rank has; its optimizer state is found by its name.
        sections: What may stand before a parameter's name in a key.
        is_expert: As for :func:`shardckpt_ep.expert_sharded_state_dict`.
        **kwargs: Of DCP's DefaultLoadPlanner, and ``allow_globals``: classes and functions that objects may name; and
            ``allow_dtype_cast``, as for :func:`shardckpt.dist_checkpointing.load`.
    """

    def __init__(
        self,
        layouts: Mapping[str, ExpertLayout],
        *,
        sections: Iterable[str] = SECTIONS,
        is_expert: Callable[[str], bool] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._experts = Experts(layouts, sections, is_expert)

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:  # noqa: ARG002 - layouts say all
        """The layout that the caller gave."""
        return self._experts.layout_of(key, value)


def local_plan(
    state_dict: Mapping[str, Any],
    metadata: Metadata,
    layout_of: Callable[[str, Any, Metadata], ExpertLayout | None],
    *,
    strict: bool,
) -> tuple[LoadPlan, list[str]]:
    """This rank's plan, and the keys of the expert tensors in it; see :class:`LocalExpertsLoadPlanner`."""
    layouts = {key: layout for key, value in state_dict.items() if (layout := layout_of(key, value, metadata))}
    absent = [key for key in layouts if key not in metadata.state_dict_metadata]
    if absent and strict:
        raise KeyMismatchError(f"expert tensors that are not in the checkpoint: {', '.join(sorted(absent))}")
    rest = {key: value for key, value in state_dict.items() if key not in layouts}
    plan = create_default_local_load_plan(rest, metadata, strict)
    stored = {key: layout for key, layout in layouts.items() if key not in absent}
    items = list(_items(state_dict, stored, metadata))
    return dataclasses.replace(plan, items=[*items, *plan.items]), list(stored)


def _items(
    state_dict: Mapping[str, Any], layouts: Mapping[str, ExpertLayout], metadata: Metadata
) -> Iterator[ReadItem]:
    for key, layout in layouts.items():
        if is_quantized(local_of(state_dict[key])):
            raise ShardingError(
                f"{key!r} is quantized, which DCP cannot fill by parts: load it by dist_checkpointing.load, or into a "
                "plain tensor"
            )
        yield from expert_read_items(key, layout, stored_tensor(key, metadata))


__all__ = ["EPLoadPlanner", "LocalExpertsLoadPlanner", "local_plan"]
