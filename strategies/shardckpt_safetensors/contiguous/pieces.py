"""The assignment of bytes of the files with contiguous tensors to ranks, and the messages it needs.

A rank writes what it has of a payload if that is one range of many pages of the file. All other bytes go to the owner
of their part of the file, which writes them: a tensor that is cut along columns, a small one, the end of a range inside
of a page. So no page has two writers. Each payload of full pages has an owner, and so has the rest of each file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError
from shardckpt.planning import Box, assign_holders, cut_box, find_overlap, intersect
from shardckpt.storage import SMALL_RECORD
from shardckpt.tensors import PAGE, is_plain, plain_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.distributed import Comm
    from shardckpt.planning import Boxes
    from shardckpt_safetensors.contiguous.layout import FolderLayout

#: Bytes that a rank sends in a round, and that it receives, unless there are more ranks than MiB.
_ROUND_BYTES = 64 << 20
#: Most bytes of a message; less where a round has less for each rank.
_MESSAGE_BYTES = 4 << 20


class View(NamedTuple):
    """A box of values that this rank has of a payload, and the number of its box that has them."""

    item: int
    box: Box


class Write(NamedTuple):
    """Bytes of a file that this rank writes.

    Attributes:
        file: The number of the file.
        offset: Where they begin in it.
        source: The number of the tensor that has them: a view, or behind the views what was received.
        low: Where they begin in the tensor's bytes.
        high: Where they end.
        segments: Lengths of their segments.
        keys: How many payloads begin in them.
    """

    file: int
    offset: int
    source: int
    low: int
    high: int
    segments: list[int]
    keys: int


class Message(NamedTuple):
    """Values that go to the owner of a payload: a range of its bytes, or a box of its elements.

    Attributes:
        cut: The number of the payload.
        low: Where the range begins in the payload's bytes; 0 for a box.
        nbytes: Bytes of the message.
        box: The box, in the checkpoint's tensor; None for a range.
        source: The number of the sender's view that has them; -1 at the receiver.
        start: Where the range begins in that view's bytes.
    """

    cut: int
    low: int
    nbytes: int
    box: Box | None
    source: int = -1
    start: int = 0


class Buffer(NamedTuple):
    """Bytes of a file that this rank receives before it writes them: ``start`` to ``stop`` of a file."""

    file: int
    start: int
    stop: int


class Pieces(NamedTuple):
    """The bytes that a rank writes and sends.

    Attributes:
        views: The values that it has.
        writes: What it writes, from the views and then from the buffers.
        own: What it copies from views to buffers.
        sends: By rank, what it sends in each round.
        receives: By rank, what it receives in each round.
        buffers: What it receives it into.
        rounds: Number of rounds in which ranks send: the same on all.
    """

    views: list[View]
    writes: list[Write]
    own: list[Message]
    sends: dict[int, list[list[Message]]]
    receives: dict[int, list[list[Message]]]
    buffers: list[Buffer]
    rounds: int


def find_range(box: Box, outer: Box) -> int | None:
    """Return where the elements of a box begin in a row-major outer box if they are one range of it, else None."""
    behind = 1 + next((axis for axis, size in enumerate(box.shape) if size > 1), len(box.shape))
    if box.shape[behind:] != outer.shape[behind:]:
        return None
    start = 0
    for part, size in zip(box.within(outer), outer.shape, strict=True):
        start = start * size + part.start
    return start


def assign_owners(
    layout: FolderLayout, in_ranges: Sequence[bool], world_size: int, *, shared: bool
) -> tuple[list[int], list[int]]:
    """Return the rank that owns each payload, and the rank that owns the rest of each file.

    ``in_ranges`` says of each tensor whether all ranks have it in ranges, ``shared`` whether several ranks may write to
    a file; if not, a file has one owner.
    """
    everyone = tuple(range(world_size))
    if not shared:
        owners = assign_holders([everyone] * len(layout.files), [file.size for file in layout.files])
        return [owners[file] for file, _ in layout.places], owners
    is_large = [start < layout.files[file].rest for file, start in layout.places]
    # of a payload in ranges, an owner gets the ends of the ranges alone
    sizes = [
        (PAGE if in_ranges[cut.tensor] else cut.nbytes) if large else 0
        for cut, large in zip(layout.cuts, is_large, strict=True)
    ]
    rests = [file.size - file.rest + len(file.frame[0].data) for file in layout.files]
    owners = assign_holders([everyone] * (len(sizes) + len(rests)), sizes + rests)
    of_file = owners[len(sizes) :]
    places = zip(owners, layout.places, is_large, strict=False)
    return [owner if large else of_file[file] for owner, (file, _), large in places], of_file


def plan_pieces(
    layout: FolderLayout, boxes: Boxes, in_ranges: Sequence[bool], owners: Sequence[int], comm: Comm, *, shared: bool
) -> Pieces:
    """Collective: plan what this rank writes, sends and receives.

    The tensors of ``boxes``, which this rank has, are numbered as in the layout. ``owners`` are those of the payloads.
    It is a ShardingError if ranks send the same elements, or not all of a payload.
    """
    with comm.local_phase("planning contiguous tensors"):
        views, writes, messages = _plan_local(layout, boxes, in_ranges, owners, comm, shared=shared)
        own = messages.pop(comm.rank, [])
        described = {rank: _describe(some) for rank, some in messages.items()}
    arrived = comm.all_to_all(described)
    with comm.local_phase("planning contiguous tensors"):
        received = {rank: _parse(data) for rank, data in arrived.items()}
        buffers = _plan_buffers(layout, [*own, *(message for some in received.values() for message in some)])
        for number, (file, start, stop) in enumerate(buffers, len(views)):
            writes.append(_make_write(layout, file, start, number, 0, stop - start))
        sends, receives = (
            {rank: _cut_rounds(some, comm.world_size) for rank, some in each.items()} for each in (messages, received)
        )
        most = max(map(len, (*sends.values(), *receives.values())), default=0)
    (rounds,) = comm.largest(most)
    return Pieces(views, writes, own, sends, receives, buffers, rounds)


def _plan_local(
    layout: FolderLayout, boxes: Boxes, in_ranges: Sequence[bool], owners: Sequence[int], comm: Comm, *, shared: bool
) -> tuple[list[View], list[Write], dict[int, list[Message]]]:
    """Return the views of what this rank has, what it writes from them, and what goes to each owner."""
    cuts: list[list[int]] = [[] for _ in layout.tensors]
    for number, cut in enumerate(layout.cuts):
        cuts[cut.tensor].append(number)
    views: list[View] = []
    writes: list[Write] = []
    messages: dict[int, list[Message]] = {}
    most = min(_MESSAGE_BYTES, _count_round_bytes(comm.world_size))
    for item, (tensor, *held) in enumerate(zip(boxes.spec, boxes.offsets, boxes.extents, strict=True)):
        itemsize = layout.tensors[tensor].dtype.itemsize
        for number in cuts[tensor]:
            cut, (file, start), owner = layout.cuts[number], layout.places[number], owners[number]
            common = intersect(Box(*held), cut.box)
            if common is None:
                continue
            view, nbytes = len(views), common.volume * itemsize
            views.append(View(item, common))
            begin = find_range(common, cut.box) if in_ranges[tensor] else None
            outbox = messages.setdefault(owner, [])
            if begin is None:
                parts = cut_box(common, itemsize, most)
                outbox += [Message(number, 0, part.volume * itemsize, part, view) for part in parts]
                continue
            first = begin * itemsize
            low, high = -(start + first) % PAGE, nbytes - (start + first + nbytes) % PAGE
            if high - low <= SMALL_RECORD or not (shared or owner == comm.rank):
                low = high = nbytes
            else:
                writes.append(_make_write(layout, file, start + first + low, view, low, high))
            for begins, ends in ((0, low), (high, nbytes)):
                steps = [*range(begins, ends, most), ends]
                outbox += [Message(number, first + a, b - a, None, view, a) for a, b in pairwise(steps)]
    return views, writes, {rank: some for rank, some in messages.items() if some}


def _make_write(layout: FolderLayout, file: int, offset: int, source: int, low: int, high: int) -> Write:
    return Write(file, offset, source, low, high, *layout.segments(file, offset, offset + high - low))


def _describe(messages: Sequence[Message]) -> bytes:
    """Return what the receiver needs to know of messages: where in the payloads the values belong."""
    return json.dumps([message[:4] for message in messages], separators=(",", ":")).encode()


def _parse(data: bytes) -> list[Message]:
    return [Message(cut, low, nbytes, box and Box(*map(tuple, box))) for cut, low, nbytes, box in json.loads(data)]


def _plan_buffers(layout: FolderLayout, messages: Sequence[Message]) -> list[Buffer]:
    """Return the ranges of files that what is received fills, neighbours joined.

    It is a ShardingError if elements are received twice, or boxes do not fill their payload.
    """
    boxes: dict[int, list[Box]] = {}
    ranges = []
    for message in messages:
        if message.box is not None:
            boxes.setdefault(message.cut, []).append(message.box)
            continue
        file, start = layout.places[message.cut]
        ranges.append(Buffer(file, start + message.low, start + message.low + message.nbytes))
    for number, found in boxes.items():
        cut, (file, start) = layout.cuts[number], layout.places[number]
        if find_overlap(found) is not None or sum(box.volume for box in found) < cut.box.volume:
            raise _make_error(layout, number)
        ranges.append(Buffer(file, start, start + cut.nbytes))
    joined: list[Buffer] = []
    for file, start, stop in sorted(ranges):
        last = joined[-1] if joined and joined[-1].file == file else None
        if last is not None and start < last.stop:
            raise _make_error(layout, layout.find_cut(file, start))
        if last is not None and start == last.stop:
            joined[-1] = Buffer(file, last.start, stop)
        else:
            joined.append(Buffer(file, start, stop))
    return joined


def _make_error(layout: FolderLayout, number: int) -> ShardingError:
    key = layout.tensors[layout.cuts[number].tensor].key
    return ShardingError(
        f"the shards of all ranks do not fill 1 tensors exactly: {key!r}; save with validate_access_integrity=True to "
        "see which regions"
    )


def exchange_pieces(
    layout: FolderLayout, pieces: Pieces, values: Sequence[torch.Tensor], comm: Comm
) -> list[torch.Tensor]:
    """Collective: send and receive the values of the views; return the filled buffers, uint8 on the CPU.

    Rounds bound what else is in memory.
    """
    with comm.local_phase("planning the exchange of contiguous tensors"):
        buffers = [torch.empty(b.stop - b.start, dtype=torch.uint8, device="cpu") for b in pieces.buffers]
        for message in pieces.own:
            _fill(layout, pieces, buffers, message, _read_message(pieces, values, message))
    for number in range(pieces.rounds):
        with comm.local_phase("sending contiguous tensors"):
            going = [
                (_read_message(pieces, values, message), rank)
                for rank, batches in pieces.sends.items()
                for batch in batches[number : number + 1]
                for message in batch
            ]
            coming = [
                (torch.empty(message.nbytes, dtype=torch.uint8, device="cpu"), rank, message)
                for rank, batches in pieces.receives.items()
                for batch in batches[number : number + 1]
                for message in batch
            ]
        comm.exchange(going, [(received, rank) for received, rank, _ in coming])
        with comm.local_phase("sending contiguous tensors"):
            for received, _, message in coming:
                _fill(layout, pieces, buffers, message, received)
    return buffers


def _cut_rounds(messages: Sequence[Message], world_size: int) -> list[list[Message]]:
    """Cut the messages from one rank to another into rounds: sender and receiver cut the same."""
    most = _count_round_bytes(world_size)
    rounds: list[list[Message]] = []
    filled = most
    for message in messages:
        if filled + message.nbytes > most:
            rounds.append([])
            filled = 0
        rounds[-1].append(message)
        filled += message.nbytes
    return rounds


def _count_round_bytes(world_size: int) -> int:
    """Return the bytes that go from a rank to another in a round."""
    return max(_ROUND_BYTES // world_size, 1 << 20)


def select_box(values: torch.Tensor, box: Box, held: Box) -> torch.Tensor:
    """Return the view of a box of a tensor that holds another box; the tensor itself if that is the same."""
    return values if box == held else values[box.within(held)]


def _read_message(pieces: Pieces, values: Sequence[torch.Tensor], message: Message) -> torch.Tensor:
    """Return the bytes of a message."""
    found = values[message.source]
    if message.box is not None:
        return as_bytes(plain_cpu(select_box(found, message.box, pieces.views[message.source].box)))
    if not (is_plain(found) and found.is_contiguous()):
        found = plain_cpu(found)
    return as_bytes(found.detach())[message.start : message.start + message.nbytes].cpu()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8, on its device."""
    # a tensor of one element is contiguous with any stride, and torch views only those with a stride of 1 as bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _fill(
    layout: FolderLayout, pieces: Pieces, buffers: Sequence[torch.Tensor], message: Message, values: torch.Tensor
) -> None:
    """Put received values into the buffer that they belong to."""
    cut, (file, start) = layout.cuts[message.cut], layout.places[message.cut]
    at = start + message.low
    number = bisect_right(pieces.buffers, (file, at + 1)) - 1
    rest = buffers[number][at - pieces.buffers[number].start :]
    if message.box is None:
        rest[: message.nbytes] = values
        return
    itemsize = layout.tensors[cut.tensor].dtype.itemsize
    payload = rest[: cut.nbytes].view(*cut.box.shape, itemsize)
    payload[message.box.within(cut.box)] = values.view(*message.box.shape, itemsize)
