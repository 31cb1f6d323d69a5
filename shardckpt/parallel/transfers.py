"""Send shards from the ranks that have them to the ranks that want them, in rounds of bounded bytes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from shardckpt.errors import CheckpointingException
from shardckpt.tensors.wrappers import copy_values

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.sharded_tensor import ShardedTensor

_K = TypeVar("_K", bound="Hashable")

#: Bytes that a rank sends, and bytes that it receives, at most in a round.
ROUND_BYTES = 64 * 2**20
#: Bytes below which a tensor is not split, unless a round is smaller.
_MESSAGE_BYTES = 2**20

#: "broadcast": point to point, or a broadcast if all ranks of the group want a shard. "gather_rounds": always point to
#: point. "gather_object": as pickles, to every rank, for debugging. "direct": no exchange, every rank reads for itself.
ALGORITHMS = ("broadcast", "gather_rounds", "gather_object", "direct")


class Transfer(NamedTuple):
    """A shard that one rank sends to others.

    Attributes:
        shape: Of the local tensor, as is the dtype.
        source: The rank that sends it.
        targets: The ranks that receive it; the source is not among them.
        device_type: Kind of device whose memory is sent: the CPU, or one whose tensors the group can send.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int
    targets: tuple[int, ...]
    device_type: str = "cpu"


class _Message(NamedTuple):
    """A transfer, and a part of its tensor; on the meta device on ranks that neither send nor receive it."""

    transfer: Transfer
    tensor: torch.Tensor


def check_algorithm(name: str, *, from_storage: bool = False) -> None:
    """Raise :class:`CheckpointingException` if there is no such algorithm.

    Only where shards are read from storage (``from_storage``), ``"direct"`` is one.
    """
    if name not in ALGORITHMS:
        raise CheckpointingException(f"no exchange_algo {name!r}: it is one of {', '.join(ALGORITHMS)}")
    if name == "direct" and not from_storage:
        raise CheckpointingException(
            "exchange_algo='direct' exchanges nothing: each rank reads for itself, and here nothing is read from "
            f"storage; pass one of {', '.join(ALGORITHMS[:-1])}"
        )


def choose_device(device_types: Collection[str], group: Comm) -> str:
    """Return the kind of device whose memory is sent when a shard is sent between tensors on these kinds of device.

    That is theirs if all are of one kind that the group can send, and else the CPU.
    """
    (first, *others) = set(device_types)
    return first if not others and group.moves(first) else "cpu"


def exchange_shards(
    transfers: Mapping[_K, Transfer],
    loaded: Mapping[_K, torch.Tensor],
    unloaded: Mapping[_K, ShardedTensor],
    group: Comm,
    algorithm: str,
    round_bytes: int = ROUND_BYTES,
) -> dict[_K, torch.Tensor]:
    """Collective: send this rank's shards to the ranks that want them, and receive the shards that it wants.

    Return the tensor of every shard that this rank received: the data of a shard in ``unloaded`` is filled if it is a
    plain tensor of the transfer's dtype, else it is new memory. All are by shard id. ``transfers`` is the same, in the
    same order, on every rank of the group. A rank that lacks a tensor that it should send or receive, or has one of
    another shape or dtype, is an error on every rank.
    """
    with group.collective_phase("preparing the exchange"):
        sent, received = {}, {}
        for shard, transfer in transfers.items():
            if group.rank == transfer.source:
                sent[shard] = _find_loaded(shard, transfer, loaded)
            elif group.rank in transfer.targets:
                received[shard] = _find_destination(shard, transfer, unloaded)
    if transfers:
        tensors = [sent.get(shard, received.get(shard)) for shard in transfers]
        exchange(list(transfers.values()), tensors, group, algorithm, round_bytes)
    return received


def is_fillable(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is plain memory that can be filled: no subclass, quantized, sparse or meta tensor."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return (
        type(tensor) in kinds
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def _find_loaded(shard: _K, transfer: Transfer, loaded: Mapping[_K, torch.Tensor]) -> torch.Tensor:
    if shard not in loaded:
        raise CheckpointingException(
            f"shard {shard} is not among the loaded tensors of rank {transfer.source}, which is to send it to others"
        )
    tensor = loaded[shard]
    if (tuple(tensor.shape), tensor.dtype) != (transfer.shape, transfer.dtype):
        raise _make_mismatch(shard, transfer, tuple(tensor.shape), tensor.dtype)
    return tensor


def _find_destination(shard: _K, transfer: Transfer, unloaded: Mapping[_K, ShardedTensor]) -> torch.Tensor:
    """Return the tensor that receives a shard: its own data if that fits, else new memory."""
    if shard not in unloaded:
        raise CheckpointingException(f"shard {shard} is not among the unloaded shards of a rank that is to receive it")
    wanted = unloaded[shard]
    if wanted.data_shape != transfer.shape:
        raise _make_mismatch(shard, transfer, wanted.data_shape, wanted.dtype)
    data = wanted.data
    if data is not None and data.dtype == transfer.dtype and is_fillable(data):
        return data
    return torch.empty(transfer.shape, dtype=transfer.dtype, device="cpu" if data is None else data.device)


def _make_mismatch(
    shard: object, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype
) -> CheckpointingException:
    return CheckpointingException(
        f"shard {shard} is {shape} {dtype} on this rank, and is to be sent as {transfer.shape} {transfer.dtype}: all "
        "ranks must give it the same shape and dtype"
    )


def exchange(
    transfers: Sequence[Transfer],
    tensors: Sequence[torch.Tensor | None],
    group: Comm,
    algorithm: str,
    round_bytes: int = ROUND_BYTES,
) -> None:
    """Collective: fill the tensors of the targets with the sources' tensors.

    Contiguous tensors on the right kind of device are sent and filled without a copy. Others are copied, and a rank
    holds copies of at most ``round_bytes`` in each direction. With ``"gather_object"`` every rank gets all shards.
    ``tensors`` has this rank's tensor of each transfer: the one to send or to fill, or None if it does neither. All
    else is the same on every rank of the group.
    """
    with group.collective_phase("exchanging shards"):
        for device_type in sorted({transfer.device_type for transfer in transfers}):
            messages = [
                _split_transfer(transfer, tensor, round_bytes, group.world_size)
                for transfer, tensor in zip(transfers, tensors, strict=True)
                if transfer.device_type == device_type
            ]
            for batch in _plan_rounds(messages, round_bytes):
                if algorithm == "gather_object":
                    _exchange_pickles(batch, group)
                else:
                    _run_round(batch, group, device_type, broadcasts=algorithm == "broadcast")


def _split_transfer(
    transfer: Transfer, tensor: torch.Tensor | None, round_bytes: int, world_size: int
) -> list[_Message]:
    """Split a transfer into parts that are small enough for all ranks to send in the same round."""
    # a round has room for a part of every rank, unless parts would be so small that the cost of a message dominates
    limit = max(round_bytes // world_size, min(round_bytes, _MESSAGE_BYTES))
    if tensor is None:
        # without memory: every rank must cut the same parts, and plan the same rounds, also other ranks'
        tensor = torch.empty(transfer.shape, dtype=transfer.dtype, device="meta")
    return [_Message(transfer, part) for part in _split_tensor(tensor.detach(), limit) if part.numel()]


def _split_tensor(tensor: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """Split a tensor along its outer axes; all ranks get the same parts, as these depend on shape and dtype alone."""
    if _nbytes(tensor) <= limit or tensor.numel() == 1:
        return [tensor]
    axis = next(axis for axis, extent in enumerate(tensor.shape) if extent > 1)
    return [part for half in tensor.chunk(2, axis) for part in _split_tensor(half, limit)]


def _plan_rounds(transfers: Sequence[list[_Message]], round_bytes: int) -> Iterator[list[_Message]]:
    """Yield the messages in rounds: sources take turns, and no rank sends or receives more than the limit in one."""
    queues: dict[int, list[_Message]] = {}
    for messages in transfers:
        for message in messages:
            queues.setdefault(message.transfer.source, []).append(message)
    batch: list[_Message] = []
    load: Counter[tuple[str, int]] = Counter()
    # in turns: one source's shards after another's would leave all other ranks idle
    for message in itertools.chain.from_iterable(itertools.zip_longest(*queues.values())):
        if message is None:
            continue
        size = _nbytes(message.tensor)
        ends = [("sends", message.transfer.source), *(("receives", rank) for rank in message.transfer.targets)]
        if batch and any(load[end] + size > round_bytes for end in ends):
            yield batch
            batch, load = [], Counter()
        batch.append(message)
        load.update(dict.fromkeys(ends, size))
    if batch:
        yield batch


def _run_round(batch: list[_Message], group: Comm, device_type: str, *, broadcasts: bool) -> None:
    """Collective: send and receive the messages, which are on such devices; broadcast messages that all ranks want."""
    routes: list[tuple[torch.Tensor, int]] = []  # buffers to broadcast, with their sources
    sends: list[tuple[torch.Tensor, int]] = []
    receives: list[tuple[torch.Tensor, int]] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer, part in batch:
        source, targets = transfer.source, transfer.targets
        if group.rank != source and group.rank not in targets:
            continue
        buffer = _find_buffer(part, device_type)
        if buffer is not part and group.rank == source:
            copy_values(buffer, part)
        elif buffer is not part:
            arriving.append((buffer, part))
        is_for_all = len(targets) == group.world_size - 1 and len(targets) > 1
        if broadcasts and is_for_all:
            routes.append((buffer, source))
        elif group.rank == source:
            sends.extend((buffer, rank) for rank in targets)
        else:
            receives.append((buffer, source))
    # Every rank has a part in each broadcast, so all have the same number of routes, and call the same two collectives.
    if routes:
        group.broadcast_tensors(routes, device_type)
    if len(routes) < len(batch):
        group.exchange(sends, receives, device_type)
    for buffer, part in arriving:
        copy_values(part, buffer)


def _exchange_pickles(batch: list[_Message], group: Comm) -> None:
    """Collective: send the messages of all ranks to all ranks, as uint8 tensors in pickles."""
    mine = {}
    for number, (transfer, part) in enumerate(batch):
        if transfer.source == group.rank:
            copy = torch.empty(part.shape, dtype=part.dtype, device="cpu")  # a pickled view has its base's memory
            copy_values(copy, part)
            mine[number] = copy.view(-1).view(torch.uint8)
    by_rank: list[dict[int, Any]] = group.all_gather(mine)
    for number, (transfer, part) in enumerate(batch):
        if group.rank in transfer.targets:
            copy_values(part, by_rank[transfer.source][number].view(part.dtype).view(part.shape))


def _find_buffer(part: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return the part itself if its memory can be sent and filled as it is, else new memory of its shape."""
    here = part.device.type == device_type
    if here and part.is_contiguous() and not part.is_conj() and not part.is_neg():
        return part
    return torch.empty(part.shape, dtype=part.dtype, device=part.device if here else device_type)


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
