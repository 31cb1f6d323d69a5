"""A program of four ranks that load a model from each source: ``python -m tests.parallel.sources FOLDER``."""

from __future__ import annotations

import datetime as dt
import functools
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


RANKS = 4
SOURCES = ("huggingface", "manager", "dcp", "torch_dist", "store")
#: A shard is as long as several segments of a file's digests: a rank reads each segment that it needs a part of.
WIDTH, LAYERS = 1024, 3
MESHES = {"replicated": (), "sharded": (RANKS,), "hybrid": (2, 2)}
READS = ("read", "readv", "pread64", "preadv", "preadv2")


def make_model(sharding: str) -> torch.nn.Module:
    """The model under a sharding."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    if mesh := MESHES[sharding]:
        fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :]))
    return model


@functools.cache
def _make_expected() -> dict[str, torch.nn.Parameter]:
    return dict(make_model("replicated").named_parameters())


def _find_differences(model: torch.nn.Module) -> list[str]:
    expected = _make_expected()
    found = {
        name: parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def _load(source: str, folder: str, sharding: str) -> None:
    """Collective: load a model whose parameters are zero, with what several ranks want read once."""
    model = make_model(sharding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if source == "manager":
        config = CheckpointConfig(
            folder=f"{folder}-steps",
            initial_load_path=folder,
            initial_load_in_hf=True,
            fully_parallel_load=True,
        )
        with CheckpointManager(config, {"model": model}) as manager:
            manager.load()
    else:
        state = to_sharded_state_dict(model)
        if source == "huggingface":
            load_from_huggingface(state, folder, fully_parallel=True)
        else:
            dc.load(state, f"file://{folder}" if source == "store" else folder, fully_parallel=True)
    assert _find_differences(model) == []


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/group", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=dt.timedelta(seconds=120))
    try:
        for source in SOURCES:
            for sharding in MESHES:
                _load(source, f"{folder}/{source}-{sharding}", sharding)
    finally:
        dist.destroy_process_group()


def write_source(source: str, folder: Path) -> None:
    """Write a model as one of the sources."""
    model = make_model("replicated")
    if source == "dcp":
        dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    elif source in ("huggingface", "manager"):
        dc.save(to_sharded_state_dict(model), folder.with_name(f"{folder.name}-saved"))
        export_to_huggingface(folder.with_name(f"{folder.name}-saved"), folder)
    else:
        dc.save(to_sharded_state_dict(model), folder)


if __name__ == "__main__":
    mp.start_processes(_run_rank, (sys.argv[1],), RANKS, start_method="fork")  # torch is imported once
