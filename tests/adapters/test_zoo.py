"""Every model of the zoo comes back as from ``torch.save``, or is refused by name: by adapters and managers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests import backends
from tests.adapters import zoo
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from tests.ranks import Ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
]


def _optimizers(optimizer: Any) -> tuple[Any, ...]:
    return () if optimizer is None else (optimizer,)


@backends.both
@table("name", list(zoo.ZOO))
def test_adapters_restore_what_torch_does(tmp_path: Path, name: str) -> None:
    """Bits, dtypes, strides and types of each model and its optimizer come back by the adapters."""
    _resume(name, tmp_path / "c")


def _resume(name: str, path: Path, **options: Any) -> None:
    def save(model: nn.Module, optimizer: Any) -> None:
        state = to_sharded_state_dict(model, *_optimizers(optimizer), prefix=_prefix(optimizer))
        dist_checkpointing.save(state, path)

    def load(model: nn.Module, optimizer: Any) -> None:
        state = to_sharded_state_dict(model, *_optimizers(optimizer), prefix=_prefix(optimizer))
        load_into(dist_checkpointing.load(state, path, on_unused="error"), model, *_optimizers(optimizer))

    zoo.check(name, save, load, **options)


def _prefix(optimizer: Any) -> str:
    """Return what makes keys of a model those that it has beside an optimizer."""
    return "model." if optimizer is None else ""


@backends.both_in_proof
@pytest.mark.parametrize("mode", ["disabled", "async"])  # another process copies what the thread does
@table("name", list(zoo.ZOO))
def test_a_manager_restores_what_torch_does(tmp_path: Path, name: str, mode: Any) -> None:
    """Bits, dtypes, strides and types come back by a manager, whether training waits for the save or goes on."""
    config = CheckpointConfig(folder=str(tmp_path / "c"), interval=1, async_mode=mode, keep_latest_k=0)

    def states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}

    def save(model: nn.Module, optimizer: Any) -> None:
        with CheckpointManager(config, states(model, optimizer)) as manager:
            manager.save(1)

    def load(model: nn.Module, optimizer: Any) -> None:
        with CheckpointManager(config, states(model, optimizer)) as manager:
            manager.load()

    zoo.check(name, save, load)


def _resume_sharded(path: Path) -> None:
    """Save and load all models that FSDP2 takes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh)

    def load_by_torch(saved: Any, fresh: Any) -> None:
        fresh.load_state_dict(saved.state_dict())

    for number, name in enumerate(zoo.ZOO):
        if name in zoo.NOT_SHARDED:
            with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=zoo.NOT_SHARDED[name]):
                shard(zoo.ZOO[name](2))
            continue
        try:
            _resume(name, path / f"{number}", by_reference=load_by_torch, wrap=shard)
        except Exception as error:
            error.add_note(f"the model {name!r}")
            raise


@backends.both_in_proof
def test_sharded_models_are_what_torch_restores(tmp_path: Path, ranks: Ranks) -> None:
    """Bits, dtypes, strides and types come back under FSDP2, by two ranks."""
    ranks.run(2, _resume_sharded, tmp_path)
