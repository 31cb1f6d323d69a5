"""Find the expert tensors of a state dict, and their layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters import get_local_tensor, make_shards
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box
from shardckpt.tensors import is_quantized
from shardckpt_ep.meshes import EP_NAMES, has_mesh_dim
from shardckpt_ep.names import SECTIONS, ExpertNames, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedBase
    from shardckpt_ep.layout import ExpertLayout


class Experts:
    """The layouts of a rank's expert parameters, and the keys of a state dict that they apply to.

    Arguments are as for :func:`shardckpt_ep.expert_sharded_state_dict`.
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
        """Return the layout of a value of any type, under a key with dots, of the state dict.

        It is None if the value is not an expert's tensor, or is optimizer state without a layout (a step count). An
        expert's that has no layout, or another shape than its layout, is a ShardingError; so is an array of numpy's.
        """
        if not isinstance(value, torch.Tensor):
            if getattr(value, "shape", ()) and (self.names.find(key) or self._is_expert(key)):
                raise ShardingError(
                    f"{key!r} is an expert's and a {type(value).__name__}, no tensor: all but one rank's would be "
                    "lost. Pass a tensor, as torch.as_tensor(array) is, or an is_expert= that excludes it"
                )
            return None
        name = self.names.find(key)
        if name is None:
            kind = "plain tensor"
            if isinstance(value, DTensor):
                if has_mesh_dim(value.device_mesh, EP_NAMES):
                    return None
                kind = "DTensor without an expert-parallel mesh dimension"
            if value.dim() and self._is_expert(key):
                raise ShardingError(
                    f"{key!r} is an expert's and has no layout: a {kind} of shape {tuple(value.shape)} does not say "
                    "which experts it holds, so all but one rank's would be lost. Pass its layout, or an is_expert= "
                    "that excludes it"
                )
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
        """Return the parameters with a layout but without a key, of themselves or of their optimizer state."""
        names = [name for key in keys if (name := self.names.find(key))]
        found = {name.fqn for name in names}
        # of the names of a tied parameter an optimizer has one, and a model each
        is_optimizer = all(name.slot for name in names)
        tied = {self._layouts[fqn].tied for fqn in found} - {""} if is_optimizer else set()
        return sorted(fqn for fqn, layout in self._layouts.items() if fqn not in found and layout.tied not in tied)

    def check_shards(self, shards: Iterable[ShardedBase], comm: Comm) -> None:
        """Collective: check this rank's shards of expert tensors against their layouts.

        A shard that is not described as its layout says is a ShardingError, the same on every rank.
        """
        with comm.collective_phase("comparing experts with their layouts"):
            for shard in shards:
                name = self.names.find(shard.key)
                if name is None or not isinstance(shard, ShardedTensor):
                    continue
                layout, shape = self._layouts[name.fqn], tuple(shard.global_shape)
                if name.slot and shape != layout.global_shape:  # optimizer state of another shape
                    continue
                box = Box(tuple(shard.global_offset), tuple(shard.local_shape))
                if shape != layout.global_shape or all(box != piece.box for piece in layout.described_pieces()):
                    raise ShardingError(
                        f"{shard.key!r} is described as {box.shape} at {box.offset} of {shape}; its layout has "
                        f"{[piece.box for piece in layout.pieces()]} of {layout.global_shape} on this rank: describe "
                        "the state dict by expert_sharded_state_dict with the same layouts"
                    )


def expert_shards(
    key: str, value: torch.Tensor, layout: ExpertLayout, *, check_replicas: bool = False
) -> list[ShardedTensor]:
    """Return a tensor as shards of the tensor of all experts, whose data are views of its memory.

    An empty tensor is one shard without elements; a rank outside the mesh has no shard. A quantized tensor that
    consists of several boxes is a ShardingError: its scales cannot be divided.
    """
    local = get_local_tensor(value)
    pieces = layout.described_pieces()
    if len(pieces) > 1 and is_quantized(local):
        raise ShardingError(
            f"{key!r} is quantized and has {len(pieces)} boxes of the tensor of all experts: dequantize it first"
        )
    return make_shards(key, local, pieces, layout.global_shape, layout.replica or 0, replicated=check_replicas)
