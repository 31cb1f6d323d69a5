"""Which tensors of a state dict are experts', and where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors import is_quantized
from shardckpt_ep.meshes import EP_NAMES, has_dim, local_of
from shardckpt_ep.names import SECTIONS, ExpertNames, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardckpt.planning import Ints
    from shardckpt_ep.layout import ExpertLayout


class Experts:
    """Layouts by parameter, and what in a state dict they are for.

    Args:
        layouts: The layout of every expert parameter that this rank has.
        sections: What may stand before a parameter's name in a key; see :class:`shardckpt_ep.names.ExpertNames`.
        is_expert: Says of a key whether it is an expert's, so that one without a layout is refused; by default those
            are that differ from a parameter with a layout in numbers alone (another layer's, another expert's).
    """

    def __init__(
        self,
        layouts: Mapping[str, ExpertLayout],
        sections: Iterable[str] = SECTIONS,
        is_expert: Callable[[str], bool] | None = None,
    ) -> None:
        self._layouts = {clean(fqn): layout for fqn, layout in layouts.items()}
        self.names = ExpertNames(self._layouts, sections)
        self._is_expert = self.names.resembles if is_expert is None else is_expert

    def layout_of(self, key: str, value: Any) -> ExpertLayout | None:
        """The layout of a value of the state dict; None if it is no expert's, or state without one (a step count).

        Raises:
            ShardingError: it is an expert's and no layout is given for it, or its shape is not the layout's.
        """
        if not isinstance(value, torch.Tensor):
            return None
        name = self.names.find(key)
        if name is None:
            self._refuse_unknown(key, value)
            return None
        layout = self._layouts[name.fqn]
        shape = tuple(local_of(value).shape)
        if not layout.inside:
            return layout if not name.slot or shape else None
        if name.slot:
            return layout.of_state(shape)
        if shape != layout.local_shape:
            raise ShardingError(
                f"expert tensor {key!r}: this rank's has shape {shape}, its layout says {layout.local_shape} of "
                f"{layout.global_shape}: the layout is another tensor's"
            )
        return layout

    def absent(self, keys: Iterable[str]) -> list[str]:
        """The parameters that have a layout and no key, neither their own nor their state's."""
        found = {name.fqn for key in keys if (name := self.names.find(key))}
        return sorted(self._layouts.keys() - found)

    def check_described(self, shard: ShardedTensor) -> None:
        """Raise :class:`ShardingError` if a shard is an expert's and not described as its layout says."""
        name = self.names.find(shard.key)
        if name is None:
            return
        layout = self._layouts[name.fqn]
        same = tuple(shard.global_shape) == layout.global_shape
        if name.slot and not same:
            return
        box = (tuple(shard.global_offset), tuple(shard.local_shape))
        if not same or all(box != piece.box for piece in layout.pieces() or [layout.empty()]):
            raise ShardingError(
                f"{shard.key!r} is described as {box[1]} at {box[0]} of {tuple(shard.global_shape)}; its layout has "
                f"{[piece.box for piece in layout.pieces()]} of {layout.global_shape} on this rank: describe the state "
                "dict by expert_sharded_state_dict with the same layouts"
            )

    def _refuse_unknown(self, key: str, value: torch.Tensor) -> None:
        if not value.dim() or not self._is_expert(key):
            return
        if isinstance(value, DTensor) and has_dim(value.device_mesh, EP_NAMES):
            return
        kind = "DTensor without an expert-parallel mesh dimension" if isinstance(value, DTensor) else "plain tensor"
        raise ShardingError(
            f"{key!r} is an expert's and has no layout: a {kind} of shape {tuple(value.shape)} does not say which "
            "experts it holds, and all but one rank's would be lost; give its layout, or is_expert= that leaves it out"
        )


def expert_shards(
    key: str, value: torch.Tensor, layout: ExpertLayout, *, compared: bool = False
) -> list[ShardedTensor]:
    """The boxes of a value as ShardedTensors of one key, over the value's own memory.

    An empty value is one empty shard; outside the mesh there is none.

    Args:
        key: The key.
        value: The whole DTensor or this rank's tensor.
        layout: Where it lies.
        compared: Whether a save is to compare the copies of a box.

    Raises:
        ShardingError: it is quantized and would be cut into several: its scales belong to all of it.
    """
    local = local_of(value)
    pieces = layout.pieces() or [layout.empty()] * layout.inside
    if len(pieces) == 1 and pieces[0].box.shape == tuple(local.shape):
        return [_shard(key, local, pieces[0].box.offset, layout, compared)]
    if pieces and is_quantized(local):
        raise ShardingError(
            f"{key!r} is quantized and lies in {len(pieces)} pieces of the tensor of all experts: dequantize it first"
        )
    found = []
    for box, place in pieces:
        data = local
        for axis, (start, size) in enumerate(zip(place, box.shape, strict=True)):
            data = data.narrow(axis, start, size)
        found.append(_shard(key, data, box.offset, layout, compared))
    return found


def _shard(key: str, data: torch.Tensor, offset: Ints, layout: ExpertLayout, compared: bool) -> ShardedTensor:
    shape, replica = tuple(data.shape), layout.replica or 0
    whole = layout.global_shape
    return ShardedTensor(key, data, data.dtype, shape, whole, offset, None, replica, replicated=compared)


__all__ = ["Experts", "expert_shards"]
