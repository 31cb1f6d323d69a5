from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.integrations.accelerate import FOLDER, register_sharded_state
from tests.integrations import small
from tests.integrations.accelerated import accelerated
from tests.ranks import Failure, RankPool, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Job:
    """A training with Accelerate, of this process or of its group's ranks.

    Args:
        sharded: FSDP2, applied before the model is prepared; else what Accelerate makes of it (DDP).
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self.accelerator = Accelerator(cpu=True)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(small.WIDTH, 3), torch.nn.Linear(3, 1))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            for param in model.parameters():
                torch.nn.init.normal_(param)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model = self.accelerator.prepare_model(model, evaluation_mode=sharded)
        self.optimizer, self.scheduler = self.accelerator.prepare(optimizer, scheduler)

    def train(self, steps: int) -> None:
        """Make so many steps, every rank with the same data."""
        for inputs, labels in torch.utils.data.DataLoader(torch.utils.data.Subset(small.data(), range(steps))):
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(inputs), labels))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """All of model and optimizer, whole."""
        whole = StateDictOptions(full_state_dict=True)
        found: Any = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=whole)
        moments = {f"{name}.{slot}": value for name, slots in found["state"].items() for slot, value in slots.items()}
        rates = {"lr": torch.tensor([group["lr"] for group in found["param_groups"]])}
        return {**get_model_state_dict(self.model, options=whole), **moments, **rates}


@pytest.fixture
def alone() -> Iterator[None]:
    """Accelerate in this process."""
    with accelerated():
        yield


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
@pytest.mark.ci
def test_any_ranks_load_what_others_saved(
    saving: tuple[int, bool], loading: tuple[int, bool], ranks: Ranks, tmp_path: Path
) -> None:
    """Models and optimizers, under FSDP2 and DDP, come back bit for bit on another number of ranks."""
    state = ranks.run(saving[0], _saved, str(tmp_path), saving[1])[0]
    for loaded in ranks.run(loading[0], _loaded, str(tmp_path), loading[1]):
        assert small.is_equal(loaded, state)


@pytest.mark.ci
@pytest.mark.parametrize("sharded", [True, False])
def test_training_goes_on_as_without_the_interruption(sharded: bool, gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Steps after a load are those that followed the save, schedule and moments among them."""
    whole = gloo_ranks.run(2, _saved, str(tmp_path), sharded, 3)
    resumed = gloo_ranks.run(2, _loaded, str(tmp_path), sharded, 3)
    assert all(small.is_equal(one, other) for one, other in zip(resumed, whole, strict=True))
    assert not small.is_equal(resumed[0], gloo_ranks.run(2, _loaded, str(tmp_path), sharded)[0])


def test_accelerate_writes_no_weights_and_no_moments(alone: None, tmp_path: Path) -> None:
    """Of models and optimizers Accelerate's own files have nothing; the optimizer itself gives its state as before."""
    job = Job()
    register_sharded_state(job.accelerator)
    job.train(2)
    for _ in range(2):  # the second replaces the first
        job.accelerator.save_state(str(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == {
            FOLDER,
            "optimizer.bin",
            "scheduler.bin",
            "random_states_0.pkl",
        }
    stored = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert stored["state"] == {}
    assert len(job.optimizer.state_dict()["state"]) == 4
    tensors = dist_checkpointing.load_plain_tensors(tmp_path / FOLDER)
    assert torch.equal(tensors["model.0.weight"], job.model.state_dict()["0.weight"])
    assert "optimizer.state.0.weight.exp_avg" in tensors


def test_a_note_in_the_place_of_state_is_no_state(alone: None, tmp_path: Path) -> None:
    """Who loads the folder without shardckpt gets an error, never a fresh optimizer."""
    job = Job()
    registered = register_sharded_state(job.accelerator)
    job.train(1)
    job.accelerator.save_state(str(tmp_path))
    registered.remove()
    with pytest.raises(ValueError, match="parameter group"):
        job.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.bin", weights_only=True))


def test_removed_hooks_leave_accelerate_as_it_was(alone: None, tmp_path: Path) -> None:
    """After remove(), Accelerate saves and loads all by itself."""
    job = Job()
    register_sharded_state(job.accelerator).remove()
    job.train(1)
    state = {name: value.clone() for name, value in job.state().items()}
    job.accelerator.save_state(str(tmp_path))
    assert not (tmp_path / FOLDER).exists()
    job.train(1)
    job.accelerator.load_state(str(tmp_path))
    assert small.is_equal(job.state(), state)


def test_several_models_share_optimizers(alone: None, tmp_path: Path) -> None:
    """Models with the same names, and an optimizer of both, come back each its own."""
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], 0.1, momentum=0.9)
    *prepared, optimizer = accelerator.prepare(*models, optimizer)
    register_sharded_state(accelerator)
    sum(model(torch.ones(1, 2)).sum() for model in prepared).backward()
    optimizer.step()
    before = [small.weights(model) for model in models]
    accelerator.save_state(str(tmp_path))
    optimizer.step()
    accelerator.load_state(str(tmp_path))
    assert all(small.is_equal(small.weights(model), kept) for model, kept in zip(models, before, strict=True))
    assert not torch.equal(models[0].weight, models[1].weight)


def test_what_accelerate_saves_itself_is_refused(alone: None) -> None:
    """Under its FSDP plugin, where hooks come too late, registering is an error that says what to use."""
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(CheckpointingException, match="CheckpointManager"):
        register_sharded_state(accelerator)


def test_a_folder_of_accelerates_own_is_an_error(alone: None, tmp_path: Path) -> None:
    """What was saved without shardckpt is not loaded in part: the error names the folder that is missing."""
    job = Job()
    job.train(1)
    job.accelerator.save_state(str(tmp_path))
    register_sharded_state(job.accelerator)
    with pytest.raises(CheckpointingException, match=FOLDER):
        job.accelerator.load_state(str(tmp_path))


def _with_a_stranger(folder: str, load: bool) -> None:
    with accelerated():
        job = Job()
        if dist.get_rank() == 1:
            job.accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
        register_sharded_state(job.accelerator)
        (job.accelerator.load_state if load else job.accelerator.save_state)(folder)


@pytest.mark.ci
@pytest.mark.parametrize("load", [False, True])
def test_a_failure_on_one_rank_is_the_same_error_on_all(load: bool, gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Where one rank has an optimizer of no model, no rank is left waiting, and what was saved is there still."""
    state = gloo_ranks.run(2, _saved, str(tmp_path), False)[0]
    outcomes = gloo_ranks.outcomes(2, _with_a_stranger, str(tmp_path), load)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert "rank 1" in outcomes[0].message
    assert {outcome.message for outcome in outcomes} == {outcomes[0].message}
    assert small.is_equal(gloo_ranks.run(1, _loaded, str(tmp_path), False)[0], state)
