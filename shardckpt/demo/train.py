"""A training job that can be killed at any step and goes on with another number of ranks. Copy what you need.

    torchrun --nproc-per-node 4 -m shardckpt.demo.train --dir run --steps 200 --interval 20
    torchrun --nproc-per-node 2 -m shardckpt.demo.train --dir run --steps 200 --interval 20  # after Ctrl-C or kill -9
    python -m shardckpt.demo.train --dir run --steps 200 --interval 20  # one process, no process group

Copy `train`: its comments say why each call is where it is. `main` and `shard` show the process group and the
sharding that it expects. The model, in model.py, knows nothing of checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt.demo.model import BATCH, ByteTransformer, Experts, MixtureOfExperts, batch, feed_forward
from shardckpt.manager.config import CheckpointConfig
from shardckpt.manager.manager import CheckpointManager
from shardckpt.tensors.memory import plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def print_line(**fields: Any) -> None:
    """Print the fields as a line of JSON, on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(fields), flush=True)  # noqa: T201


def train(options: argparse.Namespace, report: Callable[..., None] = print_line) -> None:
    """Collective: train from the newest checkpoint, or from the start, to ``options.steps``.

    Args:
        options: See `parse`.
        report: Called on every rank, with ``step=`` and ``loss=`` after every step, and with ``loaded=`` or ``saved=``
            and ``state=`` (see `state_digest`) after a load or save.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(options.seed)
    model = ByteTransformer(MixtureOfExperts if options.ep else feed_forward)
    if world_size > 1:
        shard(model, options.ep)
    # After sharding: the optimizer shards its state as the parameters are sharded that it is given.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    config = CheckpointConfig(
        folder=str(Path(options.dir) / "checkpoints"),  # one that all ranks share, or a URL of an object store
        interval=options.interval,
        keep_latest_k=2,  # the second is there if the newest is damaged
        last_save_model_only=False,  # the last checkpoint has all states: a run with more steps can continue from it
        strategy=("ep", 1) if options.ep else None,  # for saves; a load uses the format that the checkpoint names
        # async_mode="async_with_pinned_mem" lets another process write while the training goes on.
    )
    # Everything that the next step depends on. Here the position in the data follows from the step; a data loader with
    # state_dict() would be one more state: "loader": PerRank(loader). Random generators are saved by default.
    states = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}

    # After init_process_group, since all ranks take part in each of the manager's calls. As a context manager it waits
    # for saves in the background; after an error it does not wait for ranks that may be gone.
    with CheckpointManager(config, states) as manager:
        # After sharding, and before the first step: tensors are read into the model's and optimizer's own memory, each
        # rank reads its own shards only, and how many ranks saved them does not matter.
        manager.load()
        step = manager.loaded_step or 0  # None where the folder has no checkpoint yet
        if step:
            report(loaded=step, state=state_digest(model, optimizer))

        while step < options.steps:
            sequences = batch(step).tensor_split(world_size)[rank]
            # times its share: where the ranks do not divide the batch, some have a sequence more than others
            loss = model(sequences) * (len(sequences) * world_size / BATCH)
            loss.backward()
            optimizer.step()
            schedule.step()  # before the save: a checkpoint is the state between two steps, with all of one step done
            optimizer.zero_grad()
            step += 1
            report(step=step, loss=mean(loss))
            # Every step, on every rank: the manager knows which steps are due, and a save in the background is
            # committed by these calls. A kill in the middle leaves the checkpoints before it as they are.
            if manager.save(step, last_step=step == options.steps):
                report(saved=step, state=state_digest(model, optimizer))


def shard(model: ByteTransformer, ep: int) -> None:
    """Collective: shard a model over all ranks with FSDP2, in place; experts over ``ep`` ranks first, if it is not 0.

    A parameter of the experts becomes a DTensor on the mesh (efsdp, ep), which says which experts a rank has.
    """
    world_size = dist.get_world_size()
    all_ranks = init_device_mesh("cpu", (world_size,))
    if ep:
        mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("efsdp", "ep"))
        for experts in [module for module in model.modules() if isinstance(module, Experts)]:
            experts.split(mesh["ep"])
            fully_shard(experts, mesh=mesh["efsdp"])
    for block in model.blocks:
        fully_shard(block, mesh=all_ranks)
    fully_shard(model, mesh=all_ranks)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed options of a command line, by default of this process."""
    parser = argparse.ArgumentParser(description="Train a small transformer; go on from the newest checkpoint.")
    parser.add_argument("--dir", required=True, help="directory that all ranks share")
    parser.add_argument("--steps", type=int, default=32, help="training steps in all (32)")
    parser.add_argument("--interval", type=int, default=16, help="training steps between checkpoints (16)")
    parser.add_argument("--ep", type=int, default=0, help="train experts, split over so many ranks (0: no experts)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters, where there is no checkpoint (0)")
    parser.add_argument("--rendezvous", default="env://", help="init_method of the process group (env://, torchrun's)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, report: Callable[..., None] = print_line) -> None:
    """Train as one of the ranks that torchrun started, or as a single process."""
    options = parse(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it, and RANK
    refuse_ranks(world_size, options.ep)
    if world_size > 1:  # on GPUs: "nccl", torch.cuda.set_device, and "cuda" in the place of "cpu"
        dist.init_process_group("gloo", options.rendezvous, rank=int(os.environ["RANK"]), world_size=world_size)
    train(options, report)
    if world_size > 1:
        dist.destroy_process_group()


def refuse_ranks(world_size: int, ep: int) -> None:
    """Exit if the sequences of a step, or with experts the ranks, cannot be divided as the model needs it."""
    if world_size > BATCH:
        raise SystemExit(f"{world_size} ranks: a step has {BATCH} sequences, and each rank needs one")
    if ep and world_size > 1 and (BATCH % world_size or world_size % ep):
        raise SystemExit(
            f"--ep {ep} on {world_size} ranks: with experts their number must be a multiple of --ep, and divide the "
            f"{BATCH} sequences of a step"
        )


def mean(loss: torch.Tensor) -> float:
    """Collective: return the mean of the ranks' losses."""
    if not dist.is_initialized():
        return loss.item()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Collective: return a SHA-256 of model and optimizer, the same for any sharding of the same values.

    It proves that a load restores every bit. Leave it out of a real job: each rank gathers the global tensors.
    """
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    sha = hashlib.sha256()
    for part in get_state_dict(model, optimizer, options=options):
        values: dict[str, Any] = part
        for name, value in sorted(values.items()):
            if isinstance(value, torch.Tensor):
                sha.update(f"{name} {value.dtype} {value.shape}".encode())
                sha.update(tensor_bytes(plain_cpu(value)))
            else:  # the optimizer's options
                sha.update(f"{name} {value}".encode())
    return sha.hexdigest()


if __name__ == "__main__":
    main()
