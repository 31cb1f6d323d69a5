"""Quantized state of sharded parameters: torchao's blocks keep their bits where the ranks leave them whole."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict, wrappers
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

optim = pytest.importorskip("torchao.optim")

#: Four ranks have 4,096 elements of a weight each, the fewest that are quantized.
_ROWS, _COLUMNS = 256, 64


def _start(kind: str, rows: int = _ROWS) -> tuple[nn.Module, Any]:
    """Return a job, under FSDP2 where there are ranks."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(_COLUMNS, rows))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, getattr(optim, kind)(model.parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, _COLUMNS)).square().sum().backward()
    _step(optimizer)
    optimizer.zero_grad()


def _step(optimizer: Any) -> None:
    with torch.compiler.set_stance("force_eager"):  # a compiler is a process
        optimizer.step()


def _dequantize(model: Any, optimizer: Any) -> list[Any]:
    """Return the whole moments of the weight."""
    state = optimizer.state[model[0].weight]
    found = []
    for name in ("exp_avg", "exp_avg_sq"):
        value = state[name]
        if isinstance(value, DTensor):
            local = value.to_local()
            assert hasattr(local, "codes")  # it is quantized, as the optimizer makes it
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, local.dequantize())
            value = torch.cat(parts)
        else:
            value = value.dequantize()
        found.append(value.tolist())
    return found


def _save(kind: str, path: str, rows: int = _ROWS) -> list[Any]:
    job = _start(kind, rows)
    _train(*job)
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    return _dequantize(*job)


def _resume(kind: str, path: str) -> list[Any]:
    """Load into a job without state, return its state, and take a step."""
    job = _start(kind)
    load_into(dist_checkpointing.load(to_sharded_state_dict(*job), path), *job)
    found = _dequantize(*job)
    _train(*job)
    return found


@table(
    ("kind", "saved_at", "loaded_at"),
    # 0: without a process group; 4-bit has the shape of its shard in its context
    [("AdamW8bit", 0, 2), ("AdamW8bit", 2, 0), ("AdamW8bit", 2, 4), ("AdamW4bit", 2, 4), ("AdamWFp8", 2, 2)],
)
def test_blocks_are_those_of_the_save(tmp_path: Path, ranks: Ranks, kind: str, saved_at: int, loaded_at: int) -> None:
    """Any number of ranks gets the values of the blocks that others have saved, and trains on."""
    path = str(tmp_path / "c")
    expected = ranks.run(saved_at, _save, kind, path)[0] if saved_at else _save(kind, path)
    found = ranks.run(loaded_at, _resume, kind, path) if loaded_at else [_resume(kind, path)]
    assert all(each == expected for each in found)


def test_blocks_under_the_older_key_are_read(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of 27 November 2026 load into any number of ranks that leaves blocks whole."""
    with monkeypatch.context() as older:
        older.setattr(wrappers, "INNER", wrappers._OLD_INNER)
        expected = _save("AdamW4bit", str(tmp_path / "c"))
    assert _resume("AdamW4bit", str(tmp_path / "c")) == expected
    assert ranks.run(2, _resume, "AdamW4bit", str(tmp_path / "c")) == [expected] * 2


def _resume_by_values(path: str) -> list[Any]:
    """Return the whole moments that ranks get whose shards cut blocks."""
    model, optimizer = _start("AdamW8bit")
    load_into(dist_checkpointing.load(to_sharded_state_dict(model, optimizer), path), model, optimizer)
    state = optimizer.state[model[0].weight]
    assert type(state["exp_avg"].to_local()) is torch.Tensor  # as the optimizer makes it there
    found = [state[name].full_tensor().tolist() for name in ("exp_avg", "exp_avg_sq")]
    _train(model, optimizer)
    return found


def test_where_blocks_would_be_cut_values_are_loaded(tmp_path: Path, ranks: Ranks) -> None:
    """Three ranks would cut blocks, and the optimizer quantizes nothing there: they get the values, and train on."""
    expected = ranks.run(2, _save, "AdamW8bit", str(tmp_path / "c"))[0]
    assert ranks.run(3, _resume_by_values, str(tmp_path / "c")) == [expected] * 3


class _Half(torch.Tensor):
    """A tensor that keeps its values as float16, and whose context is its shape."""

    @staticmethod
    def __new__(cls: Any, _: torch.Tensor, shape: torch.Size) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, _: torch.Size) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], torch.Size]:
        return ["codes"], self.shape

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: torch.Size, *_: Any) -> _Half:
        return cls(inner["codes"], context)

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return self.codes.float().view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            raise NotImplementedError(func)
        return cls(args[0].codes, args[0].shape)


def _describe_half(path: str, *, saves: bool) -> list[Any]:
    """Save, or load, a state of the class; return the values of this rank's rows."""
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),)), 8 // dist.get_world_size()
    model = nn.Linear(4, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    values = torch.arange(32.0).view(8, 4)[rows * mesh.get_rank() :][:rows]
    if saves:
        state = DTensor.from_local(_Half(values.half().view(-1), values.shape), mesh, [Shard(0)], run_check=False)
        optimizer.state[model.weight]["momentum_buffer"] = state
        dist_checkpointing.save(to_sharded_state_dict(model, optimizer), path)
    else:
        load_into(dist_checkpointing.load(to_sharded_state_dict(model, optimizer), path), model, optimizer)
    found = optimizer.state[model.weight]["momentum_buffer"].to_local().dequantize()
    return [found.equal(values), tuple(found.shape)]


def test_a_context_may_be_the_shape(tmp_path: Path, ranks: Ranks) -> None:
    """The shape in the context of a class is that of the rank's part, wherever in the context it is."""
    assert ranks.run(2, partial(_describe_half, saves=True), str(tmp_path / "c")) == [[True, (4, 4)]] * 2
    assert ranks.run(4, partial(_describe_half, saves=False), str(tmp_path / "c")) == [[True, (2, 4)]] * 4


def _save_columns(path: str) -> bool:
    """Save and load quantized state of a weight that is sharded by columns."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(_COLUMNS, _ROWS, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    optimizer = optim.AdamW8bit(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    _step(optimizer)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), path)
    expected = [value.to_local().dequantize() for value in _list_moments(model, optimizer)]
    load_into(dist_checkpointing.load(to_sharded_state_dict(model, optimizer), path), model, optimizer)
    found = [value.to_local().dequantize() for value in _list_moments(model, optimizer)]
    return all(one.equal(other) for one, other in zip(found, expected, strict=True))


def _list_moments(model: Any, optimizer: Any) -> list[Any]:
    return [optimizer.state[model.weight][name] for name in ("exp_avg", "exp_avg_sq")]


def test_blocks_of_columns_are_stored_as_values(
    tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of columns are no parts of a whole: their values are stored, which one warning says."""
    monkeypatch.setattr("shardckpt.errors._warned", set())
    assert all(ranks.run(2, _save_columns, str(tmp_path / "c")))
    (warning,) = {record.getMessage() for record in caplog.records if record.name == wrappers.__name__}
    assert "placements (Shard(dim=1),), is stored dequantized" in warning
