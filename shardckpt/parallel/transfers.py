"""Transfers of shards from a rank that has them to the ranks that want them, in rounds of bounded bytes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedTensor

_K = TypeVar("_K", bound="Hashable")

#: Bytes that a rank sends, and bytes that it receives, at most in a round.
ROUND_BYTES = 64 * 2**20
#: Bytes below which a tensor is not taken apart, unless a round is smaller.
_PIECE_BYTES = 2**20

#: "broadcast": from rank to rank, or a true broadcast where the whole group wants a shard. "gather_rounds": all from
#: rank to rank. "gather_object": as pickles, to every rank, for debugging. "direct": every rank reads for itself.
ALGORITHMS = ("broadcast", "gather_rounds", "gather_object", "direct")


class Transfer(NamedTuple):
    """A shard that goes from one rank to others.

    Attributes:
        shape: Of the local tensor.
        dtype: Of the local tensor.
        source: The rank that has it.
        targets: The ranks that want it, without the source.
        device_type: Kind of device over which it goes: the CPU, or one whose tensors the group moves.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int
    targets: tuple[int, ...]
    device_type: str = "cpu"


class _Parcel(NamedTuple):
    """A piece of a transfer; its tensor is on the meta device on ranks that it does not concern."""

    transfer: Transfer
    piece: torch.Tensor


def check_algorithm(name: str, *, from_storage: bool = False) -> None:
    """Raise :class:`CheckpointingException` if there is no such algorithm.

    Args:
        name: The ``exchange_algo`` that the user gave.
        from_storage: Whether every rank could read its shards itself, so that ``"direct"`` is one.
    """
    if name not in ALGORITHMS:
        raise CheckpointingException(f"no exchange_algo {name!r}: it is one of {', '.join(ALGORITHMS)}")
    if name == "direct" and not from_storage:
        raise CheckpointingException(
            "exchange_algo='direct' exchanges nothing: each rank reads for itself, and here nothing is read from "
            f"storage; pass one of {', '.join(ALGORITHMS[:-1])}"
        )


def choose_device(device_types: Collection[str], group: Comm) -> str:
    """Return the kind of device over which a shard goes between tensors on such devices."""
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
    """Collective: send the shards that this rank has to those who want them, and receive those that it wants.

    Args:
        transfers: What goes where, by shard; the same, in the same order, on every rank of the group.
        loaded: The tensors that this rank has.
        unloaded: The shards that it wants; a shard's data is filled where it is a plain tensor of the same dtype.
        group: The ranks.
        algorithm: As for :func:`exchange`.
        round_bytes: As for :func:`exchange`.

    Returns:
        The tensor of every shard that this rank received: the shard's data, or new memory where that was not filled.

    Raises:
        CheckpointingException: the same on every rank: one lacks a tensor, or has one of another shape or dtype.
    """
    with group.collective_phase("preparing the exchange"):
        sent, received = {}, {}
        for shard, transfer in transfers.items():
            if group.rank == transfer.source:
                sent[shard] = _loaded_tensor(shard, transfer, loaded)
            elif group.rank in transfer.targets:
                received[shard] = _destination(shard, transfer, unloaded)
    if transfers:
        tensors = [sent.get(shard, received.get(shard)) for shard in transfers]
        exchange(list(transfers.values()), tensors, group, algorithm, round_bytes)
    return received


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is nothing but memory that can be filled."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return (
        type(tensor) in kinds
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def _loaded_tensor(shard: _K, transfer: Transfer, loaded: Mapping[_K, torch.Tensor]) -> torch.Tensor:
    if shard not in loaded:
        raise CheckpointingException(
            f"shard {shard} is not among the loaded tensors of rank {transfer.source}, from which others get it"
        )
    tensor = loaded[shard]
    if (tuple(tensor.shape), tensor.dtype) != (transfer.shape, transfer.dtype):
        raise _mismatch(shard, transfer, tuple(tensor.shape), tensor.dtype)
    return tensor


def _destination(shard: _K, transfer: Transfer, unloaded: Mapping[_K, ShardedTensor]) -> torch.Tensor:
    """Return the memory that a shard is received in."""
    if shard not in unloaded:
        raise CheckpointingException(f"shard {shard} is not among the unloaded shards of a rank that is to receive it")
    wanted = unloaded[shard]
    if wanted.data_shape != transfer.shape:
        raise _mismatch(shard, transfer, wanted.data_shape, wanted.dtype)
    data = wanted.data
    if data is not None and data.dtype == transfer.dtype and is_plain(data):
        return data
    return torch.empty(transfer.shape, dtype=transfer.dtype, device="cpu" if data is None else data.device)


def _mismatch(shard: object, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype) -> CheckpointingException:
    return CheckpointingException(
        f"shard {shard} is {shape} {dtype} on this rank, and is to be sent as {transfer.shape} {transfer.dtype}: all "
        "ranks must describe it alike"
    )


def exchange(
    transfers: Sequence[Transfer],
    tensors: Sequence[torch.Tensor | None],
    group: Comm,
    algorithm: str,
    round_bytes: int = ROUND_BYTES,
) -> None:
    """Collective: fill the tensors of the targets with those of the sources, from memory to memory where both allow it.

    Where one does not (not contiguous, on another kind of device), no rank holds copies of more than a round's bytes of
    either direction. Pickles are for debugging: every rank gets those of all.

    Args:
        transfers: What goes where; the same list on every rank of the group.
        tensors: This rank's tensor of each transfer: to send from, to fill, or None where it is no party.
        group: The ranks.
        algorithm: ``"broadcast"``, ``"gather_rounds"`` or ``"gather_object"``; the same on every rank.
        round_bytes: Bytes that a rank sends, and receives, at most before the next round; the same on every rank.
    """
    with group.collective_phase("exchanging shards"):
        for device_type in sorted({transfer.device_type for transfer in transfers}):
            parcels = [
                _parcels(transfer, tensor, round_bytes, group.world_size)
                for transfer, tensor in zip(transfers, tensors, strict=True)
                if transfer.device_type == device_type
            ]
            for batch in _rounds(parcels, round_bytes):
                _move(batch, group, algorithm, device_type)


def _parcels(transfer: Transfer, tensor: torch.Tensor | None, round_bytes: int, world_size: int) -> list[_Parcel]:
    """The transfer in pieces so small that all ranks can send in the same round."""
    limit = max(round_bytes // world_size, min(round_bytes, _PIECE_BYTES))
    if tensor is None:
        tensor = torch.empty(transfer.shape, dtype=transfer.dtype, device="meta")
    return [_Parcel(transfer, piece) for piece in _pieces(tensor.detach(), limit) if piece.numel()]


def _pieces(tensor: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """The tensor cut along its outer axes; the cuts depend on its shape and dtype alone."""
    if _nbytes(tensor) <= limit or tensor.numel() == 1:
        return [tensor]
    axis = next(axis for axis, extent in enumerate(tensor.shape) if extent > 1)
    return [piece for half in tensor.chunk(2, axis) for piece in _pieces(half, limit)]


def _rounds(transfers: Sequence[list[_Parcel]], round_bytes: int) -> Iterator[list[_Parcel]]:
    """The parcels in rounds: all sources take turns, and no rank sends or receives more than the limit in one."""
    queues: dict[int, list[_Parcel]] = {}
    for parcels in transfers:
        for parcel in parcels:
            queues.setdefault(parcel.transfer.source, []).append(parcel)
    batch: list[_Parcel] = []
    load: Counter[tuple[str, int]] = Counter()
    for parcel in itertools.chain.from_iterable(itertools.zip_longest(*queues.values())):
        if parcel is None:
            continue
        size = _nbytes(parcel.piece)
        ends = [("sends", parcel.transfer.source), *(("receives", rank) for rank in parcel.transfer.targets)]
        if batch and any(load[end] + size > round_bytes for end in ends):
            yield batch
            batch, load = [], Counter()
        batch.append(parcel)
        load.update(dict.fromkeys(ends, size))
    if batch:
        yield batch


def _move(batch: list[_Parcel], group: Comm, algorithm: str, device_type: str) -> None:
    if algorithm == "gather_object":
        _move_pickled(batch, group)
        return
    everyones = [parcel for parcel in batch if algorithm == "broadcast" and _is_for_all(parcel, group)]
    if everyones:
        _broadcast(everyones, group, device_type)
        batch = [parcel for parcel in batch if not _is_for_all(parcel, group)]
    if batch:
        _point_to_point(batch, group, device_type)


def _is_for_all(parcel: _Parcel, group: Comm) -> bool:
    """Whether every rank wants it, and there is more than one to send it to."""
    count = len(parcel.transfer.targets)
    return count > 1 and count + 1 == group.world_size


def _point_to_point(batch: list[_Parcel], group: Comm, device_type: str) -> None:
    sends: list[tuple[torch.Tensor, int]] = []
    receives: list[tuple[torch.Tensor, int]] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer, piece in batch:
        if group.rank == transfer.source:
            wire = _filled(piece, device_type)
            sends.extend((wire, rank) for rank in transfer.targets)
        elif group.rank in transfer.targets:
            wire = _memory(piece, device_type)
            receives.append((wire, transfer.source))
            arriving.append((wire, piece))
    group.exchange(sends, receives, device_type)
    _land(arriving)


def _broadcast(batch: list[_Parcel], group: Comm, device_type: str) -> None:
    routes: list[tuple[torch.Tensor, int]] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer, piece in batch:
        if group.rank == transfer.source:
            wire = _filled(piece, device_type)
        else:
            wire = _memory(piece, device_type)
            arriving.append((wire, piece))
        routes.append((wire, transfer.source))
    group.broadcast_tensors(routes, device_type)
    _land(arriving)


def _move_pickled(batch: list[_Parcel], group: Comm) -> None:
    mine = {
        number: _filled(piece, "cpu").clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for number, (transfer, piece) in enumerate(batch)
        if transfer.source == group.rank
    }
    everyone: list[dict[int, Any]] = group.all_gather(mine)
    for number, (transfer, piece) in enumerate(batch):
        if group.rank in transfer.targets:
            piece.copy_(everyone[transfer.source][number].view(piece.dtype).view(piece.shape))


def _filled(piece: torch.Tensor, device_type: str) -> torch.Tensor:
    """The piece's values in contiguous memory on such a device: its own if that is so already."""
    wire = _memory(piece, device_type)
    return wire if wire is piece else wire.copy_(piece)


def _memory(piece: torch.Tensor, device_type: str) -> torch.Tensor:
    """The piece itself if its memory can be sent and filled as it is, else new memory of its shape."""
    here = piece.device.type == device_type
    if here and piece.is_contiguous() and not piece.is_conj() and not piece.is_neg():
        return piece
    return torch.empty(piece.shape, dtype=piece.dtype, device=piece.device if here else device_type)


def _land(arriving: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy what could not be received in its place."""
    for wire, piece in arriving:
        if wire is not piece:
            piece.copy_(wire)


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


__all__ = ["ALGORITHMS", "ROUND_BYTES", "Transfer", "check_algorithm", "exchange"]
