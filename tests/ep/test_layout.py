"""Layouts: what a rank's tensor must look like, and which meshes are refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from shardckpt.compat.mindspeed import restore_ep_dim
from shardckpt.errors import ShardingError
from shardckpt.planning.boxes import Box
from shardckpt.planning.placements import HeldBox, Split
from shardckpt_ep import ExpertLayout, gather_experts_per_rank
from tests.ep.live import from_local, mesh_of
from tests.tables import table

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _boxes_of_two_axes(names: tuple[str, str]) -> Any:
    mesh = mesh_of((names[0], 2), (names[1], 2))
    tensor = torch.zeros(4, 3, 5)
    found = ExpertLayout.from_local(tensor, mesh, fsdp_dim=1, name="w1")
    return found.global_shape, found.pieces()


@pytest.mark.parametrize("names", [("efsdp", "ep"), ("ep", "ep_fsdp")])
def test_the_mesh_is_read_by_names_in_either_order(ranks: Ranks, names: tuple[str, str]) -> None:
    """Which experts a rank has depends on its coordinate under the name, not on the order of the dimensions."""
    found = ranks.run(4, _boxes_of_two_axes, names)

    assert {shape for shape, _ in found} == {(8, 6, 5)}
    starts = [pieces[0].box.offset for _, pieces in found]
    first = [(0, 0, 0), (4, 0, 0), (0, 3, 0), (4, 3, 0)]
    assert starts == (first if names[1] == "ep" else [first[0], first[2], first[1], first[3]])


def _both_on_one_axis() -> Any:
    mesh = mesh_of(("efsdp", 2), ("ep", 2))
    return ExpertLayout.from_local(torch.zeros(2, 3), mesh, fsdp_dim=0, name="w1").pieces()[0].box.offset[0]


def test_experts_are_cut_first_and_fsdp_inside(ranks: Ranks) -> None:
    """Where both cut the same axis, a rank of the inner mesh dimension has neighbours of its own experts."""
    assert ranks.run(4, _both_on_one_axis) == [0, 4, 2, 6]


def _gathered() -> Any:
    mesh = mesh_of(("replicate", 2), ("ep", 2))
    experts = 1 + 3 * mesh.get_local_rank("ep")
    counts = gather_experts_per_rank(experts, mesh)
    found = ExpertLayout.from_local(torch.zeros(experts, 2), mesh, experts_per_rank=counts)
    return counts, found.global_shape, found.pieces()[0].box, found.replica


def test_uneven_counts_are_gathered_along_the_expert_dimension(ranks: Ranks) -> None:
    """Ranks tell each other how many experts they have, and replicas are named by the other dimensions."""
    few, many = Box((0, 0), (1, 2)), Box((1, 0), (4, 2))

    assert ranks.run(4, _gathered) == [
        ((1, 4), (5, 2), few, (0,)),
        ((1, 4), (5, 2), many, (0,)),
        ((1, 4), (5, 2), few, (1,)),
        ((1, 4), (5, 2), many, (1,)),
    ]


def _wrong_mesh(how: str) -> None:
    live = mesh_of(("efsdp", 2), ("ep", 2))
    wrong = mesh_of(("ep", 2), ("efsdp", 2))  # made anew from sizes, as seeds do
    efsdp = from_local(torch.zeros(4, 3), live["efsdp"], [Shard(1)], (4, 6))
    if how == "efsdp":
        ExpertLayout.from_efsdp(efsdp, wrong, name="w1")
    elif how == "restore":
        restore_ep_dim(efsdp, wrong)
    elif how == "restore, shape given":
        restore_ep_dim(efsdp, wrong, global_shape=(8, 6))
    elif how == "alone":
        ExpertLayout.from_efsdp(efsdp, wrong["ep"], name="w1")
    else:
        local = torch.zeros((1, 4)[live.get_local_rank("ep")], 3)
        ExpertLayout.from_local(local, wrong, experts_per_rank=(1, 4), name="w1")


@pytest.mark.parametrize("how", ["efsdp", "restore", "restore, shape given", "alone"])
def test_a_mesh_of_other_ranks_is_an_error_on_every_rank(ranks: Ranks, how: str) -> None:
    """The mesh that a DTensor lies on contradicts one made anew from sizes: refused, never a permutation."""
    for outcome in ranks.outcomes(4, _wrong_mesh, how):
        assert outcome.kind == ShardingError.__name__
        assert re.search(
            r"own mesh has ranks \[.*pass the mesh that the model was sharded on, not a new one", outcome.message
        )


def test_a_plain_tensor_of_another_length_than_its_place_is_refused(ranks: Ranks) -> None:
    """Ranks 1 and 2 change places in a wrong mesh; where their experts are not as many, each says so."""
    outcomes = ranks.outcomes(4, _wrong_mesh, "plain")

    assert [outcome.kind if outcome else None for outcome in outcomes] == [None, "ShardingError", "ShardingError", None]
    assert "'w1': this rank's tensor has shape (4, 3), but by the mesh it should have (1, 3)" in outcomes[1].message


def _refused(kind: str) -> None:
    mesh = mesh_of(("ep", 2))
    tensor = torch.zeros(2, 3)
    if kind == "no name":
        nameless = init_device_mesh("cpu", (2,))
        dist.barrier()
        ExpertLayout.from_local(tensor, nameless)
    elif kind == "no dimension":
        ExpertLayout.from_local(tensor, mesh, ep="expert")
    elif kind == "counts":
        ExpertLayout.from_local(tensor, mesh, experts_per_rank=(2, 2, 2))
    elif kind == "shape":
        ExpertLayout.from_local(tensor, mesh, experts_per_rank=(2, 2), global_shape=(5, 3))
    elif kind == "axis":
        ExpertLayout.from_local(tensor, mesh, expert_dim=2)
    else:
        partial = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
        ExpertLayout.from_dtensor(partial, name="w1")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no name", r"must be called 'ep', and 0 of its dimensions without names are"),
        ("no dimension", r"must be called 'expert', and 0 of \('ep',\) are"),
        ("counts", r"experts_per_rank=\[2, 2, 2\] has 3 counts, the expert-parallel dimension 2 ranks"),
        ("shape", r"global_shape \(5, 3\) does not fit this rank's \(2, 3\) and experts_per_rank=\[2, 2\]"),
        ("axis", r"shape \(2, 3\) has no axis 2"),
        ("partial", r"'w1' has the placement Partial.*still to be reduced"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(ranks: Ranks, kind: str, reason: str) -> None:
    """A layout that cannot be made is a ShardingError that says what does not fit."""
    for outcome in ranks.outcomes(2, _refused, kind):
        assert outcome.kind == ShardingError.__name__
        assert re.search(reason, outcome.message)


def _numbers() -> list[str]:
    mesh, tensor = mesh_of(("ep", 2)), torch.zeros(2, 3)
    for counts in (torch.tensor([2, 2]), np.array([2, 2])):
        shape = ExpertLayout.from_local(tensor, mesh, experts_per_rank=counts).global_shape  # type: ignore[arg-type]
        assert [*map(type, shape)] == [int, int]
    options: list[dict[str, Any]] = [
        {"experts_per_rank": 2},
        {"experts_per_rank": [2.0, 2.0]},
        {"global_shape": 4},
        {"global_shape": ("4", "3")},
        {"expert_dim": None},
        {"fsdp": "ep", "fsdp_dim": 1.0},
    ]
    found = []
    for each in options:
        with pytest.raises(ShardingError) as caught:
            ExpertLayout.from_local(tensor, mesh, **each)
        found.append(str(caught.value).partition(": ")[2])
    return found


def test_what_is_no_number_is_refused_by_name(ranks: Ranks) -> None:
    """Sizes and axes are integers, also numpy's and torch's; a layout has none of a float, a text or None."""
    for found in ranks.run(2, _numbers):
        assert found == [
            "experts_per_rank=2 is no sequence of integers",
            "experts_per_rank=[2.0, 2.0] is no sequence of integers",
            "global_shape=4 is no sequence of integers",
            "global_shape=('4', '3') is no sequence of integers",
            "axis None is no integer",
            "axis 1.0 is no integer",
        ]


ROWS = ExpertLayout((8, 6, 4), Box((2, 0, 0), (2, 6, 4)), (Split(1, 2, 1),))


def test_state_of_the_parameters_shape_lies_as_the_parameter() -> None:
    """exp_avg and its like have the parameter's own layout."""
    assert ROWS.local_shape == (2, 3, 4)
    assert ROWS.get_state_layout((2, 3, 4)) is ROWS


def test_state_reduced_along_an_axis_that_nobody_cuts_has_a_layout() -> None:
    """Adafactor's row statistics have an extent of 1 along the last axis, and are cut as the parameter is."""
    rows = ROWS.get_state_layout((2, 3, 1))

    assert rows is not None
    assert rows.global_shape == (8, 6, 1)
    assert rows.pieces() == [HeldBox(Box((2, 3, 0), (2, 3, 1)), (0, 0, 0))]


@table("shape", [(2, 1, 4), (1, 3, 4), (), (1,), (2, 3), (2, 3, 5)])
def test_state_that_ranks_cannot_share_has_none(shape: tuple[int, ...]) -> None:
    """Reduced along a cut axis, or over experts, or of other axes: no box of a whole tensor."""
    assert ROWS.get_state_layout(shape) is None
