"""The seeds' functions under their names: what they are for, and the faults that they had."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shardckpt.compat.mindspeed import (
    EPLoadPlanner,
    create_default_local_load_plan_with_moe,
)
from tests.ep.checkpoints import store
from tests.ep.live import (
    FQN,
    Case,
    Meshes,
    check,
    expected,
    order,
    state,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


EFSDP = [
    Case(order(("efsdp", 2), ("ep", 2)), fsdp_dim=0),
    Case(order(("ep", 2), ("efsdp", 2)), fsdp_dim=1),
    Case(order(("ep", 4), ("efsdp", 1)), fsdp_dim=1),
    Case(order(("ep", 2), ("replicate", 2)), kind="local"),
]


def _load_by_rank(folder: Path, *, experts: int) -> int:
    meshes, count = Meshes(), 0
    for path in sorted(folder.iterdir()):
        for case in EFSDP:
            case = Case(case.sizes, case.fsdp_dim, experts, kind=case.kind)  # noqa: PLW2901
            mesh = meshes.of(case)
            held = state(case, mesh, empty=True)
            ep_rank, ep_size = mesh.get_local_rank("ep"), case.size("ep")
            is_expert = {
                f"model.{FQN}",
                *(f"optimizer.state.{FQN}.{slot}" for slot in ("exp_avg", "step")),
            }.__contains__
            dcp.load(held, checkpoint_id=path, planner=EPLoadPlanner(ep_rank, ep_size, is_expert))
            check(case, mesh, held)
            held = state(case, mesh, empty=True)
            option = _Option(ep_rank, None if experts % ep_size == 0 else ep_size, is_expert)
            dcp.load(held, checkpoint_id=path, planner=option)
            check(case, mesh, held)
            count += 1
    return count


class _Option(DefaultLoadPlanner):
    """DCP's own planner with the plan as an explicit option."""

    def __init__(self, ep_rank: int, ep_size: int | None, is_expert: Any) -> None:
        super().__init__()
        self.ep_rank, self.ep_size, self.check_moe_fn = ep_rank, ep_size, is_expert

    def create_local_plan(self) -> Any:
        assert self.metadata is not None
        return create_default_local_load_plan_with_moe(
            self.check_moe_fn, self.ep_rank, self.state_dict, self.metadata, ep_size=self.ep_size
        )


def test_the_seeds_planner_loads_any_chunks_by_rank(ranks: Ranks, tmp_path: Path) -> None:
    """By ep_rank and ep_size alone: several stored chunks, FSDP along the experts, uneven counts, optimizer state."""
    for dim in (0, 1):
        for pieces in (1, 3, 7):
            store(tmp_path / "even" / f"{dim}-{pieces}", expected(8), pieces, dim)
            store(tmp_path / "uneven" / f"{dim}-{pieces}", expected(5), pieces, dim)

    assert ranks.run(4, partial(_load_by_rank, experts=8), tmp_path / "even") == [24] * 4
    assert ranks.run(4, partial(_load_by_rank, experts=5), tmp_path / "uneven") == [24] * 4
