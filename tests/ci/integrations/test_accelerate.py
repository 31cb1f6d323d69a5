from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt.integrations.accelerate import register_sharded_state
from tests.integrations import small
from tests.integrations.accelerate import Job
from tests.integrations.accelerated import accelerated
from tests.ranks import Failure, RankPool, Ranks

if TYPE_CHECKING:
    from pathlib import Path


def _saved(folder: str, sharded: bool, more: int = 0) -> dict[str, torch.Tensor]:
    with accelerated():
        job = Job(sharded=sharded)
        register_sharded_state(job.accelerator)
        job.train(3)
        job.accelerator.save_state(folder)
        job.train(more)
        return job.state()


def _loaded(folder: str, sharded: bool, more: int = 0) -> dict[str, torch.Tensor]:
    with accelerated():
        job = Job(sharded=sharded)
        register_sharded_state(job.accelerator)
        job.accelerator.load_state(folder)
        job.train(more)
        return job.state()


@pytest.mark.parametrize(
    ("saving", "loading"), [((2, True), (3, True)), ((3, False), (2, True)), ((2, True), (1, False))]
)
def test_any_ranks_load_what_others_saved(
    saving: tuple[int, bool], loading: tuple[int, bool], ranks: Ranks, tmp_path: Path
) -> None:
    """Models and optimizers, under FSDP2 and DDP, come back bit for bit on another number of ranks."""
    state = ranks.run(saving[0], _saved, str(tmp_path), saving[1])[0]
    for loaded in ranks.run(loading[0], _loaded, str(tmp_path), loading[1]):
        assert small.is_equal(loaded, state)


@pytest.mark.parametrize("sharded", [True, False])
def test_training_goes_on_as_without_the_interruption(sharded: bool, gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Steps after a load are those that followed the save, schedule and moments among them."""
    whole = gloo_ranks.run(2, _saved, str(tmp_path), sharded, 3)
    resumed = gloo_ranks.run(2, _loaded, str(tmp_path), sharded, 3)
    assert all(small.is_equal(one, other) for one, other in zip(resumed, whole, strict=True))
    assert not small.is_equal(resumed[0], gloo_ranks.run(2, _loaded, str(tmp_path), sharded)[0])


def _with_a_stranger(folder: str, load: bool) -> None:
    with accelerated():
        job = Job()
        if dist.get_rank() == 1:
            job.accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
        register_sharded_state(job.accelerator)
        (job.accelerator.load_state if load else job.accelerator.save_state)(folder)


@pytest.mark.parametrize("load", [False, True])
def test_a_failure_on_one_rank_is_the_same_error_on_all(load: bool, gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Where one rank has an optimizer of no model, no rank is left waiting, and what was saved is there still."""
    state = gloo_ranks.run(2, _saved, str(tmp_path), False)[0]
    outcomes = gloo_ranks.outcomes(2, _with_a_stranger, str(tmp_path), load)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert "rank 1" in outcomes[0].message
    assert {outcome.message for outcome in outcomes} == {outcomes[0].message}
    assert small.is_equal(gloo_ranks.run(1, _loaded, str(tmp_path), False)[0], state)
