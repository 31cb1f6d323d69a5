"""Every model of the zoo comes back as from ``torch.save``, or is refused by name: by adapters and managers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from tests import backends
from tests.adapters import zoo
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from tests.ranks import Ranks

pytestmark = [pytest.mark.filterwarnings(f"ignore:{warning}") for warning in zoo.WARNINGS]


def _optimizers(optimizer: Any) -> tuple[Any, ...]:
    return () if optimizer is None else (optimizer,)


@backends.both_in_proof
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


@table("name", list(zoo.ZOO))
def test_a_manager_restores_what_torch_does(tmp_path: Path, name: str) -> None:
    """Bits, dtypes, strides and types come back by a manager."""
    zoo.check_manager(name, tmp_path / "c", "disabled")


@table("name", zoo.FEW)
def test_a_save_in_the_background_is_what_torch_restores(tmp_path: Path, name: str) -> None:
    """Bits, dtypes, strides and types come back from a save that a thread writes."""
    zoo.check_manager(name, tmp_path / "c", "async")


def _resume_sharded(path: Path, name: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh)

    def load_by_torch(saved: Any, fresh: Any) -> None:
        fresh.load_state_dict(saved.state_dict())

    if name in zoo.NOT_SHARDED:
        with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=zoo.NOT_SHARDED[name]):
            shard(zoo.ZOO[name](2))
    else:
        _resume(name, path / "c", by_reference=load_by_torch, wrap=shard)


@table("name", [*zoo.FEW, *zoo.NOT_SHARDED])
def test_sharded_models_are_what_torch_restores(tmp_path: Path, ranks: Ranks, name: str) -> None:
    """Bits, dtypes, strides and types come back under FSDP2, by two ranks, of what it takes."""
    ranks.run(2, _resume_sharded, tmp_path, name)
