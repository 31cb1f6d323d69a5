"""What changes between two saves is never saved by the plan of the first."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.engine.plan_cache.saves import Plans, check, in_mode, save, tensor

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


pytestmark = pytest.mark.usefixtures("mode")


def _grown_on_one(folder: str) -> list[int]:
    rank = dist.get_rank()
    counts = []
    with Plans() as plans:
        for step, grown in enumerate((False, False, True, True, False, True)):
            state = {"w": tensor("w", torch.full((2,), 10.0 * step + rank), (0, rank, 2))}
            if grown and rank == 1:
                state["more"] = tensor("more", torch.full((3,), float(step)))
            save(state, f"{folder}/{step}")
            counts.append(plans.count)
            expected = {"w": torch.tensor([0.0, 0, 1, 1]) + 10 * step}
            check(f"{folder}/{step}", expected | ({"more": torch.full((3,), float(step))} if grown else {}))
    return counts


def test_a_change_on_one_rank_is_a_change_for_all(gloo_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """A key that one rank alone adds, or leaves out, makes all ranks plan anew."""
    assert gloo_ranks.run(2, in_mode, mode, _grown_on_one, str(tmp_path)) == [[1, 1, 2, 2, 3, 4]] * 2


def _common_differs(folder: str) -> bool:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardckpt").addHandler(handler)
    try:
        for step in range(2):
            rank = dist.get_rank()
            save({"w": tensor("w", torch.ones(1), replica_id=rank), "lr": rank * step}, f"{folder}/{step}")
    finally:
        logging.getLogger("shardckpt").removeHandler(handler)
    return any("common state differs" in text for text in heard)


def test_common_state_is_compared_every_time(gloo_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """A common state that has begun to differ is warned of, though the shards are those of the last save."""
    assert gloo_ranks.run(2, in_mode, mode, _common_differs, str(tmp_path)) == [False, True]
