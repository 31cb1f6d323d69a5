"""The seeds' functions under their names: what they are for, and the faults that they had."""

from __future__ import annotations

import dataclasses
import re
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt_ep
from shardckpt.compat.mindspeed import (
    EPLoadPlanner,
    build_ep_fqn2spec_info,
    create_default_local_load_plan_with_moe,
    drop_ep_dim,
    empty_cache,
    get_check_moe_func,
    get_chunk_readitem,
    restore_ep_dim,
    synchronize,
)
from shardckpt.errors import CheckpointingException, ShapeMismatchError, ShardingError
from shardckpt_ep import expert_layouts, expert_parameters
from shardckpt_ep.torch_private import StridedShard
from shardckpt_torch_dist import CheckpointStorageReader
from tests.ep.live import (
    Meshes,
    all_cases,
    from_local,
    get_local_tensor,
    live,
    mesh_of,
    whole,
)
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from tests.ranks import Ranks


def _there_and_back() -> int:
    meshes, count = Meshes(), 0
    for case in all_cases():
        if case.counts or (case.kind == "local" and case.size("efsdp") > 1):
            continue
        mesh, full = meshes.of(case), whole(case.experts)
        held = live(case, mesh, full)
        for given in (None, full.shape):
            restored = restore_ep_dim(held, mesh, global_shape=given)
            dropped = drop_ep_dim(restored, mesh)
            assert restored.shape == full.shape, case
            cut = distribute_tensor(full, mesh, restored.placements, src_data_rank=None)
            assert torch.equal(get_local_tensor(cut), get_local_tensor(restored)), case
            assert get_local_tensor(restored).data_ptr() == get_local_tensor(held).data_ptr(), case
            if case.kind == "two meshes":
                assert restored is held, case
            else:
                assert type(dropped) is type(held), case
                assert get_local_tensor(dropped).data_ptr() == get_local_tensor(held).data_ptr(), case
            if case.kind == "efsdp":
                assert (dropped.placements, dropped.shape) == (held.placements, held.shape), case
                assert dropped.device_mesh == held.device_mesh, case
            count += 1
    return count


def test_restore_gives_all_experts_in_true_order_and_drop_undoes_it(ranks: Ranks) -> None:
    """For both orders, both axes, even and uneven: torch cuts the whole tensor likewise, and the way back is exact."""
    assert ranks.run(4, _there_and_back) == [144] * 4


def _refused(how: str) -> None:
    mesh = mesh_of(("efsdp", 2), ("ep", 2))
    if how == "uneven":
        restore_ep_dim(torch.zeros(1 + 3 * mesh.get_local_rank("ep"), 3), mesh)
    elif how == "length":
        restore_ep_dim(torch.zeros(4, 3), mesh, global_shape=(5, 3))
    elif how == "outside":
        restore_ep_dim(torch.zeros(4, 3), mesh_of(("ep", 1)))
    else:
        other = mesh_of(("ep", 2), ("efsdp", 2))
        drop_ep_dim(from_local(torch.zeros(4, 3), mesh, [Shard(1), Shard(0)], (8, 6)), other)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("uneven", r"experts are assigned over .* in a way that no DTensor describes .* use an ExpertLayout"),
        ("length", r"this rank's tensor has shape \(4, 3\), but by the mesh it should have \([32], 3\)"),
        ("outside", r"this rank is not in the mesh \('ep',\)"),
        ("drop", r"the tensor is on the mesh \('efsdp', 'ep'\) of ranks .*, not on \('ep', 'efsdp'\)"),
    ],
)
def test_what_no_dtensor_describes_is_refused(ranks: Ranks, how: str, reason: str) -> None:
    """Counts other than torch.chunk's, other lengths and other meshes are errors, never a permutation."""
    outcomes = ranks.outcomes(4, _refused, how)
    for outcome in outcomes[1:] if how == "outside" else outcomes:
        assert outcome.kind == ShardingError.__name__
        assert re.search(reason, outcome.message)


def _with_axes() -> None:
    mesh = mesh_of(("ep", 2), ("efsdp", 2))
    held = from_local(torch.zeros(4, 1, 3), mesh["efsdp"], [Shard(1)], (4, 2, 3))
    for count in (0, -3):
        restored = restore_ep_dim(held, mesh, expert_dim=count)
        dropped = drop_ep_dim(restored, mesh, expert_dim=count)
        assert (restored.shape, dropped.shape) == ((8, 2, 3), (4, 2, 3))
    for call in (lambda: restore_ep_dim(torch.tensor(1.0), mesh), lambda: drop_ep_dim(restored, mesh, expert_dim=3)):
        with pytest.raises(ShardingError, match=r"expert_dim=[03]: a tensor of shape .* has no such axis"):
            call()


def test_the_axis_of_experts_may_be_counted_from_the_end(ranks: Ranks) -> None:
    """A negative axis is restored and dropped; one that a tensor lacks, as the step of an optimizer, is named."""
    ranks.run(4, _with_axes)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ParameterDict({"w1": torch.zeros(4, 6), "w1_bias": torch.zeros(4, 2)})
        self.gate = torch.nn.Linear(2, 2, bias=False)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.ModuleList([torch.nn.ModuleDict({"_orig_mod": _Block()}) for _ in range(2)])


def _places() -> list[str]:
    model, mesh = _Block(), mesh_of(("ep", 2))
    found = [" ".join(expert_layouts(model, mesh, places)) for places in ("experts", ["exp*"], ())]
    with pytest.raises(ShardingError, match=r"in a module at 'expert', 'block\.experts'"):
        expert_layouts(model, mesh, ["expert", "block.experts"])
    with pytest.raises(ShardingError, match=r"in a module at 'mtp\.experts'; its modules are experts, gate"):
        expert_layouts(model, mesh, ["experts", "mtp.experts"])
    # a trainer's plan is one list for all pipeline stages
    assert [name for name, _ in expert_parameters(model, ["experts", "mtp.experts"], each=False)] == found[0].split()
    with pytest.raises(ShardingError, match=r"in a module at 'mtp\.experts'"):
        get_check_moe_func(model, ["mtp.experts"])
    assert get_check_moe_func(model, ["experts", "mtp.experts"])("experts.w1")
    return found


def test_places_of_experts_are_found_or_named(ranks: Ranks) -> None:
    """A place may be given alone; one where there are no experts is an error, not a model without experts."""
    both = "experts.w1 experts.w1_bias"
    assert ranks.run(2, _places) == [[both, both, ""]] * 2


def _model_on_meshes() -> Any:
    mesh = mesh_of(("efsdp", 2), ("ep", 2))
    model = _Model()
    for block in model.trunk:
        w1 = from_local(torch.zeros(4, 6), mesh["efsdp"], [Shard(0)], (8, 6))
        block["_orig_mod"].experts["w1"] = torch.nn.Parameter(w1)
    before = len(dist.distributed_c10d._world.pg_map)
    spec = build_ep_fqn2spec_info(model, mesh, ["trunk.*.experts"])
    groups = len(dist.distributed_c10d._world.pg_map) - before
    assert {info.placement for info in spec.values()} == {Shard(0)}
    texts = {name: f"({', '.join(map(str, info.placements or ()))})" for name, info in spec.items()}
    layouts = {name: layout.global_shape for name, layout in expert_layouts(model, mesh, ["experts"]).items()}
    keys = (
        "trunk.0.experts.w1",
        "optimizer.state.trunk.1.experts.w1.exp_avg",
        "model.trunk.0._orig_mod.experts.w1",
        "app.model.trunk.0.experts.w1",
        "experts.w1",
        "mytrunk.0.experts.w1",
        "trunk.0.gate.weight",
    )
    return texts, groups, layouts, list(map(get_check_moe_func(model), keys))


def test_specs_and_checks_go_by_exact_names_at_any_module_path(ranks: Ranks) -> None:
    """Wrappers do not count, modules before the name neither, optimizer keys are known, no process group is made."""
    for spec, groups, layouts, checks in ranks.run(4, _model_on_meshes):
        assert spec == {
            "trunk.0.experts.w1": "(_S(0, 2), S(0))",
            "trunk.0.experts.w1_bias": "(R, S(0))",
            "trunk.1.experts.w1": "(_S(0, 2), S(0))",
            "trunk.1.experts.w1_bias": "(R, S(0))",
        }
        assert groups == 0
        assert layouts == {name: (16, 6) if name.endswith("w1") else (8, 2) for name in spec}
        assert checks == [True, True, True, True, False, False, False]


def test_plain_experts_are_found_by_their_modules() -> None:
    """Without FSDP the parameters are plain tensors; the plan of modules names them, and a typo in it is refused."""
    check_ = get_check_moe_func(_Model(), ["trunk.*.experts"])

    assert check_("trunk.1.experts.w1_bias")
    assert not check_("trunk.1.gate.weight")
    assert not get_check_moe_func(_Model())("trunk.1.experts.w1")
    assert get_check_moe_func(_Model(), _Plan("trunk.{*}.experts"))("trunk.1.experts.w1")
    with pytest.raises(ShardingError, match="in a module at 'exprets'"):
        get_check_moe_func(_Model(), ["exprets"])


def test_a_tensor_of_neither_length_is_refused() -> None:
    """What is as long neither as the rank's part nor as the whole is an error, where the seed skipped the check."""
    stored = _stored((8, 6), [((0, 0), (8, 6))])
    given = {"state_dict": {"w1": torch.zeros(3, 6)}, "metadata": metadata.Metadata({"w1": stored})}

    with pytest.raises(ShapeMismatchError, match=r"rank 0 of 2 has \(4, 6\) of it; the tensor .* has \(3, 6\)"):
        create_default_local_load_plan_with_moe(lambda _: True, 0, **given, ep_size=2)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"different numbers of experts, .* pass ep_size="):
        create_default_local_load_plan_with_moe(lambda _: True, 0, **given)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="there is no ep_rank 2 of 2"):
        create_default_local_load_plan_with_moe(lambda _: True, 2, **given, ep_size=2)  # type: ignore[arg-type]


def test_a_missing_key_is_refused_where_strict() -> None:
    """Strict plans need every key; others leave it out."""
    state_dict, none = {"w1": torch.zeros(3)}, metadata.Metadata({})

    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: w1"):
        create_default_local_load_plan_with_moe(lambda _: True, 0, state_dict, none)
    assert not create_default_local_load_plan_with_moe(lambda _: True, 0, state_dict, none, strict=False).items


def _stored(shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
    described = [metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in chunks]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size(shape), described)


def _item(chunk: tuple[int, ...], offset: tuple[int, ...], lengths: tuple[int, ...]) -> ReadItem:
    index = metadata.MetadataIndex("w1", torch.Size(chunk), 0)
    sizes = torch.Size(offset), torch.Size(lengths)
    return ReadItem(LoadItemType.TENSOR, metadata.MetadataIndex("w1"), torch.Size((0, 0)), index, *sizes)


def test_an_item_moves_to_its_ranks_experts() -> None:
    """Of one stored chunk the offset moves; of several, the chunk that has the experts is read; bytes have none."""
    one = get_chunk_readitem(_item((0, 0), (0, 2), (2, 3)), 3, stored=_stored((8, 6), [((0, 0), (8, 6))]))
    two = _stored((8, 6), [((0, 0), (4, 6)), ((4, 0), (4, 6))])
    other = get_chunk_readitem(_item((0, 0), (0, 2), (2, 3)), 3, stored=two)
    half = get_chunk_readitem(_item((0, 0), (1, 0), (1, 6)), 3, stored=two, experts=2)

    assert one.storage_offsets == (6, 2)
    assert (other.storage_index.offset, other.storage_index.index, other.storage_offsets) == ((4, 0), 1, (2, 2))
    assert (half.storage_index.offset, half.storage_offsets) == ((4, 0), (3, 0))
    index, zero = metadata.MetadataIndex("lr"), torch.Size((0,))
    bytes_ = ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
    assert get_chunk_readitem(bytes_, 3, stored=_stored((8,), [])) is bytes_


@table("rank", [1, 3])
def test_an_item_that_leaves_its_chunk_is_refused(rank: int) -> None:
    """Experts in two stored chunks, or none, are an error: the seed read past the chunk."""
    stored = _stored((8, 6), [((0, 0), (4, 6)), ((4, 0), (4, 6))])

    with pytest.raises(ShardingError, match="lies in several stored chunks, or outside the stored tensor"):
        get_chunk_readitem(_item((0, 0), (0, 0), (3, 6)), rank, stored=stored)


@table("field", ["storage_offsets", "lengths", "dest_offsets"])
def test_an_item_of_different_axes_is_refused(field: str) -> None:
    """Offsets and lengths that are not of as many axes are the original's ValueError, with the numbers."""
    item = dataclasses.replace(_item((0, 0), (0, 0), (2, 3)), **{field: torch.Size((2,))})
    with pytest.raises(ValueError, match=f"'w1': the item has .*1 {field}.*; it needs one of each for every axis"):
        get_chunk_readitem(item, 1)


class _AsItWas(DefaultLoadPlanner):
    """A planner that moves each item by the original's own call."""

    def __init__(self, ep_rank: int) -> None:
        super().__init__()
        self.ep_rank = ep_rank

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Any = self.metadata.state_dict_metadata["w"]
        target = self.state_dict["w"]
        chunk = metadata.ChunkStorageMetadata(torch.Size((0, 0)), target.shape)
        items = create_read_items_for_chunk_list("w", stored, [chunk])
        return LoadPlan([get_chunk_readitem(readitem=item, ep_rank=self.ep_rank, operate_dim=0) for item in items])


def test_the_original_call_moves_items_within_a_chunk(tmp_path: Path) -> None:
    """get_chunk_readitem(item, ep_rank) reads a rank's rows of a stored tensor; past its chunk the reader refuses."""
    whole_ = torch.arange(24.0).reshape(8, 3)
    dcp.save({"w": whole_}, checkpoint_id=tmp_path)
    for rank in range(4):
        held = {"w": torch.zeros(2, 3)}
        dcp.load(held, checkpoint_id=tmp_path, planner=_AsItWas(rank))
        assert torch.equal(held["w"], whole_[2 * rank : 2 * rank + 2])
    for reader in (dcp.FileSystemReader(tmp_path), CheckpointStorageReader(tmp_path)):
        with pytest.raises((CheckpointException, CheckpointingException)):
            dcp.load({"w": torch.zeros(2, 3)}, storage_reader=reader, planner=_AsItWas(4))


def test_an_item_of_fsdps_part_needs_the_number_of_experts() -> None:
    """Of a part of a rank's experts the length does not say where the next rank's begin: refused, not read wrongly."""
    item = dataclasses.replace(
        _item((0, 0), (2, 0), (2, 6)), dest_index=metadata.MetadataIndex("w1", torch.Size((2, 0)), 0)
    )
    with pytest.raises(ShardingError, match="pass their number as experts="):
        get_chunk_readitem(item, 1)
    assert get_chunk_readitem(item, 1, experts=4).storage_offsets == (6, 0)


def test_the_planner_has_the_originals_defaults(tmp_path: Path) -> None:
    """EPLoadPlanner() loads everything as DCP does: no rank but 0, and no key is an expert's."""
    dcp.save({"w": torch.ones(4, 2)}, checkpoint_id=tmp_path)
    for planner in (EPLoadPlanner(), EPLoadPlanner(1, 2), EPLoadPlanner(ep_rank=0, ep_size=1, check_moe_fn=None)):
        held = {"w": torch.zeros(4, 2)}
        dcp.load(held, checkpoint_id=tmp_path, planner=planner)
        assert held["w"].eq(1).all()
    with pytest.raises(ShardingError, match="there is no ep_rank 1 of 1"):
        EPLoadPlanner(1)


@table("arguments", [{}, {"ep_rank": 0, "ep_size": 2, "check_moe_fn": bool}, {"layouts": {}, "ep_rank": 0}])
def test_the_planner_of_the_same_name_points_to_it(arguments: dict[str, Any]) -> None:
    """Who calls shardckpt_ep.EPLoadPlanner with the original's arguments is told where it is; so says its docstring."""
    with pytest.raises(ShardingError, match=r"import it from shardckpt\.compat\.mindspeed"):
        shardckpt_ep.EPLoadPlanner(**arguments)
    with pytest.raises(ShardingError, match=r"import it from shardckpt\.compat\.mindspeed"):
        shardckpt_ep.EPLoadPlanner(0, 2, bool)  # type: ignore[arg-type]
    assert "shardckpt.compat.mindspeed.EPLoadPlanner" in (shardckpt_ep.EPLoadPlanner.__doc__ or "")


def test_synchronize_and_empty_cache_run_without_an_accelerator() -> None:
    """Trainers call them around a save on any machine; what nothing refers to is freed."""
    ring = [torch.zeros(3)]
    ring.append(ring)  # type: ignore[arg-type]
    gone = weakref.ref(ring[0])
    del ring
    synchronize()
    empty_cache()
    assert gone() is None


class _State:
    """A trainer's parallel state: meshes as attributes, in dicts, and other things."""

    def __init__(self, **attributes: Any) -> None:
        self.ep_size = 2
        self.__dict__.update(attributes)


class _Plan:
    """A trainer's plan of expert parallelism."""

    def __init__(self, *apply_modules: str) -> None:
        self.apply_modules = list(apply_modules)


def _refusal(model: torch.nn.Module, parallel_state: Any, ep_plan: Any) -> str:
    try:
        build_ep_fqn2spec_info(model, parallel_state, ep_plan)
    except ShardingError as exc:
        return str(exc)
    return ""


def _specs_by_objects() -> Any:
    mesh, dense = mesh_of(("efsdp", 2), ("ep", 2)), mesh_of(("dp", 4))
    model = _Model()
    infos = build_ep_fqn2spec_info(model, mesh, ["trunk.*.experts"])
    one = _State(dp_mesh=dense, ep_fsdp_device_mesh=mesh, ep_mesh=mesh["ep"])
    other = _State(meshes={"dense": dense, "ep": mesh})
    plans: list[Any] = [_Plan("trunk.{*}.experts"), ["trunk.{*}.experts"], "experts"]
    found = [build_ep_fqn2spec_info(model, each, plan) for each in (one, other) for plan in plans]
    wrapped = torch.nn.ModuleDict({"model": model})
    outer = build_ep_fqn2spec_info(wrapped, parallel_state=one, ep_plan=_Plan("model.trunk.{*}.experts"))
    refused = [
        (mesh, _Plan("model.layers.{*}.mlp.experts")),
        (mesh, "exprets"),
        (mesh, 3),
        (_State(), "experts"),
        (_State(dp_mesh=dense), "experts"),
        (_State(a=mesh, b=mesh_of(("ep", 2), ("efsdp", 2))), "experts"),
    ]
    same_names = [name.removeprefix("model.") for name in outer] == list(infos)
    return all(each == infos for each in found), same_names, [_refusal(model, *each) for each in refused]


def test_a_trainers_objects_are_understood(ranks: Ranks) -> None:
    """The parallel state is searched for its mesh, the plan for its patterns; what has none, or no match, is named."""
    reasons = [
        r"no parameter of the model is in a module at 'model.layers.\{\*\}.mlp.experts'; its modules are trunk.0",
        "in a module at 'exprets'",
        r"ep_plan=3: expected patterns of module names, such as 'layers.\{\*\}.mlp.experts'",
        "has 0 meshes with a dimension 'ep' among its attributes .no mesh at all.",
        r"has 0 meshes .*\(dp_mesh \('dp',\)\): pass the mesh",
        "has 2 meshes",
    ]
    for same, same_names, errors in ranks.run(4, _specs_by_objects):
        assert same
        assert same_names
        for reason, message in zip(reasons, errors, strict=True):
            assert re.search(reason, message), message


class _Lazy:
    def __init__(self, mesh: DeviceMesh) -> None:
        self._meshes = [mesh]

    @cached_property
    def ep_mesh(self) -> DeviceMesh:
        """Found at first use."""
        return self._meshes[0]


class _Tuple(NamedTuple):
    ep_mesh: DeviceMesh


@dataclasses.dataclass(slots=True)
class _Slots:
    ep_mesh: DeviceMesh


def _specs_of_classes() -> None:
    mesh, model = mesh_of(("ep", 2)), _Model()
    expected = build_ep_fqn2spec_info(model, mesh, "experts")
    states: list[Any] = [_Lazy(mesh), _Tuple(mesh), _Slots(mesh), {"ep": mesh, "size": 2}]
    assert [build_ep_fqn2spec_info(model, state, "experts") for state in states] == [expected] * 4


def test_a_mesh_is_found_in_any_class(ranks: Ranks) -> None:
    """The mesh of a parallel state may be a cached property, a slot, a field of a named tuple, or a value of a dict."""
    ranks.run(2, _specs_of_classes)


def _specs_by_axis() -> None:
    mesh, model = mesh_of(("efsdp", 2), ("ep", 2)), _Model()
    for block in model.trunk:
        held = from_local(torch.zeros(2, 6), mesh["efsdp"], [Shard(0)], (4, 6))
        block["_orig_mod"].experts["w1"] = torch.nn.Parameter(held)
    found, expected = (build_ep_fqn2spec_info(model, mesh, "experts", expert_dim=dim) for dim in (-2, 0))
    assert found == expected
    assert isinstance((found["trunk.0.experts.w1"].placements or ())[0], StridedShard)
    with pytest.raises(ShardingError, match=r"expert_dim=2: a tensor of shape \(4, 6\) has no such axis"):
        build_ep_fqn2spec_info(model, mesh, "experts", expert_dim=2)


def test_specs_of_a_negative_axis_are_the_same(ranks: Ranks) -> None:
    """The placements of experts on the axis -2 of 2 are those on 0: others would put parts at wrong offsets."""
    ranks.run(4, _specs_by_axis)


class _Layers(torch.nn.Module):
    """Twelve layers with one expert module each."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2, bias=False)}) for _ in range(12))
        self.layers = torch.nn.ModuleList(layers)


@table(
    ("pattern", "numbers"),
    [
        ("layers.{*}.experts", range(12)),
        ("layers.{0-5}.experts", range(6)),
        ("layers.{10}.experts", [10]),
        ("layers.{0,2-4,11}.experts", [0, 2, 3, 4, 11]),
        ("layers.{9-20}.experts", [9, 10, 11]),
        ("layers.1*.experts", [1, 10, 11]),
        ("layers.1{*}.experts", [1, 10, 11]),
        ("layers.1{0-5}.expert{*}", [10, 11]),
    ],
)
def test_braces_hold_the_numbers_of_layers(pattern: str, numbers: Sequence[int]) -> None:
    """A plan's {*}, {0-5} and {0,2-4} match the layers that they say, both ends of a range among them."""
    assert [name for name, _ in expert_parameters(_Layers(), pattern)] == [
        f"layers.{number}.experts.weight" for number in numbers
    ]
    check_moe = get_check_moe_func(_Layers(), _Plan(pattern))
    assert [n for n in range(12) if check_moe(f"layers.{n}.experts.weight")] == list(numbers)


@table("braces", ["{a}", "{}", "{1-}", "{*-3}", "{1;2}", "{5-2}", "{0,5-2}"])
def test_braces_that_hold_something_else_are_named(braces: str) -> None:
    """What no layer can match is an error by itself, even beside a pattern that matches."""
    with pytest.raises(ShardingError, match=re.escape(f"{braces} is neither {{*}} nor numbers")):
        get_check_moe_func(_Layers(), ["layers.0.experts", f"layers.{braces}.experts"])


def test_what_is_no_tensor_is_not_restored() -> None:
    """restore_ep_dim(3) says that 3 is no tensor; drop_ep_dim gives it back."""
    with pytest.raises(ShardingError, match="origin_tensor=3 is a int, not a tensor"):
        restore_ep_dim(3, None)  # type: ignore[arg-type]
    assert drop_ep_dim(3) == 3  # type: ignore[arg-type,comparison-overlap]


def _identities() -> Any:
    mesh = mesh_of(("efsdp", 2), ("ep", 2))
    plain = torch.zeros(2)
    efsdp = from_local(torch.zeros(2, 3), mesh["efsdp"], [Shard(1)], (2, 6))
    on_ep = DTensor.from_local(torch.zeros(2, 3), mesh["ep"], [Shard(0)], run_check=False)
    whole_ = restore_ep_dim(origin_tensor=torch.zeros(2, 3), device_mesh=mesh)
    dropped = drop_ep_dim(loaded_tensor=on_ep, device_mesh=mesh)
    with pytest.raises(ShardingError, match=r"the tensor is on the mesh \('ep',\)"):
        drop_ep_dim(on_ep, mesh_of(("ep", 2), ("efsdp", 2)))
    return (
        type(dropped) is torch.Tensor and torch.equal(dropped, on_ep.to_local()),
        tuple(whole_.shape) == (4, 3),
        drop_ep_dim(plain) is plain,
        drop_ep_dim(efsdp, mesh) is efsdp,
        type(drop_ep_dim(on_ep)) is torch.Tensor,
        restore_ep_dim(on_ep, mesh) is on_ep,
        whole_.placements == (Replicate(), Shard(0)),
        not any(isinstance(place, StridedShard) for place in whole_.placements),
    )


def test_what_needs_no_change_comes_back_as_it_is(ranks: Ranks) -> None:
    """What has nothing to drop or restore is itself; a tensor on a part of the mesh is dropped by the whole mesh."""
    assert ranks.run(4, _identities) == [(True,) * 8] * 4
