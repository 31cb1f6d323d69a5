"""Saves of the same shards, again and again: planned once, with the values of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy
from tests import backends
from tests.engine.plan_cache.saves import Plans, in_mode, save, tensor
from tests.states import rank_and_size
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import RankPool, Ranks


def _state(rank: int, world: int, step: int) -> dict[str, Any]:
    """Every kind of shard: rows, layers before them, flattened ones, replicas, copies, objects, common state."""
    rows = torch.arange(12.0).view(3, 4) + 100 * rank + step
    flat = torch.arange(5.0) + step
    return {
        "rows": tensor("rows", rows, (0, rank, world)),
        "layers": [tensor("layers", rows[0] * 2, (0, rank, world), prepend_axis_num=1)],
        "columns": tensor("columns", rows.t(), (1, rank, world)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat[:2] if rank else flat[2:], (5,), flattened_range=slice(0, 2) if rank else slice(2, 5)
        )
        if world == 2
        else tensor("flat", flat),
        "half": tensor("half", torch.full((2, 3), step, dtype=torch.bfloat16), replica_id=rank),
        "copy": tensor("copy", torch.tensor(float(step)), replicated=True),
        "none": tensor("none", torch.zeros(0, 3), replica_id=rank),
        "big": tensor("big", torch.full((300_000,), float(step)), (0, rank, world)),
        "rng": ShardedObject("rng", {"seed": step, "rank": rank}, (world,), (rank,)),
        "number": PlainObject("number", step, replica_id=rank, replicated=True, keys=("number.a", "number.b")),
        "step": step,
    }


def _saved_each_way(folder: str, way: str, persistent: bool) -> int:
    """Four saves in flight; how many of them were planned in the long way."""
    with Plans() as plans, AsyncCallsQueue(persistent=persistent) as queue:
        for step in range(4):
            request = dc.save(_state(*rank_and_size(), step), f"{folder}/{step}", WAYS[way](), async_sharded_save=True)
            queue.schedule_async_request(request)  # type: ignore[arg-type]
    for step in range(4):
        _check_state(f"{folder}/{step}", step)
    return plans.count


def _saved_in_turn(folder: str, way: str) -> int:
    """Four saves, one after the other; how many of them were planned in the long way."""
    with Plans() as plans:
        for step in range(4):
            save(_state(*rank_and_size(), step), f"{folder}/{step}", WAYS[way]())
            _check_state(f"{folder}/{step}", step)
    return plans.count


def _check_state(path: str, step: int) -> None:
    wanted, expected = (_state(*rank_and_size(), values) for values in (-1, step))
    loaded = dc.load(wanted, path)
    assert loaded["step"] == step
    assert loaded["rng"] == expected["rng"].data
    for key in ("rows", "columns", "flat", "half", "copy", "none", "big"):
        assert torch.equal(loaded[key], expected[key].data), (key, step)
    assert torch.equal(loaded["layers"][0], expected["layers"][0].data)
    if backends.current().name == "torch_dist":
        stock = {"number.a": -1, "number.b": -1}
        dcp.load(stock, checkpoint_id=path, no_dist=True)
        assert stock == {"number.a": step, "number.b": step}


WAYS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "several files": lambda: backends.current().save_strategy(thread_count=2),
    "files by a hint": lambda: TorchDistSaveShardedStrategy(thread_count=2, separation_hint="rows"),
    "any replica": lambda: backends.current().save_strategy(keep_only_main_replica=False),
    "fully parallel": lambda: FullyParallelSaveStrategyWrapper(backends.current().save_strategy()),
    "ep": lambda: "ep",
}


#: The ways of each format.
EACH_WAY = pytest.mark.parametrize(
    ("way", "backend"),
    [
        *((way, "torch_dist") for way in WAYS if way != "several files"),
        ("default", "safetensors"),
        *(
            pytest.param(way, "safetensors", marks=pytest.mark.ci)
            for way in ("several files", "any replica", "fully parallel")
        ),
    ],
    indirect=["backend"],
    scope="module",
)


@EACH_WAY
@pytest.mark.parametrize("world", [2, *in_proof(1)])
def test_what_is_saved_again_is_planned_once(gloo_ranks: RankPool, tmp_path: Path, way: str, world: int) -> None:
    """Saves of the same shards with other values, by strategies made anew each time: one plan, four right contents."""
    assert gloo_ranks.run(world, in_mode, "background", _saved_each_way, str(tmp_path), way, False) == [1] * world


@EACH_WAY
@pytest.mark.parametrize("mode", ["in turn", *in_proof("foreground")])
def test_a_plan_serves_saves_here_and_behind(gloo_ranks: RankPool, tmp_path: Path, way: str, mode: str) -> None:
    """Saves in the foreground, and in the background before them, share a plan."""
    assert gloo_ranks.run(2, in_mode, mode, _saved_in_turn, str(tmp_path), way) == [1] * 2


@backends.both_in_proof
def test_another_process_writes_what_is_saved_again(ranks: Ranks, tmp_path: Path) -> None:
    """A plan that is used again serves the process that writes behind the training, too."""
    assert ranks.run(2, in_mode, "background", _saved_each_way, str(tmp_path), "default", True) == [1] * 2


@pytest.mark.usefixtures("mode")
def _saved_optimizer(folder: str) -> int:
    """Four saves of a model and its optimizer, each a step later at another rate; how many were planned."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    rates = []
    with Plans() as plans:
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2
            save(to_sharded_state_dict(model, optimizer), f"{folder}/{step}")
    for step in range(4):
        load_into(dc.load(to_sharded_state_dict(model, optimizer), f"{folder}/{step}"), model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.125, 0.0625]
    return plans.count


@backends.both_in_proof
@pytest.mark.parametrize("world", [2, *in_proof(1)])
def test_an_optimizer_is_planned_once(gloo_ranks: RankPool, tmp_path: Path, world: int) -> None:
    """A model with its optimizer, as training loops save it, is planned once, and each save has its own rates."""
    assert gloo_ranks.run(world, in_mode, "foreground", _saved_optimizer, str(tmp_path)) == [1] * world
