"""Experts as trainers hold them: every way to lay them out over a few ranks, made by torch's own chunks alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardckpt_ep import ExpertLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

FQN = "layers.0.moe.experts.w1"
#: What every expert is: (experts, rows, columns) with rows and columns that four ranks do not cut evenly.
INNER = (6, 3)

Kind = Literal["two meshes", "efsdp", "local"]


@dataclass(frozen=True)
class Case:
    """How experts lie.

    Attributes:
        sizes: Ranks by mesh dimension, in the order of the mesh.
        fsdp_dim: The axis that FSDP cuts.
        experts: How many there are.
        counts: How many every expert-parallel rank has; None to deal them out as torch.chunk does.
        kind: As a DTensor of all experts, as FSDP's DTensor of one rank's, or as a plain tensor.
        inner: Shape of one expert.
    """

    sizes: tuple[tuple[str, int], ...]
    fsdp_dim: int = 1
    experts: int = 8
    counts: tuple[int, ...] | None = None
    kind: Kind = "efsdp"
    inner: tuple[int, ...] = INNER

    @property
    def names(self) -> tuple[str, ...]:
        """Of the mesh dimensions."""
        return tuple(name for name, _ in self.sizes)

    def size(self, name: str) -> int:
        """Of a mesh dimension; 1 where there is none."""
        return dict(self.sizes).get(name, 1)


def order(*sizes: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    """The dimensions of a mesh."""
    return sizes


def mesh_of(*sizes: tuple[str, int]) -> DeviceMesh:
    """A mesh, once all ranks have made it: one that ends before another has joined breaks the other's group."""
    mesh = init_device_mesh("cpu", tuple(size for _, size in sizes), mesh_dim_names=tuple(name for name, _ in sizes))
    dist.barrier()
    return mesh


class Meshes:
    """Meshes by shape and names, each made once a process group."""

    def __init__(self) -> None:
        self._made: dict[Any, DeviceMesh] = {}

    def of(self, case: Case) -> DeviceMesh:
        """The mesh of a case."""
        if case.sizes not in self._made:
            self._made[case.sizes] = mesh_of(*case.sizes)
        return self._made[case.sizes]


def whole(experts: int, scale: float = 1.0, inner: tuple[int, ...] = INNER) -> torch.Tensor:
    """All experts: every element another number."""
    shape = (experts, *inner)
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).reshape(shape) * scale


def mine(case: Case, mesh: DeviceMesh, full: torch.Tensor) -> torch.Tensor:
    """This rank's part: its experts, then FSDP's part of these."""
    here = dict(zip(case.names, mesh.get_coordinate() or (), strict=True))
    if case.counts is None:
        part = chunk(full, case.size("ep"), here.get("ep", 0), 0)
    else:
        part = full.split(list(case.counts))[here.get("ep", 0)]
    return chunk(part, case.size("efsdp"), here.get("efsdp", 0), case.fsdp_dim).clone()


def chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    """A chunk, empty where torch.chunk makes fewer."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def live(case: Case, mesh: DeviceMesh, full: torch.Tensor) -> torch.Tensor:
    """The tensor as the case's trainer holds it."""
    local = mine(case, mesh, full)
    if case.kind == "local":
        return local
    if case.kind == "two meshes":
        return from_local(local, mesh, [_placement(case, name) for name in case.names], tuple(full.shape))
    here = dict(zip(case.names, mesh.get_coordinate() or (), strict=True))
    held = case.counts[here["ep"]] if case.counts else chunk(full, case.size("ep"), here["ep"], 0).shape[0]
    rest = tuple(name for name in case.names if name != "ep")
    places = [Shard(case.fsdp_dim) if name == "efsdp" else Replicate() for name in rest]
    return from_local(local, mesh[rest], places, (held, *full.shape[1:]))


def from_local(local: torch.Tensor, mesh: DeviceMesh, places: list[Any], shape: tuple[int, ...]) -> DTensor:
    """A DTensor of that shape over a local tensor."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def layout(case: Case, mesh: DeviceMesh, tensor: torch.Tensor) -> ExpertLayout:
    """The layout, by the constructor for the kind."""
    if case.kind == "two meshes":
        return ExpertLayout.from_dtensor(tensor, name=FQN)
    shape = None if case.counts else (case.experts, *case.inner)
    given = {"experts_per_rank": case.counts, "global_shape": shape, "name": FQN}
    if case.kind == "efsdp":
        return ExpertLayout.from_efsdp(tensor, mesh, **given)
    given["global_shape"] = (case.experts, *case.inner)
    return ExpertLayout.from_local(tensor, mesh, fsdp_dim=case.fsdp_dim if "efsdp" in case.names else None, **given)


def state(case: Case, mesh: DeviceMesh, *, empty: bool = False) -> dict[str, Any]:
    """A parameter, its optimizer state, and a plain parameter beside them."""
    factor = 0.0 if empty else 1.0
    return {
        "model": {
            FQN: live(case, mesh, whole(case.experts, factor, case.inner)),
            "layers.0.moe.router.weight": torch.full((2, 3), 5.0 * factor),
        },
        "optimizer": {
            "state": {
                FQN: {
                    "exp_avg": live(case, mesh, whole(case.experts, 0.5 * factor, case.inner)),
                    "step": torch.tensor(7.0 * factor),
                }
            }
        },
    }


def expected(experts: int, inner: tuple[int, ...] = INNER) -> dict[str, torch.Tensor]:
    """What a checkpoint of any case holds, by key."""
    return {
        f"model.{FQN}": whole(experts, 1.0, inner),
        f"optimizer.state.{FQN}.exp_avg": whole(experts, 0.5, inner),
        f"optimizer.state.{FQN}.step": torch.tensor(7.0),
        "model.layers.0.moe.router.weight": torch.full((2, 3), 5.0),
    }


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(case: Case, mesh: DeviceMesh, found: dict[str, Any]) -> None:
    """Raise unless the state is what :func:`state` makes."""
    wanted = state(case, mesh)
    moments, held = found["optimizer"]["state"][FQN], wanted["optimizer"]["state"][FQN]
    pairs = [
        (found["model"][FQN], wanted["model"][FQN]),
        (moments["exp_avg"], held["exp_avg"]),
        (moments["step"], held["step"]),
        (found["model"]["layers.0.moe.router.weight"], wanted["model"]["layers.0.moe.router.weight"]),
    ]
    for tensor, value in pairs:
        assert type(tensor) is type(value), case
        assert torch.equal(get_local_tensor(tensor), get_local_tensor(value)), case


def all_cases() -> Iterator[Case]:
    """Every layout of four ranks: splits in both orders, both axes, even and uneven, of all kinds; replicas too."""
    for ep, efsdp in ((1, 4), (2, 2), (4, 1)):
        given = {1: (5,), 2: (1, 4), 4: (0, 3, 1, 1)}[ep]
        for sizes in (order(("ep", ep), ("efsdp", efsdp)), order(("efsdp", efsdp), ("ep", ep))):
            for fsdp_dim in (0, 1):
                yield from kinds_of(sizes, fsdp_dim, given)
    for sizes in (
        order(("replicate", 2), ("efsdp", 1), ("ep", 2)),
        order(("ep", 2), ("replicate", 2), ("efsdp", 1)),
        order(("replicate", 2), ("efsdp", 2), ("ep", 1)),
    ):
        yield from kinds_of(sizes, 1, (2, 3) if dict(sizes)["ep"] > 1 else (5,))


def kinds_of(sizes: tuple[tuple[str, int], ...], fsdp_dim: int, given: tuple[int, ...]) -> Iterator[Case]:
    """A mesh and an axis with experts held in every way: dealt out evenly, unevenly, and as ``given`` counts say."""
    kinds: tuple[Kind, ...] = ("two meshes", "efsdp", "local")
    for kind in kinds:
        yield Case(sizes, fsdp_dim, kind=kind)
        yield Case(sizes, fsdp_dim, experts=5, kind=kind)
        if kind != "two meshes":  # DTensor deals out as torch.chunk does
            yield Case(sizes, fsdp_dim, experts=5, counts=given, kind=kind)


def _placement(case: Case, name: str) -> Any:
    if name == "ep":
        return Shard(0)
    if name != "efsdp":
        return Replicate()
    outer = case.names.index("efsdp") < case.names.index("ep")
    if case.fsdp_dim == 0 and outer and case.size("ep") > 1:
        return _StridedShard(0, split_factor=case.size("ep"))
    return Shard(case.fsdp_dim)
