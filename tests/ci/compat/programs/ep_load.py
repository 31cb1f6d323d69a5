"""A job that starts from a checkpoint with all experts, as users of EPLoadPlanner write it, with plain DCP."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mindspeed_llm.fsdp2.checkpoint.ep_load_planner import EPLoadPlanner, get_check_moe_func
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


class Model(torch.nn.Module):
    """Two layers with experts."""

    def __init__(self, experts):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "attention": torch.nn.Linear(6, 6),
                    "experts": torch.nn.ParameterDict(
                        {"w1": torch.zeros(experts, 6, 4), "w2": torch.zeros(experts, 4, 6)}
                    ),
                }
            )
            for _ in range(2)
        )


def convert(path):
    """Save all experts, as a conversion without expert parallelism does."""
    model = Model(8)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return model.state_dict()


def run(path):
    """Each rank fills its own experts, which FSDP shards, and the rest as ever."""
    full = convert(path)
    ep_size = 2
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep_size, ep_size), mesh_dim_names=("efsdp", "ep"))
    ep_rank = mesh["ep"].get_local_rank()
    model = Model(8 // ep_size)
    for layer in model.layers:
        fully_shard(layer["experts"], mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer["attention"], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"model": get_model_state_dict(model)}
    planner = EPLoadPlanner(
        ep_rank=ep_rank, ep_size=ep_size, check_moe_fn=get_check_moe_func(model), allow_partial_load=True
    )
    dcp.load(state, checkpoint_id=path, planner=planner)
    set_model_state_dict(model, state["model"])
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        expected = full[name]
        if ".experts." in name:
            expected = expected.chunk(ep_size)[ep_rank]
        assert torch.equal(param.full_tensor(), expected), name
