"""Write deepspeed/ with DeepSpeed itself: `python write_deepspeed.py FOLDER` where it is installed (README.md)."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "localhost", "MASTER_PORT": "29551", "OMP_NUM_THREADS": "1"}
RANKS = 2
FOLDERS = {"zero1": (1, True), "zero2": (2, False), "zero3": (3, True), "bf16": (1, True)}


class Net(torch.nn.Module):
    """Tied weights, a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.hidden = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 2.5]))
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        return self.head(self.frozen(self.hidden(x)) * self.scale.to(x.dtype))


def _detach_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_detached(*args: Any, **kwargs: Any) -> Any:
        values = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
        return call(*values, **{k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})

    return call_detached


def gather_moment(param: Any, optimizer: torch.optim.Optimizer, group: int, moment: str) -> torch.Tensor:
    """Return a moment of a parameter from the ranks' optimizers in memory."""
    full = torch.zeros(param.numel())
    mapping = param._hp_mapping
    if mapping is not None:  # else this rank has no part of it
        flat = optimizer.state[optimizer.param_groups[group]["params"][0]][moment]
        lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
        full[lp.start : lp.start + lp.numel] = flat[hp.start : hp.start + hp.numel]
    torch.distributed.all_reduce(full)
    return full.view(param.shape)


def write(rank: int, folder: str, name: str) -> None:
    """Train two steps on one rank, and write the checkpoint and what DeepSpeed has in memory."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import save_file

    deepspeed.comm.torch.build_shm_op = lambda: None  # it would be compiled; gloo does without it
    stage, is_bf16 = FOLDERS[name]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    for call in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # torch 2.13 refuses to fill views of autograd
        setattr(torch.distributed, call, _detach_arguments(getattr(torch.distributed, call)))
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(7)
    net = Net()
    decayed = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": is_bf16},
    }
    if name == "bf16":
        config |= {"data_types": {"grad_accum_dtype": "fp32"}}
        config["bf16"]["immediate_grad_update"] = True
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for step in range(2):
        loss = engine(torch.arange(4).view(2, 2) + rank + step).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag=name, client_state={"tokens": 16})
    expected = {}
    for key, param in net.named_parameters():
        if param.requires_grad:
            expected[key] = safe_get_full_fp32_param(param).float()
            for moment in ("exp_avg", "exp_avg_sq"):
                expected[f"{moment}/{key}"] = (
                    safe_get_full_optimizer_state(param, moment)
                    if stage == 3
                    else gather_moment(param, engine.optimizer.optimizer, int(param.ndim < 2), moment)
                )
        elif stage == 3:
            with deepspeed.zero.GatheredParameters([param]):
                expected[key] = param.detach().clone()
        else:
            expected[key] = param.detach().clone()
    expected["scale"] = net.scale.clone()
    if rank == 0:
        save_file({k: v.contiguous() for k, v in expected.items()}, f"{folder}/{name}.safetensors")
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[2:] or FOLDERS:
        mp.spawn(write, (sys.argv[1], name), nprocs=RANKS)
    for name in ("zero1", "zero3"):  # in a process of its own: the script reads sys.argv
        output = f"{sys.argv[1]}/universal-{name}"
        script = "from deepspeed.checkpoint.ds_to_universal import parse_arguments, main; main(parse_arguments())"
        options = ["--input_folder", f"{sys.argv[1]}/{name}", "--output_folder", output, "--inject_missing_state"]
        subprocess.run([sys.executable, "-c", script, *options], check=True)
