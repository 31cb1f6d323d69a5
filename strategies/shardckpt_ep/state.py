"""Describe state dicts with experts for ``dist_checkpointing.save`` and ``load``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shardckpt.adapters import InPlaceFactory, to_sharded_state_dict
from shardckpt.distributed import Comm
from shardckpt.errors import ShardingError
from shardckpt.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor
from shardckpt_ep.coverage import check_experts
from shardckpt_ep.experts import Experts, expert_shards
from shardckpt_ep.names import SECTIONS
from shardckpt_ep.objects import ExpertObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict
    from shardckpt_ep.layout import ExpertLayout


def expert_sharded_state_dict(
    state_dict: Mapping[Any, Any],
    layouts: Mapping[str, ExpertLayout],
    *,
    prefix: str = "",
    sections: Iterable[str] = SECTIONS,
    is_expert: Callable[[str], bool] | None = None,
    validate: bool = True,
    check_replicas: bool = True,
    process_group: ProcessGroup | None = None,
) -> ShardedStateDict:
    """Collective: describe a state dict whose expert tensors hold this rank's experts alone.

    A tensor with a layout becomes its boxes of the tensor of all experts: parameters by their names, and optimizer
    state (``state.<name>.<slot>``, in nested dicts or with dotted keys) with the layout of its parameter. Everything
    else is described as :func:`shardckpt.adapters.to_sharded_state_dict` does. A load fills the caller's tensors and
    returns them.

    Args:
        state_dict: Nested dicts and lists, which are not changed. Shards in it are kept as they are.
        layouts: The layout of every expert parameter that this rank has; see :func:`shardckpt_ep.expert_layouts`.
        prefix: Put before every key, without a dot.
        sections: Keys that a name may stand under: ``{"model": {...}, "optimizer": {...}}``.
        is_expert: Takes a key and returns whether it is an expert's, so that one without a layout is an error. By
            default a key is that differs only in numbers from a parameter with a layout.
        validate: Whether the ranks check together that they have every expert once.
        check_replicas: Whether a save compares the copies of experts in plain tensors, whose position nothing confirms
            but the caller's mesh. It reads the memory of tensors with copies once.
        process_group: The ranks that save or load together; by default all.

    Returns:
        The state dict with shards in place of tensors.

    Raises:
        ShardingError: experts that no rank has, or that several ranks have without being copies, by their numbers; an
            expert tensor without a layout; a layout without a tensor, or with one of another shape.

    Example::

        layouts = expert_layouts(model, mesh, "layers.*.experts")
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dist_checkpointing.save(expert_sharded_state_dict(state, layouts), "step-1", ("ep", 1))
    """
    comm = Comm(process_group)
    with comm.collective_phase("describing experts"):
        describer = _Describer(Experts(layouts, sections, is_expert), prefix, check_replicas=check_replicas)
        state = describer.describe(state_dict, ())
        describer.check_complete()
        state = to_sharded_state_dict(state, prefix=prefix)
    if validate:
        check_experts(describer.shards, describer.expert_dims, comm)
    return state


class _Describer:
    """Replaces the expert tensors of a state dict by shards, and collects these."""

    def __init__(self, experts: Experts, prefix: str, *, check_replicas: bool) -> None:
        self._experts = experts
        self._prefix = prefix
        self._check_replicas = check_replicas
        self._keys: list[str] = []
        self.shards: list[ShardedTensor | ShardedObject] = []
        #: The axis that counts experts, by tensor key.
        self.expert_dims: dict[str, int] = {}

    def describe(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return a copy of nested dicts and lists with the expert tensors replaced; ``path`` leads to them."""
        if isinstance(value, dict):
            return {name: self.describe(inner, (*path, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.describe(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, ExpertObject):
            self.shards.append(value)
        return value if isinstance(value, ShardedBase) else self._leaf(value, ".".join(map(str, path)))

    def check_complete(self) -> None:
        """Raise :class:`ShardingError` if a layout belongs to nothing in the state dict."""
        missing = self._experts.find_missing(self._keys)
        if missing:
            raise ShardingError(
                f"{len(missing)} layouts are of parameters that the state dict does not have: "
                f"{', '.join(missing[:4])}. Name layouts as get_model_state_dict and get_optimizer_state_dict name "
                f"parameters, after one of {', '.join(sorted(self._experts.names.sections))} (sections=) or nothing"
            )

    def _leaf(self, value: Any, key: str) -> Any:
        self._keys.append(key)
        layout = self._experts.layout_of(key, value)
        if layout is None:
            return value
        if not layout.inside:
            return LocalNonpersistentObject(value)  # other ranks save it; a load returns this rank's value
        # A DTensor's own mesh says where it lies; for a plain tensor only its copies can show a wrong mesh.
        build = partial(_build, layout, self._check_replicas and not isinstance(value, DTensor))
        factory = InPlaceFactory(f"{self._prefix}{key}", value, build)
        self.shards.extend(factory.build())
        self.expert_dims[factory.key] = layout.expert_dim
        return factory


def _build(layout: ExpertLayout, check_replicas: bool, key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
    return expert_shards(key, data, layout, check_replicas=check_replicas)
