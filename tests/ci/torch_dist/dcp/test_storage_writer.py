from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardckpt.errors import CheckpointingException
from shardckpt_torch_dist import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
)
from tests import programs
from tests.faults.kill import bad
from tests.faults.programs import ask
from tests.states import run_here
from tests.torch_dist import plain_states
from tests.torch_dist.dcp.storage_writer import NEW, forget_plans, left_beside, load_by_all, save_by_writer

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from tests.ranks import RankPool


#: Of the calls of a save, so many are killed.
KILLED = 25


@pytest.mark.parametrize(
    ("case", "allowed"),
    [pytest.param("fresh", {"absent", "new"}, marks=pytest.mark.proof), ("existing", {"old", "new"})],
)
def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path, case: str, allowed: set[str]) -> None:
    """After a kill at any of 25 calls of a dcp.save, the path holds the old or the new, bit for bit, or nothing."""
    outcomes = ask("killer", "storage writer", tmp_path, case, KILLED)["outcomes"]
    # a file is cut to its length where DCP's copies lie in their pages so that it was made too long: not in every run
    killed = [outcome for outcome in outcomes if outcome["killed"] or outcome["call"] != "ftruncate"]
    assert len(killed) >= KILLED - 2
    assert bad(killed, allowed) == []
    assert {outcome["state"] for outcome in killed} == allowed


def _save_cached(path: str) -> None:
    forget_plans()
    for version in range(1, 4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if version == 1:  # what DCP's own writer said of its files must not count later
            dcp.save(plain_states.state(version), checkpoint_id=f"{path}{version}", planner=planner)
        else:
            save_by_writer(f"{path}{version}", version, planner=planner)
    forget_plans()


@pytest.mark.parametrize("world", [0, 2])
def test_cached_plans_go_to_their_own_saves(gloo_ranks: RankPool, tmp_path: Path, world: int) -> None:
    """With plan caching every save has its own directory and values, after saves by DCP's own writer, too."""
    (gloo_ranks.run if world else run_here)(world, _save_cached, str(tmp_path / "c"))
    for version in range(1, 4):
        gloo_ranks.run(1, plain_states.load, str(tmp_path / f"c{version}"), version, CheckpointStorageReader)


# Saves in the background.


def _save_async(path: str) -> None:
    """Save behind collectives of the training, for as long as the save takes."""
    group = dist.new_group(backend="gloo")
    writer = CheckpointStorageWriter(path)
    future = dcp.async_save(plain_states.state(NEW), storage_writer=writer, process_group=group)
    _train_until_done(future)
    future.result(timeout=30)


def _train_until_done(future: Future[Any]) -> None:
    is_done = torch.zeros(1)
    while not is_done:
        is_done.fill_(future.done())
        dist.all_reduce(is_done, op=dist.ReduceOp.MIN)


def test_async_save_in_a_thread(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """dcp.async_save with a thread commits as dcp.save does."""
    gloo_ranks.run(2, _save_async, str(tmp_path / "c"))
    gloo_ranks.run(1, load_by_all, str(tmp_path / "c"))


def _save_async_on_the_group_of_the_training(path: str) -> str:
    for given in ({}, {"process_group": dist.group.WORLD}, {"checkpoint_id": path}):
        writer = CheckpointStorageWriter(path)
        future: Any = dcp.async_save(plain_states.state(NEW), storage_writer=writer, **given)
        _train_until_done(future)
        with pytest.raises(CheckpointingException) as caught:
            future.result(timeout=30)
    return str(caught.value)


def test_async_save_on_the_group_of_the_training_is_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Else gloo mixes the messages of DCP's thread with those of the training: an error says which group to pass."""
    for text in gloo_ranks.run(2, _save_async_on_the_group_of_the_training, str(tmp_path / "c")):
        assert text.startswith(f"{tmp_path}/c: dcp.async_save")
        assert "process_group=dist.new_group(backend='gloo')" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.proof)])
def test_async_save_in_a_process(tmp_path: Path, count: int) -> None:
    """AsyncCheckpointerType.PROCESS: the writer travels to DCP's processes, which commit; an error comes back."""
    program, root = "tests.torch_dist.process_save", programs.ROOT
    ranks = [
        programs.start("", str(tmp_path), str(rank), str(count), module=program, cwd=root, one_output=True)
        for rank in range(count)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, said[-4000:]
    for name in ("c", "d"):
        plain_states.load(str(tmp_path / name), NEW, CheckpointStorageReader)
    assert [name for name in left_beside(tmp_path / "c") if name not in ("d", "store")] == []
