from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.distributed.comm import Comm
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.transfers import Transfer, exchange_shards

if TYPE_CHECKING:
    from tests.ranks import RankPool


def _received(shape: tuple[int, ...] = (2, 3), source_dtype: torch.dtype = torch.float32) -> list[Any]:
    """Whether what rank 1 receives is in the memory that was given: of the sent dtype, of another, none, quantized."""
    comm = Comm()
    data = {
        "same": torch.nn.Parameter(torch.zeros(2, 3)),
        "cast": torch.zeros(2, 3, dtype=torch.float64),
        "none": None,
        "quantized": torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8),
    }
    transfers = {name: Transfer((2, 3), torch.float32, 0, (1,)) for name in data}
    loaded = {name: torch.full(shape, 3.0, dtype=source_dtype) for name in transfers} if comm.rank == 0 else {}
    unloaded = {
        name: ShardedTensor(
            name, tensor, torch.float32 if tensor is None else tensor.dtype, (2, 3), (2, 3), (0, 0), None
        )
        for name, tensor in data.items()
    }
    received = exchange_shards(transfers, loaded, {} if comm.rank == 0 else unloaded, comm, "broadcast")
    assert all(tensor.dtype == torch.float32 and bool((tensor == 3).all()) for tensor in received.values())
    return [received[name] is data[name] for name in received]


def test_plain_destinations_are_filled_in_place(gloo_ranks: RankPool) -> None:
    """A shard arrives in its own memory where that is a plain tensor of the sent dtype, else in new memory."""
    assert gloo_ranks.run(2, _received) == [[], [True, False, False, False]]


@pytest.mark.parametrize("wrong", [((3, 2), torch.float32), ((2, 3), torch.float64)], ids=["shape", "dtype"])
def test_what_was_not_agreed_on_is_not_sent(gloo_ranks: RankPool, wrong: tuple[Any, ...]) -> None:
    """A source whose tensor has another shape or dtype than the transfer is the same error on all ranks."""
    outcomes = gloo_ranks.outcomes(2, _received, *wrong)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "shard same is" in outcomes[0].message
