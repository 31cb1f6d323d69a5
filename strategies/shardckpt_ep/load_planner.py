"""DCP load planners for expert parallelism, to pass to ``dcp.load``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan

from shardckpt.adapters import get_local_tensor
from shardckpt.archive import decode_object
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError, listed
from shardckpt.planning import refuse_cast
from shardckpt.tensors import is_quantized
from shardckpt_ep.experts import Experts
from shardckpt_ep.names import SECTIONS
from shardckpt_ep.read_items import expert_read_items, get_stored_tensor
from shardckpt_torch_dist import RestValues

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable

    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

    from shardckpt_ep.layout import ExpertLayout


#: The arguments of MindSpeed's planner of the same name, by which its callers are told where it is.
_OF_ANOTHER = frozenset({"check_moe_fn", "ep_rank", "ep_size"})


class LocalExpertsLoadPlanner(DefaultLoadPlanner):
    """Reads this rank's experts from stored tensors of all experts; reads everything else as DCP does.

    Subclasses override :meth:`layout_of`. Objects are unpickled by an allow-list, never by plain pickle. Checkpoints
    must be of torch 2.4 or newer: keys in the naming of older ones are not tried.

    Args:
        allow_globals: Classes and functions that stored objects may name in addition to the plain ones.
    """

    def __init__(self, *, allow_globals: Iterable[Any] = (), allow_dtype_cast: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.allow_dtype_cast = allow_dtype_cast
        self._allow_globals = tuple(allow_globals)
        self._locals: dict[str, torch.Tensor] = {}
        self._rest = RestValues({})

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note the state dict that objects are loaded into; see :class:`torch.distributed.checkpoint.LoadPlanner`."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._rest = RestValues(state_dict)

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:  # noqa: ARG002 - for subclasses
        """Return the layout of a value of any type under a key of the state dict, or None if it is not an expert's."""
        return None

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan: read items for its experts, then DCP's own.

        An expert tensor that is not stored is an error unless partial loads are allowed. So is one that is stored in
        another shape with all experts, or in a dtype that the wanted one cannot hold.
        """
        if self.metadata is None:
            raise CheckpointingException("the planner was given no metadata: the storage reader has none")
        plan, experts = local_plan(self.state_dict, self.metadata, self.layout_of, strict=not self.allow_partial_load)
        self._locals = {key: get_local_tensor(self.state_dict[key]) for key in experts}
        for key, local in self._locals.items() if not self.allow_dtype_cast else ():
            refuse_cast(key, get_stored_tensor(key, self.metadata).properties.dtype, local.dtype)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return this rank's local tensor for an expert tensor; for others, DCP's result."""
        found = self._locals.get(index.fqn)
        return super().lookup_tensor(index) if found is None else found

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an object that was read in the caller's state dict."""
        key = read_item.dest_index.fqn
        # instead of DCP's torch.load(weights_only=False), which runs whatever code a checkpoint names
        loaded = decode_object(value.getvalue(), f"object {key!r}", self._allow_globals)
        self._rest.set(self.mappings.get(key, (key,)), loaded)


class EPLoadPlanner(LocalExpertsLoadPlanner):
    """Fills this rank's experts from a checkpoint with all experts, saved in any layout and any number of chunks.

    The planner of this name that takes ``ep_rank``, ``ep_size`` and ``check_moe_fn`` is
    :class:`shardckpt.compat.mindspeed.EPLoadPlanner`.

    Args:
        layouts: The layout of every expert parameter that this rank has; its optimizer state is found by its name.
        sections: Keys that may precede a parameter's name, such as ``model``.
        is_expert: As for :func:`shardckpt_ep.expert_sharded_state_dict`.
        **kwargs: Arguments of DCP's DefaultLoadPlanner; ``allow_globals``, the classes and functions that stored
            objects may name; and ``allow_dtype_cast``, as for :func:`shardckpt.dist_checkpointing.load`.

    Raises:
        ShardingError: it is given no layouts, or the arguments of that other planner.

    Example::

        dcp.load(state, checkpoint_id="step-1", planner=EPLoadPlanner(expert_layouts(model, mesh, "layers.*.experts")))
    """

    def __init__(
        self,
        layouts: Mapping[str, ExpertLayout] | None = None,
        *args: Any,
        sections: Iterable[str] = SECTIONS,
        is_expert: Callable[[str], bool] | None = None,
        **kwargs: Any,
    ) -> None:
        if args or not isinstance(layouts, Mapping) or _OF_ANOTHER & kwargs.keys():
            raise ShardingError(
                "shardckpt_ep.EPLoadPlanner takes layouts: EPLoadPlanner(expert_layouts(model, mesh, modules)). For "
                "EPLoadPlanner(ep_rank=0, ep_size=1, check_moe_fn=None) import it from shardckpt.compat.mindspeed"
            )
        super().__init__(**kwargs)
        self._experts = Experts(layouts, sections, is_expert)

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:  # noqa: ARG002 - layouts need no metadata
        """Return the layout that the caller passed for a value, or None if it is not an expert's."""
        return self._experts.layout_of(key, value)


def local_plan(
    state_dict: Mapping[str, Any],
    metadata: Metadata,
    layout_of: Callable[[str, Any, Metadata], ExpertLayout | None],
    *,
    strict: bool,
) -> tuple[LoadPlan, list[str]]:
    """Plan this rank's reads into a flat state dict; return the plan, and the keys of the expert tensors in it.

    ``layout_of`` is as :meth:`LocalExpertsLoadPlanner.layout_of`. With ``strict`` a key that is not stored is a
    KeyMismatchError. A tensor of all experts that is stored in another shape is a ShapeMismatchError.
    """
    layouts = {key: layout for key, value in state_dict.items() if (layout := layout_of(key, value, metadata))}
    absent = [key for key in layouts if key not in metadata.state_dict_metadata]
    if absent and strict:
        raise KeyMismatchError(f"expert tensors that are not in the checkpoint: {listed(sorted(absent))}")
    rest = {key: value for key, value in state_dict.items() if key not in layouts}
    plan = create_default_local_load_plan(rest, metadata, strict)
    stored = [key for key in layouts if key not in absent]
    items: list[ReadItem] = []
    for key in stored:
        if is_quantized(get_local_tensor(state_dict[key])):
            raise ShardingError(
                f"{key!r} is quantized, and DCP cannot fill a part of a quantized tensor: load it with "
                "dist_checkpointing.load, or into a plain tensor"
            )
        items += expert_read_items(key, layouts[key], get_stored_tensor(key, metadata))
    return dataclasses.replace(plan, items=[*items, *plan.items]), stored
