from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from accelerate import Accelerator, DistributedType

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.integrations.accelerate import FOLDER, register_sharded_state
from tests.integrations import small
from tests.integrations.accelerate import Job
from tests.integrations.accelerated import accelerated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def alone() -> Iterator[None]:
    """Accelerate in this process."""
    with accelerated():
        yield


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


def test_after_a_failed_save_the_optimizer_gives_its_state(alone: None, tmp_path: Path) -> None:
    """Where save_state fails before Accelerate asks the optimizers, the next to ask one gets no note."""
    job = Job()
    register_sharded_state(job.accelerator)
    job.train(1)

    def fail(*_: object) -> None:
        raise OSError

    job.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(OSError):
        job.accelerator.save_state(str(tmp_path))
    assert len(job.optimizer.state_dict()["state"]) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_another_accelerator_saves_the_optimizer_itself(fails: bool, alone: None, tmp_path: Path) -> None:
    """One without our hooks that has the same optimizer writes its state, also after a failed save of the other."""
    job, other = Job(), Accelerator(cpu=True)
    other.prepare(job.optimizer)
    register_sharded_state(job.accelerator)
    job.train(1)
    if fails:
        job.accelerator.register_save_state_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.accelerator.save_state(str(tmp_path / "one"))
    else:
        job.accelerator.save_state(str(tmp_path / "one"))
    other.save_state(str(tmp_path / "other"))
    assert len(torch.load(tmp_path / "other" / "optimizer.bin", weights_only=True)["state"]) == 4


def test_an_accelerator_is_registered_once(alone: None) -> None:
    """A second call, as of a notebook's cell, is an error: both would save, and the second find no models at a load."""
    job = Job()
    registered = register_sharded_state(job.accelerator)
    with pytest.raises(CheckpointingException, match="was called for this accelerator before"):
        register_sharded_state(job.accelerator)
    registered.remove()
    register_sharded_state(job.accelerator)


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
