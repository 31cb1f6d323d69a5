"""Saves from a GPU and loads onto it; skipped where there is none."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.adapters.same import is_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = (
    *(torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)
SHAPE = (96, 64)


def _values(*, filled: bool) -> dict[str, torch.Tensor]:
    """A tensor of each dtype on the GPU, and one that is strided there."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in DTYPES:
        numbers = torch.randint(0, 100, SHAPE, generator=generator)
        found[str(dtype)] = (numbers % 2 if dtype == torch.bool else numbers).to(dtype).cuda()
    found["strided"] = torch.rand(SHAPE, generator=generator).cuda().t()
    return found if filled else {name: torch.zeros_like(value) for name, value in found.items()}


def _shards(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: ShardedTensor.from_rank_offsets(name, value) for name, value in values.items()}


def _different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names whose values differ in a bit, or lie elsewhere."""
    return [
        name
        for name, value in expected.items()
        if found[name].device != value.device
        or not torch.equal(found[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
    ]


@backends.both
@pytest.mark.parametrize("onto", ["cuda", "cpu"])
def test_values_come_back_bit_for_bit(tmp_path: Path, onto: str) -> None:
    """What was saved from a GPU loads onto a GPU or a CPU with each bit, whatever its dtype and strides."""
    dc.save(_shards(_values(filled=True)), tmp_path / "c")
    wanted = {name: value.to(onto) for name, value in _values(filled=False).items()}
    loaded = dc.load(_shards(wanted), tmp_path / "c")
    expected = {name: value.to(onto) for name, value in _values(filled=True).items()}
    assert _different(loaded, expected) == []
    assert _different(wanted, expected) == []  # in place


@backends.both
@pytest.mark.parametrize("persistent", [False, True], ids=["thread", "process"])
def test_a_background_save_has_the_values_of_its_step(tmp_path: Path, *, persistent: bool) -> None:
    """A training that changes its weights on the GPU at once, and queued before, changes nothing of the save."""
    weight = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # the save begins while the step still runs
    weight.add_(1.0)
    with AsyncCallsQueue(persistent=persistent) as queue:
        state = {"w": ShardedTensor.from_rank_offsets("w", weight)}
        queue.schedule_async_request(dc.save(state, tmp_path / "c", async_sharded_save=True))
        weight.mul_(5.0)
        queue.maybe_finalize_async_calls(blocking=True)
    loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.empty_like(weight))}, tmp_path / "c")
    assert loaded["w"].unique().tolist() == [1.0]


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A group of one rank, as NCCL allows on one GPU."""
    store = dist.FileStore(str(tmp_path / "group"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=120))
    yield
    dist.destroy_process_group()


def _train(folder: Path, mode: str, steps: range, save_at: int) -> list[float]:
    """Train an FSDP2 model in bfloat16 with fused AdamW from its newest step on, and return the losses."""
    torch.manual_seed(len(steps))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    config = CheckpointConfig(folder=str(folder), interval=1, async_mode=mode, keep_latest_k=0)
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        manager.load()
        for step in steps:
            inputs = torch.randn(32, 64, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == save_at:
                manager.save(step)
    return losses


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_training_over_nccl_resumes_bit_for_bit(tmp_path: Path, nccl: None, mode: str) -> None:
    """FSDP2 with mixed precision and fused AdamW goes on from each mode's step with the losses of an unbroken run."""
    unbroken = _train(tmp_path / "steps", mode, range(1, 7), save_at=3)
    assert _train(tmp_path / "steps", mode, range(4, 7), save_at=0) == unbroken[3:]


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "capturable": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1, device="cuda"), capturable=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_optimizers_get_state_where_it_was(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Moments, steps and learning rates are on the devices of the save, with its bits, and so are the next steps."""

    def job() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to("cuda", dtype)
        return model, OPTIMIZERS[name](model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(torch.ones(2, 16, device="cuda", dtype=dtype)).square().sum()
            value.backward()
            return value

        for _ in range(steps):
            optimizer.step(loss)  # type: ignore[arg-type]

    (model, optimizer), (other, fresh) = job(), job()
    train(model, optimizer, 2)
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "c")
    load_into(dc.load(to_sharded_state_dict(other, fresh), tmp_path / "c"), other, fresh)
    assert is_same(fresh.state_dict(), optimizer.state_dict())
    for each in ((model, optimizer), (other, fresh)):
        train(*each, 2)
    assert is_same(fresh.state_dict(), optimizer.state_dict())
    assert is_same(other.state_dict(), model.state_dict())
