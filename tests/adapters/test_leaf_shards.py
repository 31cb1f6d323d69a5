"""Modules that are described in each save are described as they are then, however little is looked at again."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import SavedModules, to_sharded_state_dict
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensorFactory
from shardckpt.state_dict import nested_values
from tests.adapters.layouts import S1, SS0, Layout, Meshes, values
from tests.adapters.models import made_model, sharded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


def _list_shards(described: Any) -> list[Any]:
    """The shards, with factories built."""
    found = [leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf for leaf in nested_values(described)]
    return list(nested_values(found))


def _fields(shard: Any) -> tuple[Any, ...]:
    assert shard.fixed_fields in (None, shard.list_fields())
    return (*shard.list_fields(), shard.flattened_range)


def _check(saved: SavedModules, model: nn.Module, *, is_like: bool, name: str) -> None:
    """Raise unless the shards are those that to_sharded_state_dict describes, the last ones again if ``is_like``."""
    before = list(saved._tensors._shards.values())  # kept: a new shard could lie where a dropped one was
    described = saved.describe(model)
    found, expected = _list_shards(described), _list_shards(to_sharded_state_dict(model))
    assert [_fields(shard) for shard in found] == [_fields(each) for each in expected], name
    for here, there in zip(found, expected, strict=True):
        assert here.data.data_ptr() == there.data.data_ptr(), name
        assert here.data.stride() == there.data.stride(), name
        assert here.data.dtype == there.data.dtype, name
        assert not here.data.requires_grad, name
    assert all(any(shard is kept for kept in before) for shard in found) == is_like, name
    saved.release()


def _change_plain() -> None:
    model = made_model(1)
    saved = SavedModules()
    layer: Any = model[0]

    def drop() -> None:
        del layer.up.bias

    #: Each change, and whether the tensors are then like those before: only these may keep their descriptions.
    changes: dict[str, tuple[Callable[[], Any], bool]] = {
        "values": (lambda: layer.up.weight.data.add_(1), True),
        "other memory": (lambda: setattr(layer.up.weight, "data", torch.randn(10, 6).double()), True),
        "other strides": (lambda: setattr(layer.up.weight, "data", torch.randn(6, 10).double().t()), True),
        "another parameter": (lambda: setattr(layer.up, "weight", nn.Parameter(torch.ones(10, 6).double())), True),
        "frozen": (lambda: layer.up.weight.requires_grad_(False), True),
        "dtype": (lambda: setattr(layer.up.weight, "data", torch.randn(10, 6)), False),
        "shape": (lambda: setattr(layer.up.weight, "data", torch.randn(12, 6)), False),
        "resized": (lambda: layer.mean.resize_(3), False),
        "all of another dtype": (lambda: model.to(torch.bfloat16), False),
        "one less": (drop, False),
        "one more": (lambda: layer.up.register_parameter("bias", nn.Parameter(torch.ones(2))), False),
        "order": (lambda: layer._modules.update(up=layer._modules.pop("up")), False),
        "name": (lambda: model.register_module("last", model._modules.pop("1")), False),
        "not stored": (lambda: layer._non_persistent_buffers_set.add("mean"), False),
    }
    _check(saved, model, is_like=False, name="first")
    for name, (change, is_like) in changes.items():
        change()
        _check(saved, model, is_like=is_like, name=name)
        _check(saved, model, is_like=True, name=f"after {name}")


def test_any_change_of_a_module_is_seen() -> None:
    """After any change of a module its tensors are described as in a first save, and else not described again."""
    _change_plain()


def _change_sharded() -> None:
    model: Any = sharded(made_model(1))
    saved = SavedModules()
    layer = model[0]

    def gather() -> None:
        layer.unshard()
        assert not isinstance(layer.up.weight, DTensor)

    def replicate() -> None:
        whole = layer.up.weight.detach().redistribute(placements=[Replicate()])
        layer.up.weight = nn.Parameter(whole)

    def move_memory() -> None:
        layer.down.weight._local_tensor = layer.down.weight._local_tensor.clone()

    changes: dict[str, tuple[Callable[[], Any], bool]] = {
        "values": (lambda: [p.to_local().detach().add_(1) for p in model.parameters()], True),
        "gathered": (gather, True),
        "memory": (move_memory, True),
        "placements": (replicate, False),
        "a plain one": (lambda: setattr(layer.up, "bias", nn.Parameter(torch.ones(3))), False),
        "other shape": (lambda: setattr(layer.up.bias, "data", torch.ones(4)), False),
    }
    _check(saved, model, is_like=False, name="first")
    for name, (change, is_like) in changes.items():
        change()
        _check(saved, model, is_like=is_like, name=name)
        _check(saved, model, is_like=True, name=f"after {name}")


def test_any_change_of_sharded_parameters_is_seen(ranks: Ranks) -> None:
    """The same under FSDP2: gathered parameters, other memory, other placements, plain tensors among DTensors."""
    ranks.run(2, _change_sharded)


def _make_boxes() -> Any:
    """A local tensor that is several boxes, beside one that is one box."""
    meshes = Meshes()
    kinds = [Layout((2,), (placement,)) for placement in (SS0, S1)]
    return nn.ParameterList([nn.Parameter(meshes.spread(values((8, 4)), kind)) for kind in kinds])


def _describe_boxes() -> list[int]:
    model = _make_boxes()
    saved = SavedModules()
    for _ in range(3):
        described = saved.describe(model)
        found, expected = _list_shards(described), _list_shards(to_sharded_state_dict(model))
        assert [_fields(shard) for shard in found] == [_fields(each) for each in expected]
        for here, there in zip(found, expected, strict=True):
            assert here.data.equal(there.data)
        saved.release()
    return [len(_list_shards({name: each})) for name, each in described.items()]


def test_several_boxes_are_described_in_each_save(ranks: Ranks) -> None:
    """A local tensor of several boxes, as of FSDP2 over tensor parallelism, is described right each time."""
    assert ranks.run(2, _describe_boxes) == [[2, 1]] * 2


def _describe_broken_boxes() -> None:
    model = _make_boxes()
    saved = SavedModules()
    saved.describe(model)
    saved.release()
    model[0]._local_tensor = torch.ones(5)
    with pytest.raises(ShardingError, match=r"shape \(5,\)"):
        saved.describe(model)
    kept = [shard for shard in saved._tensors._shards.values() if shard is not None]
    assert [shard.data for shard in kept] == [None]


def test_shards_get_no_tensors_from_a_description_that_fails(ranks: Ranks) -> None:
    """A leaf that is refused when it is described anew leaves the kept shards of the others without tensors."""
    ranks.run(2, _describe_broken_boxes)


def test_what_is_kept_holds_no_tensors() -> None:
    """Between two saves a model's tensors are not kept in memory: it may be gone before the next."""
    model = made_model(1)
    saved = SavedModules()
    for _ in range(2):
        described = saved.describe(model)
        assert described
        saved.release()
    freed = [weakref.ref(tensor.untyped_storage()) for tensor in model.state_dict().values()]
    assert all(shard.data is None for shard in described.values())
    watched = weakref.ref(model[0].up.weight)
    del model, described
    gc.collect()
    assert watched() is None
    assert all(storage() is None for storage in freed)


def test_a_broken_dtensor_is_refused_each_time(ranks: Ranks, tmp_path: Path) -> None:
    """A DTensor whose local tensor is no longer what it says is refused by each save, on all ranks."""
    ranks.run(2, _refuse, tmp_path)


def _refuse(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    saved = SavedModules()
    dist_checkpointing.save(saved.describe(model), folder / "a")
    saved.release()
    for local in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        model.weight._local_tensor = local
        for _ in range(2):
            with pytest.raises(ShardingError, match=r"weight.*(shape \(3,\)|dtype torch.float64)"):
                dist_checkpointing.save(saved.describe(model), folder / "b")
            saved.release()
    assert not (folder / "b").exists()
