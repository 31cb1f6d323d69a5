"""Optimizer state that does not exist yet: not stored, left out of a load, and made by the optimizer in its time."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import KeyMismatchError
from shardckpt.local import TensorAwareStateDict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import OptionalEntries, ShardedTensor
from tests.adapters.absent_state import OPTIMIZERS, WIDTH, Experts, Training
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

EACH_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def _check_goes_on(loaded: Training, saved: Training) -> None:
    """Both train alike, bit for bit, and the expert that neither has reached is reached now."""
    assert loaded.with_state == saved.with_state
    assert loaded.run(10, 2, 0) == saved.run(10, 2, 0)
    assert loaded.run(12, 3, 0, 1) == saved.run(12, 3, 0, 1)
    for name, param in saved.model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), param), name


#: Which experts were reached in three steps before the save, and then in some of the job that loads; None: no step.
REACHED: dict[str, tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = {
    "an expert that no token reached": ((0,), None),
    "a save before the first step": (None, None),
    "state that the optimizer lacks": ((0, 1), (0,)),
    "state that the checkpoint lacks": ((0,), (0, 1)),
}


@EACH_OPTIMIZER
@table(("saved_by", "loaded_by"), REACHED.values(), ids=REACHED)
def test_state_is_what_it_was_at_the_save(
    tmp_path: Path, optimizer: str, saved_by: tuple[int, ...] | None, loaded_by: tuple[int, ...] | None
) -> None:
    """A parameter that had no state has none in the checkpoint nor after a load: training goes on as if never saved."""
    saved, loaded = Training.made(optimizer), Training.made(optimizer, seed=2)
    if saved_by is not None:
        saved.run(0, 3, *saved_by)
    saved.save(tmp_path / "c")
    stored = {key for key in dist_checkpointing.load_tensors_metadata(tmp_path / "c") if "state" in key}
    assert saved_by == (0, 1) or not any("experts.1" in key for key in stored)
    if loaded_by is not None:
        loaded.run(0, 2, *loaded_by)
    loaded.load(tmp_path / "c", strict=True)
    _check_goes_on(loaded, saved)


@pytest.mark.parametrize("steps", [0, 2])
@EACH_OPTIMIZER
def test_a_load_leaves_the_optimizer_as_it_is(tmp_path: Path, optimizer: str, steps: int) -> None:
    """What a load makes to be filled is not the optimizer's: state, options, gradients, parameters and hooks stay."""
    Training.made(optimizer).save(tmp_path / "c")
    training = Training.made(optimizer)
    training.run(0, steps, 0)
    training.model(torch.ones(2, WIDTH), (0, 1)).sum().backward()
    called: list[Any] = []
    training.optimizer.register_step_post_hook(lambda *arguments: called.append(arguments))

    def state() -> Any:
        params = list(training.model.parameters())
        return training.optimizer.state_dict(), params, [param.grad for param in params], sorted(training.with_state)

    before = copy.deepcopy(state())
    saver = Training.made(optimizer)
    saver.run(0, 2, 0, 1)
    saver.save(tmp_path / "more")
    for name in ("c", "more"):
        described = training.described()
        described["model"] = {}
        dist_checkpointing.load(described, tmp_path / name)
        assert not called
    after = state()
    assert repr(after[1:]) == repr(before[1:])
    assert after[0]["param_groups"] == before[0]["param_groups"]


def test_half_a_state_comes_back_as_it_is(tmp_path: Path) -> None:
    """State of which the save had a part is that part; a parameter that is missing is an error that names it."""
    adam = Training.made("adamw")
    adam.run(0, 2, 0)
    described = adam.described()
    del described["optimizer"]["state"]["experts.0.weight"]["exp_avg_sq"]
    dist_checkpointing.save(described, tmp_path / "half")
    loaded = Training.made("adamw")
    loaded.load(tmp_path / "half")
    states = loaded.optimizer.state
    assert states[loaded.model.get_parameter("experts.0.weight")].keys() == {"step", "exp_avg"}
    assert states[loaded.model.get_parameter("experts.0.bias")].keys() == {"step", "exp_avg", "exp_avg_sq"}
    larger = Training.made("adamw")
    larger.model.register_parameter("more", nn.Parameter(torch.ones(2)))
    larger.optimizer.add_param_group({"params": [larger.model.get_parameter("more")]})
    with pytest.raises(KeyMismatchError, match=r"model\.more") as caught:
        larger.load(tmp_path / "half")
    assert "optimizer.state.more" not in str(caught.value)


@pytest.mark.parametrize("strict", ["return_all", "return_unexpected"])
def test_what_is_absent_is_no_mismatch(tmp_path: Path, strict: str, caplog: pytest.LogCaptureFixture) -> None:
    """No mode reports it, and a log line names the parameters, a warning where all of the live state is dropped."""
    saved = Training.made("adamw")
    saved.save(tmp_path / "none")
    saved.run(0, 2, 0)
    saved.save(tmp_path / "c")
    loaded = Training.made("adamw")
    for name, level in (("c", "INFO"), ("none", "INFO"), ("none", "WARNING")):
        if level == "WARNING":
            loaded.run(0, 2, 0)
        caplog.clear()
        with caplog.at_level("INFO", "shardckpt.engine.loading"):
            _, missing, unexpected = dist_checkpointing.load(loaded.described(), tmp_path / name, strict=strict)
        assert (missing, unexpected) == (set(), set())
        (line,) = [record for record in caplog.records if "left out" in record.getMessage()]
        assert line.levelname == level
        assert "optimizer.state.experts.1.bias, optimizer.state.experts.1.weight" in line.getMessage()


def test_keys_that_were_changed_are_wanted_as_ever(tmp_path: Path) -> None:
    """Whoever gives described shards other keys gets the error of any key that is not there."""
    saved = Training.made("adamw")
    saved.run(0, 2, 0, 1)
    saved.save(tmp_path / "c")
    described = saved.described()
    described["optimizer"]["state"]["shared.bias"]["step"].key = "elsewhere"
    with pytest.raises(KeyMismatchError, match="elsewhere"):
        dist_checkpointing.load(described, tmp_path / "c")


def test_a_copy_is_a_plain_dict() -> None:
    """Nothing of our own is stored as common state or sent to another process."""
    entries = OptionalEntries({"a": {"b": 1}}, "optimizer.state.")
    for made in (copy.copy(entries), copy.deepcopy(entries), pickle.loads(pickle.dumps(entries))):
        assert type(made) is dict
        assert made == {"a": {"b": 1}}


def test_an_entry_is_found_by_the_whole_of_its_name(tmp_path: Path) -> None:
    """State of layer.10 does not make that of layer.1 half there."""
    shard = ShardedTensor.from_rank_offsets
    state = {"layer.10": {"m": shard("s.layer.10.m", torch.ones(2))}}
    dist_checkpointing.save({"state": state}, tmp_path / "c")
    wanted = {name: {"m": shard(f"s.{name}.m", torch.zeros(2))} for name in ("layer.1", "layer.10", "layer.2")}
    loaded = dist_checkpointing.load({"state": OptionalEntries(wanted, "s.")}, tmp_path / "c", strict=True)
    assert loaded["state"].keys() == {"layer.10"}


@table("initial", [False, True])
def test_the_manager_loads_what_it_saved(tmp_path: Path, initial: bool) -> None:
    """A CheckpointManager resumes, and begins with another's checkpoint, whichever experts had been reached."""
    saved = Training.made("adamw")
    saved.run(0, 3, 0)
    config = CheckpointConfig(folder=str(tmp_path / "a"), interval=1, last_save_model_only=False)
    with CheckpointManager(config, {"model": saved.model, "optimizer": saved.optimizer}) as manager:
        manager.save(3, last_step=True)
    if initial:
        path = str(tmp_path / "a" / "step-3")
        config = CheckpointConfig(folder=str(tmp_path / "b"), initial_load_path=path, initial_load_model_only=False)
    loaded = Training.made("adamw", seed=2)
    with CheckpointManager(config, {"model": loaded.model, "optimizer": loaded.optimizer}) as manager:
        assert manager.load()
    _check_goes_on(loaded, saved)


def test_local_checkpoints_leave_it_out() -> None:
    """A part in memory is given back to a new optimizer without the state that did not exist."""
    saved = Training.made("adamw")
    saved.run(0, 3, 0)
    part, _ = TensorAwareStateDict.from_state_dict(saved.described())
    loaded = Training.made("adamw", seed=2)
    load_into(part.to_state_dict(loaded.described(), strict=True), loaded.model, loaded.optimizer)
    _check_goes_on(loaded, saved)


class _Stage(nn.Module):
    """A part of a model, under its name in the whole."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module(str(number), Experts())


def test_stages_and_their_optimizers(tmp_path: Path) -> None:
    """Of several parts with an optimizer each, one has made no step and one has not reached an expert."""

    def made(seed: int) -> tuple[list[_Stage], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        stages = [_Stage(number) for number in range(2)]
        return stages, [torch.optim.AdamW(stage.parameters()) for stage in stages]

    def step(stages: list[_Stage], optimizers: list[torch.optim.Optimizer], number: int, *reached: int) -> None:
        x = torch.ones(2, WIDTH)
        stages[number].get_submodule(str(number))(x, reached).sum().backward()
        optimizers[number].step()
        optimizers[number].zero_grad()

    stages, optimizers = made(1)
    step(stages, optimizers, 0, 1)
    dist_checkpointing.save(to_sharded_state_dict(stages, *optimizers), tmp_path / "c")
    others, their_optimizers = made(2)
    step(others, their_optimizers, 1, 0)
    wanted = to_sharded_state_dict(others, *their_optimizers)
    load_into(dist_checkpointing.load(wanted, tmp_path / "c", strict=True), others, *their_optimizers)
    assert not their_optimizers[1].state
    for number in (0, 1, 0):
        step(stages, optimizers, number, 0, 1)
        step(others, their_optimizers, number, 0, 1)
    for stage, other in zip(stages, others, strict=True):
        for name, param in stage.named_parameters():
            assert torch.equal(other.get_parameter(name), param)
