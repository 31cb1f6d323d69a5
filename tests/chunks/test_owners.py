from __future__ import annotations

import torch

from benchmarks.simulation.index_parts import make_plan, move_plan
from shardckpt.chunks import merge_by_owners, merge_plans
from shardckpt.chunks.owners import SpecsByPart, route_rows
from shardckpt.distributed import Comm
from shardckpt.distributed.routing import DIRECT_RANKS, Grid, place_owner
from shardckpt.storage import Columns


def test_parts_have_what_one_merge_has() -> None:
    """The tensors of all parts, with their boxes and locations, are those that the main rank would merge."""
    plan = make_plan(0, 1, 23)
    whole = merge_plans([plan])
    found = merge_by_owners(plan, 5, Comm(alone=True))
    assert found.rest is not None
    assert found.rest.files == whole.files
    assert sorted(key for part in found.parts.values() for key in part.keys) == sorted(whole.keys)
    assert len(found.parts) > 2
    for part in found.parts.values():
        for number, key in enumerate(part.keys):
            place = whole.keys.index(key)
            assert (part.dtypes[number], part.shapes[number]) == (whole.dtypes[place], whole.shapes[place])
            mine, theirs = slice(*part.bounds[number : number + 2]), slice(*whole.bounds[place : place + 2])
            assert torch.equal(part.boxes.extent[mine], whole.boxes.extent[theirs])
            assert torch.equal(part.locations[mine], whole.locations[theirs])


def test_a_rank_sends_each_box_once() -> None:
    """All rows of a plan are routed, none of them twice, with the numbers that its files have among all ranks'."""
    plan = move_plan(make_plan(0, 9, 50), 4)
    routed = route_rows(plan, 4, SpecsByPart(plan, 7))
    places = torch.cat([Columns(data, "a test").integers("place") for data in routed.values()])
    expected = Columns(plan.locations, "a test").integers("boxes")[:, 1]
    assert places[:, 0].unique().tolist() == [4]
    assert places[:, 1].sort().values.tolist() == expected.sort().values.tolist()


def test_owners_share_no_column() -> None:
    """Of 16,384 ranks the owners of 125 parts have rows and columns of their own; few ranks own several parts each."""
    width = Grid(1 << 14, DIRECT_RANKS).width
    owners = [place_owner(number, 1 << 14) for number in range(125)]
    assert len({owner % width for owner in owners}) == len({owner // width for owner in owners}) == 125
    assert {place_owner(number, 3) for number in range(9)} == {0, 1, 2}
    assert {place_owner(number, 1) for number in range(9)} == {0}
