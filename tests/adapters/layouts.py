"""The placements that the tests of DTensors try, and tensors of every kind of shape laid out by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SS0, SS0_3, SS1 = (_StridedShard(dim, split_factor=factor) for dim, factor in ((0, 2), (0, 3), (1, 2)))

#: Even and uneven sizes, sizes below the number of ranks (empty shards), and an empty tensor.
SHAPES = [(8, 4), (7, 5), (3, 2), (5, 0)]


class Layout(NamedTuple):
    """A mesh and its placements."""

    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Part of the keys of its tensors."""
        sizes = "x".join(map(str, self.mesh))
        return f"{sizes}:{','.join(str(place).replace('.', '_') for place in self.placements)}"


def layouts(world: int) -> list[Layout]:
    """Every layout for so many ranks: one mesh dimension, two of them, and with four ranks hybrid sharding."""
    lines = [Layout((world,), (place,)) for place in (R, S0, S1, SS0, SS0_3, SS1)]
    pairs = [(S0, S0), (S1, S0), (S0, S1), (SS0, S0), (S0, SS0), (SS0_3, SS1)]
    meshes = {1: [(1, 1)], 2: [(2, 1)], 3: [(3, 1)], 4: [(2, 2)]}[world]
    planes = [Layout(mesh, pair) for mesh in meshes for pair in pairs]
    hybrid = [Layout((2, 2), (R, S0)), Layout((2, 2), (S1, R)), Layout((2, 1, 2), (R, S0, SS1))] if world == 4 else []
    return lines + planes + hybrid


def values(shape: tuple[int, ...]) -> torch.Tensor:
    """A global tensor of different numbers."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)


class Meshes:
    """The meshes of a rank's job, each made once: to make one is to make groups."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Any] = {}

    def spread(self, whole: torch.Tensor, layout: Layout) -> DTensor:
        """The tensor laid out, by torch's own splitting."""
        if layout.mesh not in self._made:
            self._made[layout.mesh] = init_device_mesh("cpu", layout.mesh)
        mesh, placements = self._made[layout.mesh], list(layout.placements)
        if not whole.dim():
            placements = [R] * len(placements)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def named(shape: tuple[int, ...]) -> str:
    """Part of the key of a tensor of a shape."""
    return "x".join(map(str, shape)) or "scalar"


def spread_all(meshes: Meshes, layout: Layout, factor: float = 1.0) -> dict[str, DTensor]:
    """Tensors of all shapes, and a scalar, times ``factor``."""
    return {named(shape): meshes.spread(values(shape) * factor, layout) for shape in [*SHAPES, ()]}


def world() -> int:
    """Number of ranks."""
    return dist.get_world_size()


__all__ = ["S0", "S1", "SHAPES", "SS0", "Layout", "Meshes", "R", "layouts", "named", "spread_all", "values", "world"]
