"""Loaded state lies where its parameter lies, whatever the layout in which it was saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.adapters.state_layout import match_axes, resize_like
from shardckpt.errors import ShapeMismatchError, ShardingError
from shardckpt.mapping import ShardedTensor as OurShardedTensor
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from tests.adapters.layouts import S0, S1, SHAPES, SS0, Meshes, R, layouts, values, world
from tests.adapters.torch_sharded import MAKERS, SHAPE, local_tensors
from tests.optimizer.layout import load
from tests.ranks import RankError, Ranks

if TYPE_CHECKING:
    from pathlib import Path

#: 3-D: experts. Rows and columns of each are state of their own.
EXPERTS = (5, 4, 3)


def _state(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """State of a parameter: a moment of its shape, rows and columns that keep the axis or drop it, a step count."""
    moment = values(shape)
    found = {"exp_avg": moment, "step": torch.tensor(7.0)}
    if len(shape) > 1:
        found |= {"row": moment.sum(-1, keepdim=True), "column": moment.sum(-2, keepdim=True), "flat": moment.sum(-1)}
    return found


def _save(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """One process saves the state of parameters of these shapes."""
    state = {name: _state(shape) for name, shape in shapes.items()}
    dist_checkpointing.save(to_sharded_state_dict({"optimizer": {"state": state}}), directory)


def _check(param: DTensor, slots: dict[str, Any], shape: tuple[int, ...]) -> None:
    expected = _state(shape)
    assert set(slots) == set(expected)
    step = slots.pop("step")
    assert type(step) is torch.Tensor
    assert step == 7.0
    for slot, value in slots.items():
        same = value.shape == param.shape
        if value.numel() == 1 and not same:
            assert type(value) is torch.Tensor
            assert torch.equal(value, expected[slot])
            continue
        assert value.device_mesh == param.device_mesh
        assert value.placements == param.placements if same else value.placements == (R,) * param.device_mesh.ndim
        laid = distribute_tensor(expected[slot], param.device_mesh, value.placements, src_data_rank=None)
        assert torch.equal(value.to_local(), laid.to_local())


def _load_all(directory: Path) -> int:
    """Every layout of this world for every shape, even and uneven, with empty shards and empty tensors."""
    meshes, count = Meshes(), 0
    shapes = _named()
    for layout in layouts(world()):
        params = {name: meshes.spread(torch.zeros(shape), layout) for name, shape in shapes.items()}
        found = load(directory, params)
        for name, shape in shapes.items():
            _check(params[name], found[name], shape)
            count += 1
    return count


def _named() -> dict[str, tuple[int, ...]]:
    return {f"layer.{number}.weight": shape for number, shape in enumerate([*SHAPES, EXPERTS])}


@pytest.mark.parametrize("count", [1, 3, pytest.param(4, marks=pytest.mark.ci)])
def test_state_has_the_layout_of_its_parameter(ranks: Ranks, tmp_path: Path, count: int) -> None:
    """A DTensor's state is a DTensor of its mesh and placements, strided, uneven and hybrid ones too, and is right."""
    _save(tmp_path / "ckpt", _named())

    assert min(ranks.run(count, _load_all, tmp_path / "ckpt")) == len(layouts(count)) * len(_named())


def _factored(directory: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {"rows": [R, S0], "both": [S0, S1], "columns": [S1, R], "strided": [SS0, S0], "square": [S0, R]}
    shapes = {name: (8, 8) if name == "square" else (8, 6) for name in placements} | {"experts": EXPERTS}
    placements["experts"] = [S0, S1]
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    params = {name: distribute_tensor(whole[name], mesh, placements[name], src_data_rank=None) for name in shapes}
    if dist.get_rank() == 0:
        saved = {"optimizer": {"state": {name: _state(shape) for name, shape in shapes.items()}}}
        group = dist.new_group([0], use_local_synchronization=True)
        dist_checkpointing.save(to_sharded_state_dict(saved), directory, process_group=group)
    dist.barrier()
    found = load(directory, params, shard_factored=True)
    for name, slots in found.items():
        for slot, value in slots.items():
            if slot != "step":
                expected = _state(shapes[name])[slot]
                laid = distribute_tensor(expected, mesh, value.placements, src_data_rank=None)
                assert torch.equal(value.to_local(), laid.to_local()), (name, slot)
    return {f"{n}.{s}": value.placements for n, slots in found.items() for s, value in slots.items() if s != "step"}


def test_factored_state_keeps_the_axes_that_it_has_left(ranks: Ranks, tmp_path: Path) -> None:
    """With ``shard_factored``, rows follow the sharded rows, columns the columns; what is ambiguous is replicated."""
    found = ranks.run(4, _factored, tmp_path / "ckpt")[0]

    assert found["rows.row"] == (R, S0)
    assert found["rows.column"] == (R, R)
    assert found["rows.flat"] == (R, S0)
    assert (found["both.row"], found["both.column"], found["both.flat"]) == ((S0, R), (R, S1), (S0, R))
    assert (found["columns.row"], found["columns.column"]) == ((R, R), (S1, R))
    assert found["strided.row"] == found["strided.exp_avg"] == (SS0, S0)
    assert (found["square.row"], found["square.flat"]) == ((S0, R), (R, R))
    assert (found["experts.row"], found["experts.column"]) == ((S0, S1), (S0, R))


def test_shapes_are_read_as_parts_of_the_parameters() -> None:
    """A shape may be read in several ways, in one, or in none."""
    assert match_axes((8, 1), (8, 6)) == [{0: 0}]
    assert match_axes((6,), (8, 6)) == [{1: 0}]
    assert match_axes((8,), (8, 8)) == [{0: 0}, {1: 0}]
    assert match_axes((5, 3), (5, 4, 3)) == [{0: 0, 2: 1}]
    assert match_axes((7,), (8, 6)) == []
    assert match_axes((2, 2, 2), (2, 2)) == []


def test_state_grows_where_its_axes_are_the_parameters_alone() -> None:
    """Where the old size stands at another axis, as in a square preconditioner, nothing grows in part."""
    shapes = {shape: resize_like("k", shape, (8, 6), (10, 6)) for shape in ((8, 6), (8, 1), (1, 6), (6, 6), (), (6,))}
    assert [*shapes.values()] == [(10, 6), (10, 1), (1, 6), (6, 6), (), (6,)]
    for shape in ((8, 8), (6, 8), (8,), (2, 8, 6)):
        with pytest.raises(ShapeMismatchError, match=r"which does not show the axis that grows"):
            resize_like("k", shape, (8, 6), (10, 6))


def _some_ranks(directory: Path) -> list[float]:
    """A mesh of the last two of three ranks; then those two load by themselves."""
    mesh = DeviceMesh("cpu", [1, 2])
    rank = dist.get_rank()
    param = DTensor.from_local(torch.zeros(4, 4) if rank else torch.zeros(0), mesh, [S0], run_check=False)
    slots = load(directory, {"w": param})["w"]
    for options in ({}, {"shard_factored": True}):
        slots = load(directory, {"w": param}, **options)["w"]
        for slot in ("exp_avg", "row", "column"):
            assert isinstance(slots[slot], DTensor)
            assert slots[slot].shape == _state((8, 4))[slot].shape
    group = dist.new_group([1, 2])
    if not rank:
        assert slots["exp_avg"].to_local().numel() == 0
        return []
    again = load(directory, {"w": param}, process_group=group)["w"]
    assert torch.equal(again["exp_avg"].to_local(), slots["exp_avg"].to_local())
    return slots["exp_avg"].to_local()[:, 0].tolist()  # type: ignore[no-any-return]


def test_ranks_outside_a_mesh_hold_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Where a mesh has some of the ranks, these get their parts, others an empty one; a subgroup can load alone."""
    _save(tmp_path / "ckpt", {"w": (8, 4)})

    rows = values((8, 4))[:, 0].tolist()
    assert ranks.run(3, _some_ranks, tmp_path / "ckpt") == [[], rows[:4], rows[4:]]


def _torch_sharded(kind: str, directory: Path) -> None:
    param, expected = MAKERS[kind](torch.zeros(SHAPE)), MAKERS[kind](values(SHAPE))
    slots = load(directory, {"w": param})["w"]
    moment = slots["exp_avg"]
    assert isinstance(moment, ShardedTensor)
    assert moment.dtype == torch.float64
    assert moment.metadata().shards_metadata == param.metadata().shards_metadata
    pairs = list(zip(local_tensors(moment), local_tensors(expected), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(slots["row"], _state(SHAPE)["row"])
    dist_checkpointing.save(to_sharded_state_dict({"again": moment}), directory.with_name("again"))


@pytest.mark.parametrize(("kind", "count"), [("rows", 3), ("nested", 4), ("hybrid", 4)])
def test_state_of_torchs_sharded_tensors(ranks: Ranks, tmp_path: Path, kind: str, count: int) -> None:
    """Several local shards or none, one inside another, a group of some ranks: state has the parameter's shards."""
    _save(tmp_path / "ckpt", {"w": SHAPE})
    ranks.run(count, _torch_sharded, kind, tmp_path / "ckpt")

    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path / "again")["again"], values(SHAPE))


def _refused(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    placement = Partial() if dist.get_rank() else S0
    local = torch.zeros(8, 4) if dist.get_rank() else torch.zeros(4, 4)
    param = DTensor.from_local(local, mesh, [placement], run_check=False)
    load(directory, {"w": param})


def test_a_partial_parameter_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A placement of which nothing can be stored, on one rank, is the same error on every rank."""
    _save(tmp_path / "ckpt", {"w": (8, 4)})
    outcomes = ranks.outcomes(2, _refused, tmp_path / "ckpt")

    assert len({outcome.message for outcome in outcomes}) == 1
    assert "optimizer.state.w.exp_avg" in outcomes[0].message
    assert "Partial" in outcomes[0].message


def test_state_of_a_part_of_a_parameter_is_refused(tmp_path: Path) -> None:
    """A rank's own experts as a plain parameter do not get the state of all experts."""
    _save(tmp_path / "ckpt", {"w": (8, 4, 2)})
    with pytest.raises(ShardingError, match=r"has the shape \(8, 4, 2\), its parameter \(2, 4, 2\)"):
        load(tmp_path / "ckpt", {"w": torch.zeros(2, 4, 2)})


def test_state_of_plain_parameters_is_plain(tmp_path: Path) -> None:
    """Without torch.distributed state is whole, of whatever shape, and of its own dtype."""
    _save(tmp_path / "ckpt", {"w": (8, 4), "scalar": ()})
    found = load(tmp_path / "ckpt", {"w": torch.zeros(8, 4, dtype=torch.bfloat16), "scalar": torch.zeros(())})

    for name, shape in (("w", (8, 4)), ("scalar", ())):
        for slot, expected in _state(shape).items():
            assert type(found[name][slot]) is torch.Tensor
            assert torch.equal(found[name][slot], expected)


def test_many_pieces_of_a_tensor_are_put_together(ranks: Ranks, tmp_path: Path) -> None:
    """What other ranks stored as columns is read as rows: each of them reads from every piece."""
    shards = [
        OurShardedTensor.from_rank_offsets("optimizer.state.w.exp_avg", values((8, 6))[:, 2 * n : 2 * n + 2], (1, n, 3))
        for n in range(3)
    ]
    dist_checkpointing.save({"a": shards}, tmp_path / "ckpt")
    found = ranks.run(4, _rows_of, tmp_path / "ckpt")

    assert torch.equal(torch.cat(found), values((8, 6)))


def _rows_of(directory: Path) -> torch.Tensor:
    param = distribute_tensor(torch.zeros(8, 6), init_device_mesh("cpu", (4,)), [S0])
    return load(directory, {"w": param})["w"]["exp_avg"].to_local()  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_model", [True, False])
@pytest.mark.parametrize("sharded", [True, False], ids=["DTensor", "plain"])
def test_state_of_another_shape_than_its_parameter_is_refused(
    ranks: Ranks, tmp_path: Path, has_model: bool, sharded: bool
) -> None:
    """A moment that was saved for a parameter of another shape is an error at load, not at the first step."""
    saved: dict[str, Any] = {"optimizer": {"state": {"weight": {"exp_avg": torch.zeros(10, 6)}}}}
    if has_model:
        saved["model"] = {"weight": torch.zeros(10, 6)}
    dist_checkpointing.save(to_sharded_state_dict(saved), tmp_path)
    expected = r"'optimizer.state.weight.exp_avg' has the shape \(10, 6\), its parameter \(12, 6\)"
    with pytest.raises(RankError, match=expected):
        ranks.run(2, _load_another_shape, tmp_path, sharded)


def _load_another_shape(directory: Path, sharded: bool) -> None:
    param = torch.zeros(12, 6)
    if sharded:
        param = distribute_tensor(param, init_device_mesh("cpu", (2,)), [S0], src_data_rank=None)
    load_sharded_optimizer_state_dict({"weight": param}, "optimizer", directory)


def test_state_that_never_had_the_shape_of_its_parameter_loads(tmp_path: Path) -> None:
    """Preconditioners, quantization blocks and factors are given out in the shape in which they were saved."""
    slots = {
        "left": torch.zeros(12, 12),
        "right": torch.zeros(6, 6),
        "blocks": torch.zeros(3),
        "grid": torch.ones(4, 3),
    }
    saved = {"model": {"weight": torch.zeros(12, 6)}, "optimizer": {"state": {"weight": slots}}}
    dist_checkpointing.save(to_sharded_state_dict(saved), tmp_path)
    found = load(tmp_path, {"weight": torch.zeros(12, 6)})["weight"]
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in slots.items()}
