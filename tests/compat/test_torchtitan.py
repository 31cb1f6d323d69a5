"""torchtitan's CheckpointManager of spring 2025: its constructor, keywords and names."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.compat.torchtitan import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    AsyncMode,
    CheckpointManager,
    ModelWrapper,
)
from shardckpt.errors import CheckpointingException
from tests.compat.torchtitan import Job
from tests.integrations import small
from tests.manager.folders import steps_of
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _is_equal(one: list[Any], other: list[Any]) -> bool:
    return small.is_equal(one[0], other[0]) and one[1:] == other[1:]


@pytest.mark.parametrize("mode", ["DISABLED", "async", pytest.param("Async_With_Pinned_Mem", marks=pytest.mark.ci)])
def test_the_documents_calls_run_as_they_stand(tmp_path: Path, mode: str) -> None:
    """Constructor, ``save(curr_step=)``, ``load(step=-1)``: step 1 is saved, too, and parts resume with schedulers."""
    whole = Job(tmp_path / "whole", async_mode=mode)
    whole.train(7)
    whole.manager.close()
    job = Job(tmp_path, async_mode=mode)
    assert job.manager.load(step=-1) is False
    job.train(4)
    job.manager.close()
    assert [step.step for step in steps_of(tmp_path / "checkpoint").committed()] == [1, 2, 4]
    resumed = Job(tmp_path, async_mode=mode)
    assert resumed.manager.load(step=-1)
    assert resumed.step == 4
    resumed.train(7)
    resumed.manager.close()
    assert _is_equal(resumed.content(), whole.content())


def test_of_step_0_the_model_alone_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step 0 with all states is a seed checkpoint: the schedule, the loader and the train state stay as they are."""
    job = Job(tmp_path)
    job.train(1)
    weights, *trained = job.content()
    job.manager.manager.save(0, force=True)
    job.manager.close()
    shutil.rmtree(tmp_path / "checkpoint" / "step-1")
    other = Job(tmp_path)
    with torch.no_grad():
        other.parts[0].get_parameter("0.weight").zero_()
    _, *untrained = other.content()
    assert trained != untrained
    with caplog.at_level("INFO"):
        assert other.manager.load()
    other.manager.close()
    assert _is_equal(other.content(), [weights, *untrained])
    assert f"loaded the model alone of step 0 of {tmp_path}/checkpoint" in caplog.text


def test_the_options_are_attributes(tmp_path: Path) -> None:
    """What a trainer reads of torchtitan's manager is there: the folder joined, the options, the states."""
    manager = Job(tmp_path, async_mode="async", keep_latest_k=3, interval=7).manager
    found = [manager.folder, manager.interval, manager.async_mode, manager.keep_latest_k, manager.enable_checkpoint]
    assert found == [str(tmp_path / "checkpoint"), 7, AsyncMode.ASYNC, 3, True]
    assert (manager.model_weights_only, manager.exclude_from_loading, manager.ft_manager.enabled) == (False, (), False)
    assert manager.states[MODEL].cache_state_dict.keys() == manager.states[MODEL].state_dict().keys()
    manager.close()
    with pytest.raises(AttributeError, match="no attribute 'staging_id'"):
        _ = manager.staging_id


def test_the_default_export_dtype_casts_nothing_up(tmp_path: Path) -> None:
    """export_dtype="float32", the default there, leaves bfloat16 weights as they are."""
    job = Job(tmp_path, model_weights_only=True, export_dtype="float32")
    job.parts[0].bfloat16()
    job.manager.save(1, force=True)
    job.manager.close()
    stored = {entry.key: entry.dtype for entry in _list(tmp_path / "checkpoint" / "step-1")}
    assert stored["0.weight"] == torch.bfloat16


class _Odd(CheckpointManager):
    """Saves the odd steps."""

    def _should_save(self, curr_step: int, force: bool = False) -> bool:
        return force or curr_step % 2 == 1


def test_a_subclass_decides_which_steps_are_saved(tmp_path: Path) -> None:
    """The method _should_save is called, as by torchtitan: it may add steps to the interval's, and take some away."""
    job = Job(tmp_path, _Odd)
    job.train(5)
    job.manager.close()
    assert [step.step for step in steps_of(tmp_path / "checkpoint").committed()] == [1, 3, 5]


@table("hook", ["_states_to_load", "_purge_stale_checkpoints", "dcp_save", "_ft_save"])
def test_a_hook_that_would_never_be_called_is_refused(hook: str) -> None:
    """A subclass with another of torchtitan's methods is an error at the class, with what to use."""
    with pytest.raises(CheckpointingException, match=rf"^Mine\.{hook} would never be called: .* Instead use .*opt|ft_"):
        type("Mine", (CheckpointManager,), {hook: lambda self: None})


def _train(folder: Path, until: int) -> int:
    job = Job(folder)
    job.manager.load()
    found = job.step
    job.train(until)
    job.manager.close()
    return found


def test_the_documents_manager_works_on_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks save and resume, each with its own loader."""
    assert ranks.run(2, _train, tmp_path, 4) == [0, 0]
    assert ranks.run(2, _train, tmp_path, 6) == [4, 4]


def test_a_forced_save_is_the_last(tmp_path: Path) -> None:
    """With ``model_weights_only``, ``force`` saves weights for another job, without ``freqs_cis``; else everything."""
    job = Job(tmp_path / "weights", model_weights_only=True, export_dtype="bfloat16")
    job.train(3, last=3)
    job.manager.close()
    step = tmp_path / "weights" / "checkpoint" / "step-3"
    keys = {entry.key for entry in _list(step)}
    assert "0.weight" in keys
    assert not [key for key in keys if "freqs_cis" in key]

    config = {"enable_checkpoint": True, "initial_load_path": str(step), "folder": "other"}
    other = Job(tmp_path)
    other.manager.close()
    with torch.no_grad():
        other.parts[0].rotary.freqs_cis.fill_(3.0)
    fresh = CheckpointManager(
        None,
        ModelWrapper(other.parts),
        other.optimizers,
        other.schedulers,
        {},
        SimpleNamespace(job=SimpleNamespace(dump_folder=str(tmp_path)), checkpoint=SimpleNamespace(**config)),
    )
    assert fresh.load()
    fresh.close()
    weights = ModelWrapper(other.parts).state_dict()
    assert weights["rotary.freqs_cis"].eq(3.0).all()
    expected = ModelWrapper(job.parts).state_dict()["0.weight"].bfloat16().float()
    assert torch.equal(weights["0.weight"], expected)

    whole = Job(tmp_path / "whole")
    whole.train(3, last=3)
    whole.manager.close()
    assert "rotary.freqs_cis" in {
        entry.key.removeprefix("model.") for entry in _list(tmp_path / "whole/checkpoint/step-3")
    }
    resumed = Job(tmp_path / "whole")
    assert resumed.manager.load()
    assert _is_equal(resumed.content(), whole.content())
    resumed.manager.close()


def _list(step: Path) -> list[Any]:
    return list(dist_checkpointing.load_sharded_metadata(step).values())


def test_only_minus_one_means_the_newest(tmp_path: Path) -> None:
    """Another negative number is a mistake, not the newest step."""
    job = Job(tmp_path)
    job.train(2)
    with pytest.raises(CheckpointingException, match=r"-2 is no step; .* -1 for what load_step says"):
        job.manager.load(-2)
    job.manager.close()


def test_names_are_the_documents() -> None:
    """Constants, and modes in any case, are found under torchtitan's names."""
    assert (MODEL, OPTIMIZER, LR_SCHEDULER) == ("model", "optimizer", "lr_scheduler")
    assert (DATALOADER, TRAIN_STATE) == ("dataloader", "train_state")
    assert AsyncMode("Async_With_Pinned_Mem") is AsyncMode.ASYNC_WITH_PINNED_MEM


def test_a_model_wrapper_merges_parts(tmp_path: Path) -> None:
    """Its state dict has the tensors of all parts, and loading skips those of other ranks."""
    parts = Job(tmp_path, enable_checkpoint=False).parts
    wrapper = ModelWrapper(parts)
    state = {name: torch.ones_like(value) for name, value in wrapper.state_dict().items()}
    wrapper.load_state_dict({**state, "9.weight": torch.zeros(1)})
    assert all(param.eq(1).all() for part in parts for param in part.parameters())
