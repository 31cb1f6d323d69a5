"""build_ep_fqn2spec_info finds the mesh through a trainer's methods, its properties, and the experts themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import Shard

from shardckpt.compat.mindspeed import build_ep_fqn2spec_info
from shardckpt.errors import ShardingError
from tests.ep.live import from_local, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tests.ranks import Ranks


class _Getters:
    """A parallel state that has its meshes from methods alone."""

    __slots__ = ("_meshes",)

    def __init__(self, *meshes: DeviceMesh) -> None:
        self._meshes = meshes

    def is_ep_enable(self) -> bool:
        return True

    def get_ep_fsdp_device_mesh(self) -> DeviceMesh:
        return self._meshes[0]

    def get_cp_device_mesh(self) -> DeviceMesh:
        raise KeyError("cp")

    def get_device_mesh_of(self, name: str) -> DeviceMesh:
        raise AssertionError(name)

    def init_device_mesh(self) -> DeviceMesh:
        raise AssertionError("a new mesh")


class _Properties(_Getters):
    """A parallel state that has its meshes from properties alone."""

    get_ep_fsdp_device_mesh = None  # type: ignore[assignment]

    @property
    def ep_fsdp_device_mesh(self) -> DeviceMesh:
        return self._meshes[0]


class _Sizes:
    """A parallel state whose methods return numbers alone."""

    __slots__ = ()

    def is_ep_enable(self) -> bool:
        return True

    def get_ep_group_size(self) -> int:
        return 2

    def get_efsdp_group_size(self) -> int:
        return 2


def _model(mesh: DeviceMesh | None) -> torch.nn.Module:
    w1 = torch.zeros(4, 3) if mesh is None else from_local(torch.zeros(4, 3), mesh["efsdp"], [Shard(1)], (4, 6))
    experts = torch.nn.Module()
    experts.w1 = torch.nn.Parameter(w1)
    return torch.nn.ModuleDict({"experts": experts})


def _specs() -> Any:
    mesh = mesh_of(("efsdp", 2), ("ep", 2))
    model = _model(mesh)
    expected = build_ep_fqn2spec_info(model, mesh, "experts")
    assert expected["experts.w1"].placements == (Shard(1), Shard(0))
    with pytest.raises(ShardingError, match=r"has 0 meshes .*\(no mesh at all\): pass the mesh"):
        build_ep_fqn2spec_info(_model(None), _Sizes(), "experts")
    with pytest.raises(
        ShardingError, match=r"get_cp_device_mesh KeyError\('cp'\), get_ep_fsdp_device_mesh\(\) \('dp',\)"
    ):
        build_ep_fqn2spec_info(_model(None), _Getters(mesh_of(("dp", 4))), "experts")
    states = _Getters(mesh), _Properties(mesh), _Sizes()
    return [build_ep_fqn2spec_info(model, state, "experts") == expected for state in states]


def test_a_parallel_state_of_methods_alone_is_understood(ranks: Ranks) -> None:
    """Its methods or properties return the mesh; where they return sizes, FSDP's experts know it."""
    assert ranks.run(4, _specs) == [[True, True, True]] * 4
