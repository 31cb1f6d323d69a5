from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper
from shardckpt.testing.cases import SaveLoadCase, save_load_cases
from shardckpt.testing.states import Destinations, check_region, make_state_dict
from shardckpt_torch_dist import ShardedLoadPlanner, ShardedSavePlanner
from tests import backends
from tests.property.search import drawn, for_all
from tests.tables import in_proof

if TYPE_CHECKING:
    from tests.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MANY = 16
WORLDS = pytest.mark.parametrize(("save_world", "load_world"), [(2, 3), *in_proof((1, 4), (4, 2))])


@dataclass(frozen=True)
class Route:
    """Who writes what several ranks have, and how what several want goes from one to the others.

    Attributes:
        parallel: Whether copies share the writing.
        background: Whether a thread writes.
        exchange: Algorithm of the parallel load, or None: every rank reads for itself.
    """

    parallel: bool
    background: bool
    exchange: str | None


ROUTES = st.builds(
    Route,
    st.booleans(),
    st.booleans(),
    st.sampled_from((None, "broadcast", "gather_rounds", "direct")),
)


def _save(path: str, batch: SaveLoadCase, route: Route) -> None:
    strategy = dc.get_default_save_sharded_strategy()
    saver = FullyParallelSaveStrategyWrapper(strategy) if route.parallel else strategy
    if not route.background:
        dc.save(make_state_dict(batch), path, saver)
        return
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(dc.save(make_state_dict(batch), path, saver, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)


def _load(path: str, batch: SaveLoadCase, route: Route) -> None:
    reader = dc.get_default_load_sharded_strategy(path)
    if route.exchange:
        reader = FullyParallelLoadStrategyWrapper(reader, exchange_algo=route.exchange)
    wanted = Destinations(batch)
    wanted.check(dc.load(wanted.state(), path, reader, validate_access_integrity=batch.validate, allow_dtype_cast=True))


@backends.both_in_proof
@drawn(3)
@WORLDS
def test_any_layout_loads_as_any_other(ranks: Ranks, count: int, save_world: int, load_world: int) -> None:
    """Saved by n ranks and loaded by m, each in its own layouts, every element is the global tensor's."""

    def check(example: tuple[SaveLoadCase, Route]) -> None:
        with tempfile.TemporaryDirectory(prefix="shardckpt-property-") as folder:
            path = f"{folder}/checkpoint"
            ranks.run(save_world, _save, path, *example)
            ranks.run(load_world, _load, path, *example)
            assert not [result for result in verify_checkpoint(path) if result.fault or result.foreign]
            whole = dc.load_plain_tensors(path)
            for case in example[0].cases:
                check_region(case, (), whole[case.key])

    for_all(st.tuples(save_load_cases(save_world, load_world, most=MANY), ROUTES), count, check)


def _dcp_save(path: str, batch: SaveLoadCase) -> None:
    dcp.save({"tensors": make_state_dict(batch)["tensors"]}, checkpoint_id=path, planner=ShardedSavePlanner())


def _dcp_load(path: str, batch: SaveLoadCase) -> None:
    wanted = Destinations(batch)
    dcp.load({"tensors": wanted.state()["tensors"]}, checkpoint_id=path, planner=ShardedLoadPlanner())
    wanted.check_memory()


def _stock_load(path: str, batch: SaveLoadCase) -> None:
    state = {case.key: torch.empty_like(case.spec.values()) for case in batch.cases}
    dcp.load(state, checkpoint_id=path)
    for case in batch.cases:
        check_region(case, (), state[case.key])


@drawn(2)
@WORLDS
def test_the_planners_serve_dcp(ranks: Ranks, count: int, save_world: int, load_world: int) -> None:
    """dcp.save by n ranks and dcp.load by m take any layouts with our planners; stock planners read the same."""

    def check(batch: SaveLoadCase) -> None:
        with tempfile.TemporaryDirectory(prefix="shardckpt-property-") as folder:
            ranks.run(save_world, _dcp_save, f"{folder}/checkpoint", batch)
            ranks.run(load_world, _dcp_load, f"{folder}/checkpoint", batch)
            _stock_load(str(Path(folder) / "checkpoint"), batch)

    for_all(save_load_cases(save_world, load_world, most=MANY), count, check)
