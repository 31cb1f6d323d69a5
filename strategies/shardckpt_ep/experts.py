"""Find the expert tensors of a state dict, and their layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors import is_quantized
from shardckpt_ep.meshes import EP_NAMES, get_local_tensor, has_mesh_dim
from shardckpt_ep.names import SECTIONS, ExpertNames, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardckpt.planning import Ints
    from shardckpt_ep.layout import ExpertLayout


class Experts:
    """The layouts of a rank's expert parameters, and the keys of a state dict that they apply to.

    Args:
        layouts: The layout of every expert parameter that this rank has.
        sections: What may stand before a parameter's name in a key; see :class:`shardckpt_ep.names.ExpertNames`.
        is_expert: Takes a key and returns whether it is an expert's, so that one without a layout is an error. By
            default a key is that differs only in numbers from a parameter with a layout (of another layer or expert).
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
        """Find the layout of a value of the state dict.

        Args:
            key: Its key, with dots.
            value: The value, of any type.

        Returns:
            Its layout. None if it is not an expert's tensor, or optimizer state without a layout (a step count).

        Raises:
            ShardingError: it is an expert's and has no layout, or its shape is not that of its layout.
        """
        if not isinstance(value, torch.Tensor):
            return None
        name = self.names.find(key)
        if name is None:
            self._check_not_expert(key, value)
            return None
        layout = self._layouts[name.fqn]
        shape = tuple(get_local_tensor(value).shape)
        if not layout.inside:  # this rank holds nothing, so there is no shape to compare
            return layout if not name.slot or shape else None
        if name.slot:
            return layout.get_state_layout(shape)
        if shape != layout.local_shape:
            raise ShardingError(
                f"expert tensor {key!r}: this rank's has shape {shape}, its layout says {layout.local_shape} of "
                f"{layout.global_shape}: pass the layout of this tensor"
            )
        return layout

    def find_missing(self, keys: Iterable[str]) -> list[str]:
        """Return the parameters with a layout of which neither the parameter nor its optimizer state has a key."""
        found = {name.fqn for key in keys if (name := self.names.find(key))}
        return sorted(self._layouts.keys() - found)

    def check_shard(self, shard: ShardedTensor) -> None:
        """Check a shard against its layout, if it is an expert's.

        Raises:
            ShardingError: it is not described as its layout says.
        """
        name = self.names.find(shard.key)
        if name is None:
            return
        layout = self._layouts[name.fqn]
        same = tuple(shard.global_shape) == layout.global_shape
        if name.slot and not same:  # optimizer state of another shape than its parameter's
            return
        box = (tuple(shard.global_offset), tuple(shard.local_shape))
        if not same or all(box != piece.box for piece in layout.pieces() or [layout.empty()]):
            raise ShardingError(
                f"{shard.key!r} is described as {box[1]} at {box[0]} of {tuple(shard.global_shape)}; its layout has "
                f"{[piece.box for piece in layout.pieces()]} of {layout.global_shape} on this rank: describe the state "
                "dict by expert_sharded_state_dict with the same layouts"
            )

    def _check_not_expert(self, key: str, value: torch.Tensor) -> None:
        """Raise if a tensor without a layout is an expert's and does not say itself which experts it holds."""
        if not value.dim() or not self._is_expert(key):
            return
        if isinstance(value, DTensor) and has_mesh_dim(value.device_mesh, EP_NAMES):
            return
        kind = "DTensor without an expert-parallel mesh dimension" if isinstance(value, DTensor) else "plain tensor"
        raise ShardingError(
            f"{key!r} is an expert's and has no layout: a {kind} of shape {tuple(value.shape)} does not say which "
            "experts it holds, so all but one rank's would be lost. Pass its layout, or an is_expert= that excludes it"
        )


def expert_shards(
    key: str, value: torch.Tensor, layout: ExpertLayout, *, check_replicas: bool = False
) -> list[ShardedTensor]:
    """Describe a tensor by the boxes of the tensor of all experts that it holds.

    Args:
        key: The key.
        value: A DTensor, or this rank's plain tensor.
        layout: Its layout.
        check_replicas: Whether a save compares the copies of a box.

    Returns:
        ShardedTensors of that key, whose data are views of the value's memory. One without elements for an empty value;
        none on a rank outside the mesh.

    Raises:
        ShardingError: it is quantized and consists of several boxes: its scales cannot be divided.
    """
    local = get_local_tensor(value)
    pieces = layout.pieces() or [layout.empty()] * layout.inside
    if len(pieces) == 1 and pieces[0].box.shape == tuple(local.shape):
        return [_make_shard(key, local, pieces[0].box.offset, layout, check_replicas)]
    if pieces and is_quantized(local):
        raise ShardingError(
            f"{key!r} is quantized and has {len(pieces)} boxes of the tensor of all experts: dequantize it first"
        )
    found = []
    for box, place in pieces:
        data = local
        for axis, (start, size) in enumerate(zip(place, box.shape, strict=True)):
            data = data.narrow(axis, start, size)
        found.append(_make_shard(key, data, box.offset, layout, check_replicas))
    return found


def _make_shard(key: str, data: torch.Tensor, offset: Ints, layout: ExpertLayout, replicated: bool) -> ShardedTensor:
    shape, replica = tuple(data.shape), layout.replica or 0
    full_shape = layout.global_shape
    return ShardedTensor(key, data, data.dtype, shape, full_shape, offset, None, replica, replicated=replicated)


__all__ = ["Experts", "expert_shards"]
