"""State dicts with experts, described for ``dist_checkpointing.save`` and ``load``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shardckpt.adapters import InPlaceFactory, to_sharded_state_dict
from shardckpt.distributed import Comm
from shardckpt.errors import ShardingError
from shardckpt.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensor
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
    """Describe a state dict whose expert tensors hold this rank's experts alone; all ranks call it together.

    What has a layout becomes its boxes of the tensor of all experts: parameters by their names, and optimizer state
    (``state.<name>.<slot>``, in nests or with dotted keys) that lies as its parameter does. All else is described as
    :func:`shardckpt.adapters.to_sharded_state_dict` does. A load fills the caller's tensors and returns them.

    Args:
        state_dict: A nest of dicts and lists; it stays as it is. Shards that it has already stay, too.
        layouts: The layout of every expert parameter that this rank has; see :func:`shardckpt_ep.expert_layouts`.
        prefix: Put before every key as it is.
        sections: Keys that a name may stand under: ``{"model": {...}, "optimizer": {...}}``.
        is_expert: Says of a key whether it is an expert's, so that one without a layout is refused; by default those
            are that differ from a parameter with a layout in numbers alone.
        validate: Whether the ranks check together that they have every expert once.
        check_replicas: Whether a save compares what ranks have of the same experts in plain tensors, of which nothing
            but the caller says where they lie: one pass over the memory of those that several ranks have.
        process_group: The ranks that save or load together; by default all.

    Raises:
        ShardingError: names experts that no rank has, or several have that are no copies; an expert tensor without a
            layout; a layout without a tensor, or with one of another shape.
    """
    comm = Comm(process_group)
    with comm.collective_phase("describing experts"):
        describer = _Describer(Experts(layouts, sections, is_expert), prefix, compared=check_replicas)
        state = describer.described(state_dict, "")
        describer.check_complete()
        state = to_sharded_state_dict(state, prefix=prefix)
    if validate:
        check_experts(describer.shards, describer.expert_dims, comm)
    return state


class _Describer:
    """Goes through a state dict, and notes what it describes."""

    def __init__(self, experts: Experts, prefix: str, *, compared: bool) -> None:
        self._experts = experts
        self._prefix = prefix
        self._compared = compared
        self._keys: list[str] = []
        #: Shards of experts, and objects of single ones.
        self.shards: list[ShardedBase] = []
        #: The axis that counts experts, by tensor key.
        self.expert_dims: dict[str, int] = {}

    def described(self, value: Any, path: str) -> Any:
        """The nest with its expert tensors replaced."""
        if isinstance(value, dict):
            return {name: self.described(inner, _joined(path, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.described(inner, _joined(path, index)) for index, inner in enumerate(value)]
        if isinstance(value, ExpertObject):
            self.shards.append(value)
        return value if isinstance(value, ShardedBase) else self._leaf(value, path)

    def check_complete(self) -> None:
        """Raise :class:`ShardingError` if a layout is for nothing in the state dict."""
        absent = self._experts.absent(self._keys)
        if absent:
            raise ShardingError(
                f"{len(absent)} layouts are of parameters that the state dict does not have: {', '.join(absent[:4])}; "
                "layouts go by the parameters' names in it (get_model_state_dict, get_optimizer_state_dict), before "
                f"which nothing stands but one of {', '.join(sorted(self._experts.names.sections))} (sections=)"
            )

    def _leaf(self, value: Any, path: str) -> Any:
        self._keys.append(path)
        layout = self._experts.layout_of(path, value)
        if layout is None:
            return value
        if not layout.inside:
            return LocalNonpersistentObject(value)
        build = partial(_build, layout, self._compared and not isinstance(value, DTensor))
        factory = InPlaceFactory(f"{self._prefix}{path}", value, build)
        self.shards.extend(factory.build())
        self.expert_dims[factory.key] = layout.expert_dim
        return factory


def _build(layout: ExpertLayout, compared: bool, key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
    return expert_shards(key, data, layout, compared=compared)


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


__all__ = ["expert_sharded_state_dict"]
