from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.transfers import Transfer, exchange, exchange_shards
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from tests.ranks import Ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

SHAPES = ((), (1,), (7,), (0,), (3, 0, 2), (5, 6), (1, 40), (2, 3, 4), (1, 1, 33))
ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
LAYOUTS = ("contiguous", "transposed", "strided", "parameter", "conj")


class CountingComm(Comm):
    """Notes what goes through each call of the primitives, before it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.received: list[int] = []
        self.broadcasts: list[int] = []

    def exchange(self, sends: Any, receives: Any, device_type: str = "cpu") -> None:
        """Note the bytes of the round: a tensor that goes to several ranks is in memory once."""
        self.sent.append(sum({id(tensor): tensor.nbytes for tensor, _ in sends}.values()))
        self.received.append(sum(tensor.nbytes for tensor, _ in receives))
        super().exchange(sends, receives, device_type)

    def broadcast_tensors(self, routes: Any, device_type: str = "cpu") -> None:
        """Note the bytes that come to this rank."""
        self.broadcasts.append(sum(tensor.nbytes for tensor, rank in routes if rank != self.rank))
        super().broadcast_tensors(routes, device_type)


def _content(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(math.prod(shape)).reshape(shape) % 5 + 1
    values = numbers.to(torch.float32).to(dtype) if dtype != torch.bool else numbers % 2 == 0
    return values * 1j if dtype.is_complex else values


def _destination(like: torch.Tensor, layout: str) -> torch.Tensor:
    """Memory of the same shape and dtype, laid out in several ways, with other content."""
    if layout == "transposed":
        return torch.zeros(tuple(reversed(like.shape)), dtype=like.dtype).permute([*reversed(range(like.dim()))])
    if layout == "strided":
        return torch.zeros((*like.shape, 2), dtype=like.dtype)[..., 0]
    if layout == "parameter":
        return torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype), requires_grad=like.is_floating_point())
    if layout == "conj":
        return torch.zeros(like.shape, dtype=like.dtype).conj()
    return torch.zeros(like.shape, dtype=like.dtype)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    kind = torch.complex64 if expected.is_complex() else torch.float64
    return found.dtype == expected.dtype and torch.equal(found.detach().to(kind), expected.to(kind))


def _moves(algorithm: str, round_bytes: int) -> tuple[list[str], list[list[int]]]:
    comm = CountingComm()
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    transfers, tensors, wanted = [], [], []
    for number, (shape, dtype) in enumerate(kinds):
        source = number % comm.world_size
        others = [rank for rank in range(comm.world_size) if rank != source]
        targets = tuple(others[: 1 + number % len(others)])
        transfers.append(Transfer(shape, dtype, source, targets))
        content, layout = _content(shape, dtype), LAYOUTS[(number + comm.rank) % len(LAYOUTS)]
        tensor = None
        if comm.rank == source or comm.rank in targets:
            tensor = _destination(content, layout)
        if comm.rank == source:
            tensor.detach().copy_(content)
        tensors.append(tensor)
        wanted.append(content)
    exchange(transfers, tensors, comm, algorithm, round_bytes)
    pairs = zip(kinds, tensors, wanted, strict=True)
    wrong = [str(kind) for kind, tensor, content in pairs if tensor is not None and not _same(tensor, content)]
    return wrong, [comm.sent, comm.received, comm.broadcasts]


@pytest.mark.parametrize("round_bytes", [32, *in_proof(100, 2**26)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_kinds_of_tensors_arrive(ranks: Ranks, algorithm: str, round_bytes: int) -> None:
    """Every dtype, shape and layout arrives bit for bit, whole or in pieces, and no round is larger than allowed."""
    for wrong, rounds in ranks.run(3, _moves, algorithm, round_bytes):
        assert wrong == []
        assert all(size <= round_bytes for sizes in rounds for size in sizes)
        assert (len(rounds[0]) > 10) == (round_bytes < 2**20 and algorithm != "gather_object")
        assert bool(rounds[2]) == (algorithm == "broadcast")


def _send_columns(algorithm: str, dtype: torch.dtype) -> list[int]:
    comm = Comm()
    memory = torch.full((3, 4), comm.rank, dtype=torch.uint8)
    exchange([Transfer((4, 3), dtype, 1, (0,))], [memory.view(dtype).t()], comm, algorithm)
    return memory.view(-1).tolist()


@table("dtype", [torch.int4, torch.uint4, torch.float4_e2m1fn_x2])
@table("algorithm", ALGORITHMS)
def test_dtypes_that_torch_cannot_copy_arrive(ranks: Ranks, algorithm: str, dtype: torch.dtype) -> None:
    """Tensors of 4 bits are copied where they must be: with strides, and to be pickled."""
    assert ranks.run(2, _send_columns, algorithm, dtype) == [[1] * 12] * 2


def _receives(algorithm: str) -> tuple[int, int]:
    comm = CountingComm()
    routes = [(100, 0, (1, 2, 3)), (1000, 1, (2,)), (10, 0, (2, 3))]
    transfers = [Transfer((size,), torch.int8, source, targets) for size, source, targets in routes]
    tensors = [
        torch.full(transfer.shape, 1 if comm.rank == transfer.source else 0, dtype=torch.int8)
        if comm.rank in (transfer.source, *transfer.targets)
        else None
        for transfer in transfers
    ]
    exchange(transfers, tensors, comm, algorithm)
    assert all(tensor.all() for tensor in tensors if tensor is not None)
    return sum(comm.received), sum(comm.broadcasts)


@pytest.mark.parametrize(("algorithm", "everyones"), [("gather_rounds", 0), ("broadcast", 100)])
def test_shards_go_to_those_who_want_them(ranks: Ranks, algorithm: str, everyones: int) -> None:
    """A rank receives what it wants and nothing else; what the whole group wants is broadcast if so asked."""
    wanted = [0, 100, 1110, 110]
    received = ranks.run(4, _receives, algorithm)
    assert [broadcast for _, broadcast in received] == [0, everyones, everyones, everyones]
    assert [got for got, _ in received] == [max(want - everyones, 0) for want in wanted]


def _in_a_subgroup() -> list[float]:
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    comm = Comm(groups[0] if dist.get_rank() % 2 else groups[1])
    tensor = torch.full((4,), float(dist.get_rank()))
    exchange([Transfer((4,), torch.float32, 1, (0,))], [tensor], comm, "gather_rounds")
    return tensor.tolist()


def test_ranks_are_those_of_the_group(ranks: Ranks) -> None:
    """In a sub-group its own numbers count, whatever the ranks are called in the whole job."""
    assert [values[0] for values in ranks.run(4, _in_a_subgroup)] == [2.0, 3.0, 2.0, 3.0]


def _with_one_tensor_too_few() -> None:
    comm = Comm()
    exchange([Transfer((2,), torch.float32, 0, (1,))], [torch.zeros(2)] if comm.rank == 0 else [], comm, "broadcast")


def test_an_error_before_the_exchange_is_everyones(ranks: Ranks) -> None:
    """A rank that cannot take part keeps the others out of the exchange: all raise its error."""
    outcomes = ranks.outcomes(2, _with_one_tensor_too_few)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "rank 1, in 'exchanging shards'" in outcomes[0].message


def test_what_a_target_lacks_or_has_otherwise_is_named() -> None:
    """A rank that is to receive a shard, and has not described it or has another shape of it, says which."""
    transfers = {"w": Transfer((3,), torch.float32, 1, (0,))}
    with pytest.raises(CheckpointingException, match="shard w is not among the unloaded shards"):
        exchange_shards(transfers, {}, {}, Comm(), "broadcast")
    wanted = ShardedTensor("w", None, torch.float32, (2,), (2,), (0,), None)
    with pytest.raises(CheckpointingException, match=r"shard w is \(2,\) torch.float32 on this rank"):
        exchange_shards(transfers, {}, {"w": wanted}, Comm(), "broadcast")
