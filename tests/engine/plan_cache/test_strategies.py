"""Of which strategies plans are cached: those whose own class says so, and nobody has changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import release_memory
from shardckpt.engine.plan_cache import saved_plans
from shardckpt.errors import CheckpointingException
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt.planning.boxes import Box
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave, SaveStrategy
from shardckpt_ep import EPSaveStrategy, ExpertLayout
from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy
from tests.engine.plan_cache.saves import MODES, check, first, in_mode, save, tensor
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("mode")


class _Doubling(TorchDistSaveShardedStrategy):
    """A third party's: it changes the shards in a ``prepare`` of its own."""

    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        return super().prepare(_doubled(shards), common, context)


class _Delegating(AsyncSaveStrategy):
    """A third party's: it hands changed shards to another strategy."""

    backend = "torch_dist"
    version = 1

    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        return TorchDistSaveShardedStrategy().prepare(_doubled(shards), common, context)


def _patched() -> TorchDistSaveShardedStrategy:
    strategy = TorchDistSaveShardedStrategy()
    prepare = strategy.prepare
    strategy.prepare = lambda shards, *rest: prepare(_doubled(shards), *rest)  # type: ignore[method-assign]
    return strategy


def _hooked() -> TorchDistSaveShardedStrategy:
    strategy = TorchDistSaveShardedStrategy()
    collect = strategy.collect

    def collect_doubled(*args: Any) -> Any:
        items, objects = collect(*args)
        items.tensors[:] = [values * 2 for values in items.tensors]
        return items, objects

    strategy.collect = collect_doubled  # type: ignore[method-assign]
    return strategy


def _doubled(shards: Any) -> Any:
    for shard in shards:
        shard.data = shard.data * 2
    return shards


DOUBLING: list[Callable[[], Any]] = [
    _Doubling,
    _Delegating,
    _patched,
    _hooked,
    lambda: FullyParallelSaveStrategyWrapper(_Doubling()),
    lambda: FullyParallelSaveStrategyWrapper(_Delegating()),
]


@table("make", DOUBLING)
def test_a_method_that_was_overridden_is_called_every_time(tmp_path: Path, make: Callable[[], Any]) -> None:
    """A planning method of a strategy's own is called in every save, and the caller's shards stay as they are."""
    release_memory()
    strategy = make()
    for step in range(3):
        shard = tensor("w", torch.full((3,), float(step)))
        save({"w": shard}, tmp_path / str(step), strategy)
        check(tmp_path / str(step), {"w": torch.full((3,), 2.0 * step)})
        assert torch.equal(shard.data, torch.full((3,), float(step)))  # type: ignore[arg-type]


def test_a_wrapper_round_a_patched_strategy_shares_no_plan(tmp_path: Path) -> None:
    """What another wrapper has saved by an ordinary strategy is not the plan of one whose ``prepare`` was replaced."""
    for step, strategy in enumerate((TorchDistSaveShardedStrategy(), _patched(), _patched())):
        save({"w": tensor("w", torch.ones(3))}, tmp_path / str(step), FullyParallelSaveStrategyWrapper(strategy))
        check(tmp_path / str(step), {"w": torch.full((3,), 2.0 if step else 1.0)})


class _Work:
    def __init__(self, shards: Any) -> None:
        self.tensors = [shard.data.detach() for shard in shards]
        self.keys = [shard.key for shard in shards]
        self._shards = [shard.without_data() for shard in shards]

    def write(self, writer: Any) -> list[float]:
        found = [float(self.tensors.pop().sum()) for _ in range(len(self.tensors))]
        writer.write("sums", json.dumps(found).encode(), keys=0)
        writer.record_shards(self._shards)
        return found


class _Popping(AsyncSaveStrategy):
    """A third party's that caches plans, and uses up its list of tensors while it writes."""

    backend = "torch_dist"
    version = 1
    caches_plan = True

    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        self.prepared += 1
        return PreparedSave(_Work(shards), plan="plan")

    def replan(self, plan: Any, shards: Any, common: Any, context: Any) -> PreparedSave:
        assert plan == "plan"
        return PreparedSave(_Work(shards))


def test_a_strategy_of_ones_own_may_cache_plans(tmp_path: Path, mode: str) -> None:
    """Another's ``replan`` is asked, and what its work does to its list of tensors is not seen by the next save."""
    strategy = _Popping()
    for step in range(4):
        shards = {f"w{n}": tensor(f"w{n}", torch.full((3,), float(step + n))) for n in range(2)}
        save(shards, tmp_path / str(step), strategy)
        assert json.loads((tmp_path / str(step) / "sums").read_text()) == [3.0 * step + 3, 3.0 * step]
    assert strategy.prepared == 1
    assert (saved_plans._entries[0][1].layout is not None) == (mode == "background")


class _NeverAgain(_Popping):
    """A third party's that says that it caches plans, and cannot plan by one."""

    caches_plan = True
    replan = AsyncSaveStrategy.replan

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        return super().prepare(_doubled(shards), common, context)


def test_a_plan_that_does_not_serve_is_made_anew(tmp_path: Path) -> None:
    """Where ``replan`` gives nothing, ``prepare`` is called, with shards that are not the caller's."""
    strategy = _NeverAgain()
    for step in range(3):
        shard = tensor("w", torch.full((3,), float(step)))
        save({"w": shard}, tmp_path / str(step), strategy)
        assert json.loads((tmp_path / str(step) / "sums").read_text()) == [6.0 * step]
        assert torch.equal(shard.data, torch.full((3,), float(step)))  # type: ignore[arg-type]
    assert strategy.prepared == 3


class _SavingItself(_Popping):
    """One that saves in a way of its own in the foreground: its base's ``caches_plan`` is not for it."""

    def save(self, shards: Any, common: Any, context: Any) -> None:
        context.writer.write("own", b"own", keys=0)
        context.writer.record_shards(shards)


class _Silent(_SavingItself):
    """One that says that it plans anew."""

    caches_plan = False


def test_a_lost_plan_cache_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class that loses its base's plan cache is named, with both ways out; one that says so is not."""

    class Lost(_SavingItself):
        pass

    for step in range(2):
        for strategy in (Lost(), _Silent()):
            save({"w": first()}, tmp_path / f"{type(strategy).__name__}-{step}", strategy)
    said = [record.getMessage() for record in caplog.records if "caches_plan" in record.getMessage()]
    assert len(said) == 1
    assert "Lost does not inherit caches_plan, so each save plans anew" in said[0]
    assert "caches_plan = True" in said[0]
    assert "caches_plan = False" in said[0]


def _saving_itself() -> TorchDistSaveShardedStrategy:
    strategy = TorchDistSaveShardedStrategy()
    strategy.save = _SavingItself().save  # type: ignore[method-assign]
    return strategy


@table("make", [_SavingItself, _saving_itself, lambda: FullyParallelSaveStrategyWrapper(_SavingItself())])
def test_a_save_that_was_overridden_is_called_every_time(tmp_path: Path, make: Callable[[], Any]) -> None:
    """A strategy with a ``save`` of its own does every save in the foreground, also after others in the background."""
    release_memory()
    for step in range(4):
        in_background = step % 2 == 0
        request = dc.save({"w": first()}, tmp_path / str(step), make(), async_sharded_save=in_background)
        if request is not None:
            request.execute_sync()
        assert (tmp_path / str(step) / "own").exists() != in_background


def test_strategies_that_write_other_files_share_no_plan(tmp_path: Path) -> None:
    """The same shards saved by strategies with other options in turn have the files that each makes."""
    options: list[dict[str, Any]] = [
        {},
        {"thread_count": 2},
        {"separation_hint": "w"},
        {"keep_only_main_replica": False},
    ]
    made = []
    for turn in range(2):
        for number, option in enumerate(options):
            path = tmp_path / f"{turn}-{number}"
            save({"w": first(), "v": tensor("v", torch.ones(2))}, path, TorchDistSaveShardedStrategy(**option))
            made.append(sorted(file.name for file in path.glob("*.distcp")))
    assert made[:4] == made[4:]
    assert made[0] == made[3] == ["__0_0.distcp"]
    assert made[1] == ["__0_0.distcp", "__0_1.distcp"]
    assert made[2] == ["__0_0.distcp", "w__0_0.distcp"]
    keys = {TorchDistSaveShardedStrategy(**option).plan_cache_key for option in options}
    assert len(keys) == 4


class _ForegroundOnly(SaveStrategy):
    backend = "torch_dist"
    version = 1

    def save(self, shards: Any, common: Any, context: Any) -> None:
        raise AssertionError


def _one_saves_in_another_way(folder: str) -> str:
    rank = dist.get_rank()
    with pytest.raises(CheckpointingException) as raised:
        save({"w": tensor("w", torch.ones(2), replica_id=rank)}, folder, _ForegroundOnly() if rank else None)
    return str(raised.value)


def test_ranks_with_different_classes_keep_in_step(ranks: Ranks, tmp_path: Path) -> None:
    """Strategies of different classes are refused on all ranks: what one sends is not what another waits for."""
    for mode in MODES:
        one, other = ranks.run(2, in_mode, mode, _one_saves_in_another_way, str(tmp_path / "c"))
        assert one == other
        assert "ranks disagree on strategy_class: " in one
        assert "_ForegroundOnly' on rank 1" in one


def test_experts_are_compared_with_the_layouts_of_their_strategy() -> None:
    """Strategies of (ep, 1) with layouts share no plans: another's have not been compared with these shards."""
    assert EPSaveStrategy().plan_cache_key == EPSaveStrategy().plan_cache_key
    assert EPSaveStrategy(sections=("x",)).plan_cache_key != EPSaveStrategy().plan_cache_key
    layouts = {"experts.w1": ExpertLayout((4, 4), Box((2, 0), (2, 4)))}
    assert EPSaveStrategy(layouts).plan_cache_key != EPSaveStrategy(layouts).plan_cache_key
    assert EPSaveStrategy().plan_cache_key != TorchDistSaveShardedStrategy().plan_cache_key
