"""Write the golden checkpoints of shardckpt's own formats: ``python -m tests.golden.write_own FOLDER``.

Done once for each release, by that release: what it wrote stays as it is, and every later release loads it. Names after
the folder are those that are written; by default all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from obstore.store import MemoryStore

from shardckpt import ShardedObject, ShardedTensor, dist_checkpointing
from shardckpt.huggingface import export_to_huggingface
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.local import TensorAwareStateDict, save_local
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import BlockScales
from shardckpt.testing import RankThreads
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.remote.obstore import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

WORLD = 2
COMMON = {"iteration": 17, "args": {"hidden_size": 8, "lr": 0.1, "names": ["a", "b"]}}
CONTENT = {"writer": "golden"}
_ROWS = ((8, 6), (4, 8), (5, 3))
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def make_tensors() -> dict[str, torch.Tensor]:
    """Return the global tensors: ``arange`` of their dtype, those of float8 by their bits."""
    tensors = {
        f"model.layer{number}.weight": torch.arange(rows * columns).reshape(rows, columns).to(dtype)
        for number, ((rows, columns), dtype) in enumerate(zip(_ROWS, _DTYPES, strict=True))
    }
    tensors["model.float8"] = torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 6)
    tensors["model.mask"] = torch.arange(6) % 3 == 0
    tensors["model.tied"] = tensors["model.layer0.weight"]
    tensors["model.scaled"] = torch.arange(64, dtype=torch.uint8).reshape(2, 32)
    tensors["model.scales"] = torch.tensor([[0.5], [2.0]])
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    tensors["empty"] = torch.zeros(0, 4)
    return tensors


def describe(rank: int, world: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state dict of a rank: matrices are cut by rows, unequally where the ranks do not divide them."""
    state: dict[str, Any] = {**COMMON}
    for key, tensor in tensors.items():
        if tensor.dim() == 2 and len(tensor) >= world:
            start, end = (len(tensor) * each // world for each in (rank, rank + 1))
            state[key] = ShardedTensor(
                key,
                tensor[start:end],
                tensor.dtype,
                local_shape=(end - start, tensor.shape[1]),
                global_shape=tuple(tensor.shape),
                global_offset=(start, 0),
                axis_fragmentations=None,
            )
        else:
            state[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    state["model.scaled"].block_scales = BlockScales("model.scales", (1, 32))
    state["rng"] = ShardedObject("rng", {"rank": rank, "state": torch.arange(4) + 10 * rank}, (world,), (rank,))
    return state


def train() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its AdamW and their schedule as after two steps; no number is computed, so that all know them."""
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(float(parameter.numel())).reshape(parameter.shape)
            moments = optimizer.state[parameter]
            for place, tensor in enumerate((parameter, moments["exp_avg"], moments["exp_avg_sq"])):
                tensor.copy_(values + 100 * number + 1000 * place)
    return model, optimizer, schedule


def _save(folder: Path, strategy: Any, **options: Any) -> None:
    state = describe(dist.get_rank(), WORLD, make_tensors())
    dist_checkpointing.save(state, folder, strategy, content_metadata=dict(CONTENT), **options)


def _save_steps(folder: Path, backend: str, **settings: Any) -> None:
    model, optimizer, schedule = train()
    config = CheckpointConfig(folder=folder, interval=1, strategy=backend, **settings)
    states = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    with CheckpointManager(config, states) as manager:
        manager.save(2, metrics={"loss": 0.25})


class InParts(SafetensorsSaveShardedStrategy):
    """Has an index in parts of about 4 boxes each, in pages of 2, whatever is saved."""

    caches_plan = True
    gathered_bytes: ClassVar[int] = 0
    part_rows: ClassVar[int] = 4
    page_rows: ClassVar[int] = 2


def serving_store(store: MemoryStore) -> AbstractContextManager[str]:
    """Serve the objects of a store below ``c`` by a URL, with the folders in it."""
    return serving(lambda url: ObstoreFolder(url, store, "c" + url.removeprefix("objects://bucket")))


def _overwrite_at_url(folder: Path) -> None:
    """Save twice to one URL, and copy what is there: the second save is in a folder that the marker names."""
    store = MemoryStore()
    with serving_store(store) as url:
        for _ in range(2):
            state = describe(0, 1, make_tensors())
            dist_checkpointing.save(state, url, "safetensors", content_metadata=dict(CONTENT), overwrite=True)
    for found in store.list().collect():
        path = folder / found["path"].removeprefix("c/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(store.get(found["path"]).bytes()))


def write(root: Path, names: Sequence[str] = ()) -> None:
    """Write them below a folder: those of these names, or all."""
    each: dict[str, Callable[[Path], None]] = {
        "torch_dist": lambda folder: _save(folder, "torch_dist"),
        "ep": lambda folder: _save(folder, "ep"),
        "safetensors": lambda folder: _save(folder, "safetensors"),
        "fingerprints": lambda folder: _save(folder, "torch_dist", fingerprints=True),
        "contiguous": lambda folder: _save(folder, SafetensorsSaveShardedStrategy(layout="contiguous")),
        "index_in_parts": lambda folder: _save(
            folder, InParts(layout=dict.fromkeys(("model.layer2.*", "model.mask"), "contiguous"), prefix="")
        ),
        "integrity": lambda folder: _save(folder, "torch_dist", verify_integrity=True),
    }
    for name, save in each.items():
        if not names or name in names:
            RankThreads().run(WORLD, save, root / name)
    alone: dict[str, Callable[[Path], Any]] = {
        "generation": _overwrite_at_url,
        "manager-torch_dist": lambda folder: _save_steps(folder, "torch_dist"),
        "manager-safetensors": lambda folder: _save_steps(folder, "safetensors"),
        "exported": lambda folder: export_to_huggingface(root / "manager-torch_dist" / "step-2", folder),
        "local": lambda folder: save_local(
            TensorAwareStateDict.from_state_dict(describe(0, 1, make_tensors()))[0], folder
        ),
    }
    for name, save in alone.items():
        if not names or name in names:
            save(root / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(sys.argv[1:])
    write(given.folder, given.names)
