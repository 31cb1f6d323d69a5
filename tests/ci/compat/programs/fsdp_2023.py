"""Save and load with FSDP1's sharded state dicts, as the docstring of load_sharded_optimizer_state_dict has it."""

import torch
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType


def build(seed):
    """Make a model and its optimizer."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model = FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))
    return model, torch.optim.Adam(model.parameters(), lr=0.01 * (seed + 1))


def sharded(model):
    """Let state dicts be sharded."""
    return FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def train(model, optim, steps):
    """Take some steps."""
    for _ in range(steps):
        model(torch.arange(12.0).reshape(2, 6)).square().mean().backward()
        optim.step()
        optim.zero_grad()


def run(checkpoint_file):
    """Save after two steps; another job goes on from there, with the same losses and state."""
    model, optim = build(0)
    train(model, optim, 2)
    with sharded(model):
        state_dict = {"optimizer": FSDP.optim_state_dict(model, optim), "model": model.state_dict()}
        dist_cp.save_state_dict(
            state_dict=state_dict,
            storage_writer=dist_cp.FileSystemWriter(checkpoint_file),
            planner=dist_cp.DefaultSavePlanner(),
        )
    model_tp, other = build(1)
    with sharded(model_tp):
        model_state_dict = model_tp.state_dict()
        checkpoint = {"model": model_state_dict}
        dist_cp.load_state_dict(
            state_dict=checkpoint,
            storage_reader=dist_cp.FileSystemReader(checkpoint_file),
            planner=dist_cp.DefaultLoadPlanner(),
        )
        model_tp.load_state_dict(checkpoint["model"])
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict,
            optimizer_key="optimizer",
            storage_reader=dist_cp.FileSystemReader(checkpoint_file),
        )
        flattened_osd = FSDP.optim_state_dict_to_load(model_tp, other, optim_state["optimizer"])
        other.load_state_dict(flattened_osd)
    for further in (0, 2):
        train(model, optim, further)
        train(model_tp, other, further)
        assert other.param_groups[0]["lr"] == optim.param_groups[0]["lr"] == 0.01
        for one, same in zip(optim.state.values(), other.state.values(), strict=True):
            assert one.keys() == same.keys()
            assert all(torch.equal(value, same[name]) for name, value in one.items())
        assert all(torch.equal(one, same) for one, same in zip(model.parameters(), model_tp.parameters(), strict=True))
