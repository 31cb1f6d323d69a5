from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters.dtensor import describe_dtensor, sharded_tensor_from_dtensor
from shardckpt.errors import ShardingError
from shardckpt.mapping import BlockScales, LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.optimizer import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from tests.states import gated_halves

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

WHOLE = {"columns": (8, 6), "rows": (6, 8), "glu": (16, 4), "bias": (6,)}
AXES = {"columns": 0, "rows": 1}
STEPS = 3


def _whole(name: str, number: int) -> torch.Tensor:
    """A global tensor, another for every number."""
    count = torch.Size(WHOLE[name]).numel()
    return torch.sin(torch.arange(count, dtype=torch.float32).reshape(WHOLE[name]) + 7 * number)


def _piece(name: str, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's part of a global tensor: a slice, both halves' slices of the gated one, all of the bias."""
    if name in AXES:
        return whole.chunk(world, AXES[name])[rank].contiguous()
    if name == "glu":
        return torch.cat([half.chunk(world)[rank] for half in whole.chunk(2)])
    return whole.clone()


def _trained(rank: int, world: int, steps: int, seed: int = 0) -> tuple[torch.nn.ParameterDict, torch.optim.Adam]:
    """A rank's parameters and optimizer after some steps whose gradients depend on the global elements alone."""
    model = torch.nn.ParameterDict({name: _piece(name, _whole(name, seed), rank, world) for name in WHOLE})
    optimizer = torch.optim.Adam(model.values(), lr=0.1 + seed)
    for step in range(1, steps + 1):
        for name, param in model.items():
            param.grad = _piece(name, _whole(name, seed + step), rank, world)
        optimizer.step()
    return model, optimizer


def _describe(name: str, param: torch.Tensor, rank: int, world: int) -> Any:
    if name == "glu":
        return ShardedTensorFactory(name, param, lambda *args: gated_halves(rank, world, *args), torch.cat)
    if name in AXES:
        return ShardedTensor.from_rank_offsets(name, param, (AXES[name], rank, world))
    return ShardedTensor.from_rank_offsets(name, param, replica_id=rank)


def _state(model: torch.nn.ParameterDict, optimizer: torch.optim.Adam, rank: int, world: int) -> dict[str, Any]:
    described = {name: _describe(name, param, rank, world) for name, param in model.state_dict(keep_vars=True).items()}
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(described, model.values()))
    return {"model": described, "optimizer": state}


def _save(path: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dc.save(_state(*_trained(rank, world, STEPS), rank, world), path)


def _load(path: str) -> None:
    """Load into an optimizer with other values, and compare all of its state with that of a run of this world's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = _trained(rank, world, 1, seed=5)
    loaded = dc.load(_state(model, optimizer, rank, world), path)
    optimizer.load_state_dict(loaded["optimizer"])
    expected_model, expected = _trained(rank, world, STEPS)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, param in model.items():
        assert torch.equal(loaded["model"][name], expected_model[name]), name
        state, wanted = optimizer.state[param], expected.state[expected_model[name]]
        assert set(state) == set(wanted) == {"step", "exp_avg", "exp_avg_sq"}
        for part, value in wanted.items():
            assert torch.equal(state[part], value), (name, part)


def test_adam_saved_at_2_ranks_goes_on_at_1_2_and_4(ranks: Ranks, tmp_path: Path) -> None:
    """Tensor-parallel Adam state, a gated layer by a factory too, is resharded with every value and step right."""
    path = str(tmp_path / "adam")
    ranks.run(2, _save, path)
    for world in (1, 2, 4):
        ranks.run(world, _load, path)
    keys = {f"optimizer.state.{part}.{name}" for part in ("step", "exp_avg", "exp_avg_sq") for name in WHOLE}
    assert set(dc.load_tensors_metadata(path)) == keys | set(WHOLE)


def _stage(filled: bool) -> tuple[dict[str, Any], list[torch.nn.Parameter]]:
    """A pipeline stage: rank r of n holds layers r, r + n, ... of 4, which were trained for 10, 11, ... steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = list(range(rank, 4, world))
    params = [torch.nn.Parameter(torch.full((2, 3), float(layer))) for layer in layers]
    model = [
        ShardedTensor.from_rank_offsets("layers.weight", param, (0, layer, 4), prepend_axis_num=1)
        for param, layer in zip(params, layers, strict=True)
    ]
    state = {
        number: {"step": torch.tensor(10.0 + layer if filled else 0.0), "note": f"layer {layer}" if filled else None}
        for number, layer in enumerate(layers)
    }
    optimizer = {"state": state, "param_groups": [{"lr": 1.0, "params": list(range(len(layers)))}]}
    optim_state_to_sharding_state(optimizer, get_param_id_to_sharded_param_map({"layers": model}, params))
    return {"model": model, "optimizer": optimizer}, params


def _save_stage(path: str) -> None:
    dc.save(_stage(filled=True)[0], path)


def _load_stage(path: str) -> None:
    loaded = dc.load(_stage(filled=False)[0], path)["optimizer"]
    layers = list(range(dist.get_rank(), 4, dist.get_world_size()))
    assert [values["step"].item() for _, values in sorted(loaded["state"].items())] == [10 + n for n in layers]
    assert [values["note"] for _, values in sorted(loaded["state"].items())] == [f"layer {n}" for n in layers]
    assert loaded["param_groups"] == [{"lr": 1.0, "params": list(range(len(layers)))}]


def test_scalars_and_plain_values_are_kept_for_every_layer(ranks: Ranks, tmp_path: Path) -> None:
    """Step counts and state that is no tensor are each layer's own, though other ranks have them under one number."""
    path = str(tmp_path / "stages")
    ranks.run(2, _save_stage, path)
    for world in (1, 2, 4):
        ranks.run(world, _load_stage, path)


def test_a_parameter_that_the_model_lacks_is_named() -> None:
    """State of a parameter whose description is made of a copy is refused, with the way out; nothing is changed."""
    model, optimizer = _trained(0, 1, 1)
    copies = {name: _describe(name, param.detach().clone(), 0, 1) for name, param in model.items()}
    state = optimizer.state_dict()
    before = state["state"]
    with pytest.raises(ShardingError, match=r"parameter 0 .*keep_vars=True"):
        optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(copies, model.values()))
    assert state["state"] is before
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_a_model_of_copies_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where no parameter at all is found, a warning says how to make the model's state dict."""
    model, _ = _trained(0, 1, 0)
    with caplog.at_level(logging.WARNING):
        found = get_param_id_to_sharded_param_map({"w": _describe("bias", torch.zeros(6), 0, 1)}, model.values())
    assert found == {}
    assert "keep_vars=True" in caplog.text


def test_parameters_are_found_by_their_memory() -> None:
    """A state dict of detached views, as torch makes it by default, describes the optimizer's parameters too."""
    model, _ = _trained(0, 1, 0)
    views = {name: _describe(name, tensor, 0, 1) for name, tensor in model.state_dict().items()}
    found = get_param_id_to_sharded_param_map(views, model.values())
    assert [found[number].key for number in range(4)] == list(model)


def test_tied_parameters_have_their_first_number() -> None:
    """A parameter that an optimizer lists twice is known by its first place there."""
    shared, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    assert get_optim_param_to_id_map([shared, other, shared]) == {id(shared): 0, id(other): 1}
    views = {"s": ShardedTensor.from_rank_offsets("s", shared.detach())}
    assert list(get_param_id_to_sharded_param_map(views, [shared, other, shared])) == [0]


def test_state_can_be_left_out() -> None:
    """exclude_keys leaves state out, given as a collection or, as Megatron's callers do, as one name."""
    for excluded in (("step",), "step"):
        model, optimizer = _trained(0, 1, 1)
        described = {name: _describe(name, param, 0, 1) for name, param in model.items()}
        state = optimizer.state_dict()
        optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(described, model.values()), excluded)
        assert {name for values in state["state"].values() for name in values} == {"exp_avg", "exp_avg_sq"}
        assert isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)


def test_a_name_that_leaves_out_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A typo in exclude_keys gets a warning with the nearest name; Megatron's "step" may be of another optimizer."""
    model, optimizer = _trained(0, 1, 1)
    described = {name: _describe(name, param, 0, 1) for name, param in model.items()}
    id_map = get_param_id_to_sharded_param_map(described, model.values())
    optim_state_to_sharding_state({"state": {}, "param_groups": []}, id_map, "exp_agv")
    plain = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9)
    plain.step()
    optim_state_to_sharding_state(plain.state_dict(), id_map, "step")
    assert not caplog.messages
    for _ in range(2):  # at two saves it is said once
        optim_state_to_sharding_state(optimizer.state_dict(), id_map, ("exp_agv", "step"))
    (said,) = caplog.messages
    assert said.startswith("exclude_keys: no state has the name 'exp_agv' (did you mean exp_avg? state: exp_avg, ")


def test_state_of_another_shape_is_refused() -> None:
    """A factored moment, one row of its parameter, cannot lie where the parameter lies: the error says what to do."""
    param = _describe("columns", torch.zeros(8, 6), 0, 1)
    with pytest.raises(ShardingError, match=r"shape \(8,\), its parameter \(8, 6\).*exclude_keys"):
        make_sharded_optimizer_tensor(param, torch.zeros(8), "optimizer.state.row")


def test_other_state_dicts_are_refused() -> None:
    """What is no state dict of an optimizer is an error that says what to pass."""
    with pytest.raises(ShardingError, match=r"lacks param_groups, state: pass optimizer\.state_dict\(\)"):
        optim_state_to_sharding_state({"0.weight": torch.ones(2)}, {})


def test_state_has_no_block_scales() -> None:
    """A moment of a block-scaled parameter has values of its own, which the parameter's scales do not scale."""
    param = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), block_scales=BlockScales("w.scales", (2, 2)))
    assert make_sharded_optimizer_tensor(param, torch.zeros(4, 2), "optimizer.state.exp_avg").block_scales is None


def test_the_optimizers_own_groups_stay() -> None:
    """The live optimizer's groups and state are not touched by describing its state dict."""
    model, optimizer = _trained(0, 1, 1)
    _state(model, optimizer, 0, 1)
    assert optimizer.param_groups[0]["params"] == list(model.values())
    assert all(isinstance(values["step"], torch.Tensor) for values in optimizer.state.values())


def test_no_momentum_is_an_object() -> None:
    """State that is None (SGD without momentum) is stored once a parameter."""
    param = torch.nn.Parameter(torch.ones(4))
    state: dict[str, Any] = {"state": {0: {"momentum_buffer": None}}, "param_groups": [{"params": [0]}]}
    optim_state_to_sharding_state(state, {0: ShardedTensor.from_rank_offsets("w", param, (0, 1, 2), replica_id=3)})
    described = state["state"][0]["momentum_buffer"]
    assert isinstance(described, ShardedObject)
    assert described.unique_key == "optimizer.state.momentum_buffer.w/shard_0_1"
    assert described.replica_id == (4, 0, 0, 3)


def _dtensors() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    found = get_param_id_to_sharded_param_map({"w": sharded_tensor_from_dtensor("w", param)}, [param])  # type: ignore[arg-type]
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, found)
    moment = state["state"][0]["exp_avg"]
    return [type(moment.data).__name__, str(tuple(moment.data.shape)), str(moment.global_offset)]


def test_dtensors_are_described_by_their_local_parts(ranks: Ranks) -> None:
    """FSDP2's parameters and moments, DTensors, are matched and described by the tensors that each rank holds."""
    assert ranks.run(2, _dtensors) == [["Tensor", "(3,)", "(0,)"], ["Tensor", "(3,)", "(3,)"]]


def _dtensors_with_empty_parts() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [torch.nn.Parameter(distribute_tensor(torch.zeros(rows), mesh, [Shard(0)])) for rows in (1, 4, 1, 4)]
    described = {f"p{number}": describe_dtensor(f"p{number}", param) for number, param in enumerate(params)}
    found = get_param_id_to_sharded_param_map(described, params)
    return [[found[number].key for number in sorted(found)], sorted(get_optim_param_to_id_map(params).values())]


def test_parameters_without_elements_are_found(ranks: Ranks) -> None:
    """DTensors of which a rank has no element are matched by identity, as torch makes new views of them each time."""
    assert ranks.run(2, _dtensors_with_empty_parts) == [[["p0", "p1", "p2", "p3"], [0, 1, 2, 3]]] * 2
