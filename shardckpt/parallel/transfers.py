"""Shards on their way from the rank that has read them to the ranks that want them, in rounds of bounded bytes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.distributed import Comm

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
        reader: The rank that has it.
        consumers: The ranks that want it, without the reader.
        device_type: Kind of device over which it goes: the CPU, or what the group's :meth:`Comm.moves`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reader: int
    consumers: tuple[int, ...]
    device_type: str = "cpu"


class _Parcel(NamedTuple):
    """A piece of a transfer; its tensor is on the meta device on ranks that it does not concern."""

    transfer: Transfer
    piece: torch.Tensor


def check_algorithm(name: str) -> None:
    """Raise :class:`CheckpointingException` if there is no such algorithm."""
    if name not in ALGORITHMS:
        raise CheckpointingException(f"no exchange_algo {name!r}: it is one of {', '.join(ALGORITHMS)}")


def exchange(
    transfers: Sequence[Transfer],
    tensors: Sequence[torch.Tensor | None],
    group: Comm,
    algorithm: str,
    round_bytes: int = ROUND_BYTES,
) -> None:
    """Fill the tensors of the consumers with those of the readers, straight from memory to memory where both allow it.

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
    """The parcels in rounds: all readers take turns, and no rank sends or receives more than the limit in one."""
    queues: dict[int, list[_Parcel]] = {}
    for parcels in transfers:
        for parcel in parcels:
            queues.setdefault(parcel.transfer.reader, []).append(parcel)
    batch: list[_Parcel] = []
    load: Counter[tuple[str, int]] = Counter()
    for parcel in itertools.chain.from_iterable(itertools.zip_longest(*queues.values())):
        if parcel is None:
            continue
        size = _nbytes(parcel.piece)
        ends = [("sends", parcel.transfer.reader), *(("receives", rank) for rank in parcel.transfer.consumers)]
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
    count = len(parcel.transfer.consumers)
    return count > 1 and count + 1 == group.world_size


def _point_to_point(batch: list[_Parcel], group: Comm, device_type: str) -> None:
    sends: list[tuple[torch.Tensor, int]] = []
    receives: list[tuple[torch.Tensor, int]] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer, piece in batch:
        if group.rank == transfer.reader:
            wire = _filled(piece, device_type)
            sends.extend((wire, rank) for rank in transfer.consumers)
        elif group.rank in transfer.consumers:
            wire = _memory(piece, device_type)
            receives.append((wire, transfer.reader))
            arriving.append((wire, piece))
    group.exchange(sends, receives, device_type)
    _land(arriving)


def _broadcast(batch: list[_Parcel], group: Comm, device_type: str) -> None:
    routes: list[tuple[torch.Tensor, int]] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer, piece in batch:
        if group.rank == transfer.reader:
            wire = _filled(piece, device_type)
        else:
            wire = _memory(piece, device_type)
            arriving.append((wire, piece))
        routes.append((wire, transfer.reader))
    group.broadcast_tensors(routes, device_type)
    _land(arriving)


def _move_pickled(batch: list[_Parcel], group: Comm) -> None:
    mine = {
        number: _filled(piece, "cpu").clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for number, (transfer, piece) in enumerate(batch)
        if transfer.reader == group.rank
    }
    everyone: list[dict[int, Any]] = group.all_gather(mine)
    for number, (transfer, piece) in enumerate(batch):
        if group.rank in transfer.consumers:
            piece.copy_(everyone[transfer.reader][number].view(piece.dtype).view(piece.shape))


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
