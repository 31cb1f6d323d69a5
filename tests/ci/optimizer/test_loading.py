"""What is loaded, in which form, from whom; and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from tests.adapters.models import Stage, made_model
from tests.logs import collect_warnings
from tests.optimizer.loading import train_steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def _stages(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Two stages are saved, each with an optimizer of its own; then loaded cut at another place, with one left out."""
    rank = dist.get_rank()
    part = Stage(made_model(1, 4), [rank * 2, rank * 2 + 1])
    optimizer = torch.optim.Adam([p for p in part.parameters() if p.requires_grad], lr=0.1 * (rank + 1))
    train_steps(part, optimizer, steps=rank + 1)
    dist_checkpointing.save(to_sharded_state_dict(part, optimizer), directory)
    with collect_warnings() as heard:
        other = get_model_state_dict(Stage(made_model(1, 4), [0] if rank == 0 else [1, 2]))
        found = load_sharded_optimizer_state_dict(other, "optimizer", directory)["optimizer"]
        several = get_model_state_dict(Stage(made_model(1, 4), [rank, rank + 2]))
        load_sharded_optimizer_state_dict(several, "optimizer", directory)
    lrs = {param: group["lr"] for group in found["param_groups"] for param in group["params"]}
    steps = {name: slots["step"].item() for name, slots in found["state"].items()}
    return {name: (lrs[name], step) for name, step in steps.items()}, heard


def test_pipeline_stages_load_what_is_theirs(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Each rank gets the state of its layers, wherever they were; of what no rank has, one rank warns by name."""
    (first, warned), (second, silent) = gloo_ranks.run(2, _stages, tmp_path / "ckpt")

    names = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert first == {f"0.{name}": (0.1, 1.0) for name in names}
    early, late = {f"1.{name}": (0.1, 1.0) for name in names}, {f"2.{name}": (0.2, 2.0) for name in names}
    assert second == early | late
    assert len(warned) == 1
    assert "state.3.up.weight.exp_avg" in warned[0]
    assert "state.2." not in warned[0]
    assert silent == []
