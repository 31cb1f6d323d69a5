"""What plain DCP saved in part resumes here, and stock ``dcp.load`` resumes from ours; whole: see the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt_torch_dist import (
    CheckpointStorageWriter,
    ShardedLoadPlanner,
    ShardedSavePlanner,
)
from tests.interop.stock import STEP, Training, TrainState, resume_by_stock_load, write_stock
from tests.ranks import RankError, Ranks
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

EACH_WORLD = pytest.mark.parametrize("world", [2, *in_proof(1, 4)])


def save_by_manager(folder: Path) -> None:
    """Save all of it by a manager."""
    training = Training(0)
    training.train(3)
    with training.manager(folder) as manager:
        assert manager.save(STEP, force=True)


def save_by_adapters(checkpoint: Path) -> None:
    """Save model and optimizer as the README does."""
    training = Training(0)
    training.train(3)
    dist_checkpointing.save(to_sharded_state_dict(training.model, training.optimizer), checkpoint)


def load_stages_strictly(checkpoint: Path) -> None:
    """Load another part of the model on each rank, and compare the keys of all ranks."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    part = nn.ModuleDict({"0": model[0]} if dist.get_rank() == 0 else {"2": model[2]})
    optimizer = torch.optim.AdamW([{"params": [param]} for param in part.parameters()])
    wanted = to_sharded_state_dict(part, optimizer)
    loaded, missing, unexpected = dist_checkpointing.load(wanted, checkpoint, strict="return_all")
    load_into(loaded, part, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert (missing, unexpected) == ({"train_state.step", "train_state.log.0", "train_state.log.1"}, set())


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_ranks_may_ask_for_different_objects(ranks: Ranks, tmp_path: Path, form: str) -> None:
    """Pipeline stages get the options of their own parameters, and mismatched keys are found on all ranks together."""
    ranks.run(2, write_stock, form, tmp_path)
    ranks.run(2, load_stages_strictly, tmp_path / f"step-{STEP}")


@EACH_WORLD
@pytest.mark.parametrize("our_reader", [False, True], ids=["stock reader", "our reader"])
@pytest.mark.parametrize("written_by", ["manager", "adapters"])
def test_stock_dcp_resumes_what_was_saved_here(
    ranks: Ranks, tmp_path: Path, world: int, written_by: str, our_reader: bool
) -> None:
    """``dcp.load`` fills torch's state dicts in both forms from our checkpoints, and a manager's other states."""
    checkpoint = tmp_path / f"step-{STEP}"
    if written_by == "manager":
        ranks.run(2, save_by_manager, tmp_path)
    else:
        ranks.run(2, save_by_adapters, checkpoint)
    for form in ("nested", "flattened"):
        ranks.run(world, resume_by_stock_load, checkpoint, form, our_reader, written_by == "manager")


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps as an int, as many of other libraries do."""

    def step(self, closure: Any = None) -> Any:
        """Step, and count for each parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["step"] = self.state[param].get("step", 0) + 1
        return super().step(closure)


def _stage(seed: int, *numbers: int) -> tuple[nn.ModuleDict, Counting]:
    """Return some layers of a model of three, a parameter group for each: the second has another rate."""
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    part = nn.ModuleDict({str(number): layers[number] for number in numbers})
    groups = [{"params": part[str(n)].parameters(), "lr": 0.25 * (n + 1)} for n in numbers]
    return part, Counting(groups, momentum=0.5)


def save_stages(checkpoint: Path) -> None:
    """Save a model whose first rank has the layers 0 and 1, and whose second has 1, tied, and 2, by our functions."""
    part, optimizer = _stage(0, *((0, 1) if dist.get_rank() == 0 else (1, 2)))
    for number in range(3):
        for name, layer in part.items():
            if (name, number) != ("2", 0):  # which makes a step less
                layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist_checkpointing.save(to_sharded_state_dict(part, optimizer), checkpoint)


def load_stages_flattened(checkpoint: Path, numbers: tuple[tuple[int, ...], ...]) -> None:
    """Load some layers on each rank by stock ``dcp.load``, flattened as pipelines need it."""
    part, optimizer = _stage(1, *numbers[dist.get_rank()])
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for param in part.parameters():  # torch would make state by a step with gradients of zero
        optimizer.state[param] = {"step": 0, "momentum_buffer": torch.zeros_like(param)}
    state: Any = {"optimizer": get_optimizer_state_dict(part, optimizer, options=options)}
    dcp.load(state, checkpoint_id=checkpoint)
    set_optimizer_state_dict(part, optimizer, state["optimizer"], options=options)
    for number, group in zip(numbers[dist.get_rank()], optimizer.param_groups, strict=True):
        assert group["lr"] == 0.25 * (number + 1)
        steps = [optimizer.state[param]["step"] for param in group["params"]]
        assert steps == [2 if number == 2 else 3] * 2


def test_stock_dcp_finds_the_options_of_all_stages(ranks: Ranks, tmp_path: Path) -> None:
    """Flattened options and numbers of stages that share some parameters are found by each parameter's own name."""
    ranks.run(2, save_stages, tmp_path / "step")
    ranks.run(2, load_stages_flattened, tmp_path / "step", ((0, 2), (1,)))
    ranks.run(1, load_stages_flattened, tmp_path / "step", ((0, 1, 2),))


def test_what_our_planner_saves_is_read_by_stock_dcp(tmp_path: Path) -> None:
    """By ``dcp.save`` with our planner, options come back as they were, not in the list that Megatron needs."""
    model, optimizer = _module_and_optimizer(trained=True)
    state = to_sharded_state_dict(model, optimizer)
    writer = CheckpointStorageWriter(tmp_path / "step")
    dcp.save(state, storage_writer=writer, planner=ShardedSavePlanner(), no_dist=True)
    fresh, moments = _module_and_optimizer(trained=False)
    wanted: Any = {"optimizer": get_optimizer_state_dict(fresh, moments)}
    dcp.load(wanted, checkpoint_id=tmp_path / "step", no_dist=True)
    set_optimizer_state_dict(fresh, moments, wanted["optimizer"])
    assert moments.param_groups[0]["betas"] == (0.9, 0.999)
    again = to_sharded_state_dict(fresh, moments)
    dcp.load(again, checkpoint_id=tmp_path / "step", planner=ShardedLoadPlanner(), no_dist=True)
    (group,) = again["optimizer"]["param_groups"].values()
    assert group["values"].data["options"]["betas"] == (0.9, 0.999)


def test_options_that_are_tensors_are_read_by_stock_dcp(tmp_path: Path) -> None:
    """In both forms of torch's optimizer state dicts."""
    model, optimizer = _module_and_optimizer(trained=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "step")
    for flatten in (True, False):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        fresh, moments = _module_and_optimizer(trained=False)
        moments.param_groups[0]["lr"] = torch.tensor(0.5)
        wanted: Any = {"optimizer": get_optimizer_state_dict(fresh, moments, options=options)}
        dcp.load(wanted, checkpoint_id=tmp_path / "step", no_dist=True)
        set_optimizer_state_dict(fresh, moments, wanted["optimizer"], options=options)
        assert moments.param_groups[0]["lr"] == 0.25


def write_milestones(folder: Path) -> None:
    """Save a schedule whose state has a Counter of integers."""
    training = Training(0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [1, 3], gamma=0.5)
    training.optimizer.step()
    schedule.step()
    dcp.save({"lr_scheduler": schedule}, checkpoint_id=folder / f"step-{STEP}")


def resume_milestones(folder: Path) -> list[float]:
    """Load it, go on, and return the learning rates."""
    training = Training(0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [1, 3], gamma=0.5)
    with CheckpointManager(CheckpointConfig(folder=str(folder)), {"lr_scheduler": schedule}) as manager:
        assert manager.load()
    rates = []
    for _ in range(3):
        schedule.step()
        rates.append(training.optimizer.param_groups[0]["lr"] / 0.25)
    return rates


def test_keys_that_are_no_text_come_back_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    """DCP makes the keys of a dict text: the milestones of a schedule are integers again, so that it goes on."""
    ranks.run(1, write_milestones, tmp_path)
    (rates,) = ranks.run(1, resume_milestones, tmp_path)
    assert rates == [1.0, 0.5, 0.5]  # the optimizer is not loaded here: its rate is halved at the third epoch


def resume_with_another_state(folder: Path) -> None:
    """Ask for a state that is not stored."""
    training = Training(1)
    states = {"model": training.model, "ema": TrainState()}
    with CheckpointManager(CheckpointConfig(folder=str(folder)), states) as manager:
        manager.load()


def test_a_state_that_stock_dcp_did_not_save_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """The error names the state as the user gave it, and what the checkpoint has."""
    ranks.run(1, write_stock, "nested", tmp_path)
    expected = r"has no state 'ema'; its names begin with dataloader, lr_scheduler, model, optimizer, train_state"
    with pytest.raises(RankError, match=expected):
        ranks.run(2, resume_with_another_state, tmp_path)


def _module_and_optimizer(*, trained: bool) -> tuple[nn.Linear, torch.optim.AdamW]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    if trained:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_folder_of_any_name_is_a_start_and_old_steps_count(tmp_path: Path) -> None:
    """`initial_load_path` loads a stock folder with its optimizer; steps that stock DCP saved are kept as ours are."""
    model, optimizer = _module_and_optimizer(trained=True)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    for name in ("old/epoch_3", "steps/step-10", "steps/step-20", "steps/step-30"):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    fresh, moments = _module_and_optimizer(trained=False)
    config = CheckpointConfig(
        folder=str(tmp_path / "new"), initial_load_path=str(tmp_path / "old/epoch_3"), initial_load_model_only=False
    )
    states = {"model": fresh, "optimizer": moments}
    with CheckpointManager(config, states) as manager:
        assert manager.load()
        assert manager.loaded_step is None
    assert torch.equal(moments.state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "steps"), keep_latest_k=2), states) as manager:
        assert manager.steps() == [10, 20, 30]
        manager.save(40, force=True)
        manager.wait()
        assert manager.steps() == [30, 40]
