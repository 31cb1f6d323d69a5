"""The assignment of bytes of the files with contiguous tensors to ranks, and the messages it needs.

A rank writes what it has of a payload if that is one range of many pages of the file. All other bytes go to the owner
of their part of the file, which writes them: a tensor that is cut along columns, a small one, the end of a range inside
of a page. So no page has two writers. Each payload of full pages has an owner, and so has the rest of each file.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import ShardingError
from shardckpt.planning import Box, assign_holders, find_hole, find_overlap, intersect
from shardckpt.storage import SMALL_RECORD
from shardckpt.tensors import PAGE, is_plain, plain_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.planning import Boxes, Ints
    from shardckpt_safetensors.contiguous.layout import FolderLayout

#: Bytes that a rank sends in a round, and that it receives, unless there are more ranks than MiB.
_ROUND_BYTES = 64 << 20
#: Most bytes of a message; less where a round has less for each rank.
_MESSAGE_BYTES = 4 << 20


class View(NamedTuple):
    """A view of values that this rank has of a payload: the number of its tensor, and the box of it, None for all."""

    item: int
    box: Box | None


class Write(NamedTuple):
    """Bytes of a file that this rank writes.

    Attributes:
        file: The number of the file.
        offset: Where they begin in it.
        source: The number of the tensor that has them: a view, or behind the views what was received.
        low: Where they begin in the tensor's bytes.
        high: Where they end.
    """

    file: int
    offset: int
    source: int
    low: int
    high: int


class Message(NamedTuple):
    """Values that go to another rank: a range of a payload's bytes, or a box of its elements.

    Attributes:
        cut: The number of the payload.
        source: The number of the view that has them; -1 at the receiver.
        low: Where the range begins in the view's bytes, or, at the receiver, in the payload's.
        nbytes: Bytes of the message.
        box: The box, in the view's elements, or, at the receiver, in the payload's; None for a range.
    """

    cut: int
    source: int
    low: int
    nbytes: int
    box: Box | None


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
        sends: By rank, what it sends, in order. What it sends to itself is copied.
        receives: By rank, what it receives, in the order in which it is sent.
        buffers: What it receives it into.
        rounds: Number of rounds in which ranks send: the same on all.
    """

    views: list[View]
    writes: list[Write]
    sends: dict[int, list[Message]]
    receives: dict[int, list[Message]]
    buffers: list[Buffer]
    rounds: int


def find_range(box: Box, shape: Ints) -> int | None:
    """Return where the elements of a box begin in a row-major tensor if they are one range of it, else None."""
    start = lead = 0
    while lead < len(shape) and box.shape[lead] == 1:
        lead += 1
    if any(box.shape[axis] != shape[axis] for axis in range(lead + 1, len(shape))):
        return None
    for first, size in zip(box.offset, shape, strict=True):
        start = start * size + first
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
        owners = assign_holders([everyone] * len(layout.files), [file.layout.size for file in layout.files])
        return [owners[file] for file, _ in layout.places], owners
    sizes = []
    for cut, (number, start) in zip(layout.cuts, layout.places, strict=True):
        is_large = start < layout.files[number].layout.rest
        # of a payload in ranges, an owner gets the ends of the ranges alone
        sizes.append((PAGE if in_ranges[cut.tensor] else cut.nbytes) if is_large else 0)
    rests = [file.layout.size - file.layout.rest + len(file.head) for file in layout.files]
    owners = assign_holders([everyone] * (len(sizes) + len(rests)), sizes + rests)
    of_file = owners[len(sizes) :]
    return [
        owner if start < layout.files[file].layout.rest else of_file[file]
        for owner, (file, start) in zip(owners, layout.places, strict=False)
    ], of_file


def plan_pieces(
    layout: FolderLayout,
    boxes: Boxes,
    in_ranges: Sequence[bool],
    owners: tuple[list[int], list[int]],
    comm: Comm,
    *,
    shared: bool,
) -> Pieces:
    """Collective: plan what this rank writes, sends and receives.

    The tensors of ``boxes``, which this rank has, are numbered as in the layout. It is a ShardingError if ranks send
    the same elements, or not all of a payload.
    """
    with comm.local_phase("planning contiguous tensors"):
        views, writes, sends = _plan_local(layout, boxes, in_ranges, owners[0], comm, shared=shared)
        mine = sends.get(comm.rank, [])
        described = {rank: _describe(layout, messages, views, boxes) for rank, messages in sends.items()}
    arrived = comm.all_to_all({rank: data for rank, data in described.items() if rank != comm.rank})
    if mine:
        arrived[comm.rank] = described[comm.rank]
    with comm.local_phase("planning contiguous tensors"):
        receives = {rank: _parse(data) for rank, data in sorted(arrived.items())}
        buffers = _plan_buffers(layout, receives)
        for number, buffer in enumerate(buffers):
            size = buffer.stop - buffer.start
            writes.append(Write(buffer.file, buffer.start, len(views) + number, 0, size))
        others = [messages for rank, messages in (*sends.items(), *receives.items()) if rank != comm.rank]
        most = max((len(_cut_rounds(messages, comm.world_size)) for messages in others), default=0)
    (rounds,) = comm.largest(most)
    return Pieces(views, writes, sends, receives, buffers, rounds)


def _plan_local(
    layout: FolderLayout, boxes: Boxes, in_ranges: Sequence[bool], owners: Sequence[int], comm: Comm, *, shared: bool
) -> tuple[list[View], list[Write], dict[int, list[Message]]]:
    """Return the views of what this rank has, what it writes from them, and what it sends."""
    cuts: list[list[int]] = [[] for _ in layout.tensors]
    for number, cut in enumerate(layout.cuts):
        cuts[cut.tensor].append(number)
    views: list[View] = []
    writes: list[Write] = []
    sends: dict[int, list[Message]] = {}
    most = _limit(comm.world_size)
    for item, (tensor, offset, extent) in enumerate(zip(boxes.spec, boxes.offsets, boxes.extents, strict=True)):
        held = Box(tuple(offset), tuple(extent))
        itemsize = layout.tensors[tensor].dtype.itemsize
        for number in cuts[tensor]:
            cut, (file, start), owner = layout.cuts[number], layout.places[number], owners[number]
            common = intersect(held, cut.box)
            if common is None:
                continue
            views.append(View(item, None if common == held else _relative(common, held)))
            view, nbytes = len(views) - 1, common.volume * itemsize
            outbox = sends.setdefault(owner, [])
            inner = _relative(common, cut.box)
            begin = find_range(inner, cut.box.shape) if in_ranges[tensor] else None
            if begin is None:
                boxed = _split_box(Box.from_shape(common.shape), itemsize, most)
                outbox += [Message(number, view, 0, box.volume * itemsize, box) for box in boxed]
                continue
            first = begin * itemsize
            low, high = -(start + first) % PAGE, nbytes - (start + first + nbytes) % PAGE
            if high - low <= SMALL_RECORD or not (shared or owner == comm.rank):
                low = high = nbytes
            else:
                writes.append(Write(file, start + first + low, view, low, high))
            for begins, ends in ((0, low), (high, nbytes)):
                steps = [*range(begins, ends, most), ends]
                outbox += [Message(number, view, a, b - a, None) for a, b in pairwise(steps)]
    return views, writes, {rank: messages for rank, messages in sends.items() if messages}


def _limit(world_size: int) -> int:
    return min(_MESSAGE_BYTES, max(_ROUND_BYTES // world_size, 1 << 20))


def _relative(box: Box, outer: Box) -> Box:
    return box.moved(tuple(-first for first in outer.offset))


def _split_box(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` bytes that make up a box, cut along its outer axes."""
    if box.volume * itemsize <= limit or box.volume == 1:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    half = box.shape[axis] // 2
    for first, size in ((0, half), (half, box.shape[axis] - half)):
        offset = (*box.offset[:axis], box.offset[axis] + first, *box.offset[axis + 1 :])
        yield from _split_box(Box(offset, (*box.shape[:axis], size, *box.shape[axis + 1 :])), itemsize, limit)


def _describe(layout: FolderLayout, messages: Sequence[Message], views: Sequence[View], boxes: Boxes) -> bytes:
    """Return what the receiver needs to know of messages: where in the payloads the values belong."""
    rows: list[list[Any]] = []
    for message in messages:
        cut = layout.cuts[message.cut]
        item, part = views[message.source]
        held = Box(tuple(boxes.offsets[item]), tuple(boxes.extents[item]))
        placed = _relative(held if part is None else part.moved(held.offset), cut.box)
        if message.box is None:
            begin = find_range(placed, cut.box.shape) or 0
            itemsize = layout.tensors[cut.tensor].dtype.itemsize
            rows.append([message.cut, message.nbytes, begin * itemsize + message.low])
        else:
            inner = message.box.moved(placed.offset)
            rows.append([message.cut, message.nbytes, [*inner.offset], [*inner.shape]])
    return json.dumps(rows, separators=(",", ":")).encode()


def _parse(data: bytes) -> list[Message]:
    messages = []
    for number, nbytes, first, *shape in json.loads(data):
        if shape:
            messages.append(Message(number, -1, 0, nbytes, Box(tuple(first), tuple(shape[0]))))
        else:
            messages.append(Message(number, -1, first, nbytes, None))
    return messages


def _plan_buffers(layout: FolderLayout, receives: Mapping[int, Sequence[Message]]) -> list[Buffer]:
    """Return the ranges of files that what is received fills, neighbours joined.

    It is a ShardingError if elements are received twice, or boxes do not fill their payload.
    """
    boxes: dict[int, list[Box]] = {}
    ranges = []
    for message in (message for messages in receives.values() for message in messages):
        if message.box is not None:
            boxes.setdefault(message.cut, []).append(message.box)
            continue
        file, start = layout.places[message.cut]
        ranges.append(Buffer(file, start + message.low, start + message.low + message.nbytes))
    for number, found in boxes.items():
        cut, (file, start) = layout.cuts[number], layout.places[number]
        if find_overlap(found) is not None or find_hole(cut.box.shape, found) is not None:
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
    layout: FolderLayout, pieces: Pieces, views: Sequence[torch.Tensor], comm: Comm
) -> list[torch.Tensor]:
    """Collective: send and receive the values; return the filled buffers, uint8 on the CPU.

    Rounds bound what else is in memory.
    """
    with comm.local_phase("planning the exchange of contiguous tensors"):
        buffers = [torch.empty(b.stop - b.start, dtype=torch.uint8, device="cpu") for b in pieces.buffers]
        sends = {rank: _cut_rounds(messages, comm.world_size) for rank, messages in pieces.sends.items()}
        receives = {rank: _cut_rounds(messages, comm.world_size) for rank, messages in pieces.receives.items()}
        for message, target in zip(pieces.sends.get(comm.rank, ()), pieces.receives.get(comm.rank, ()), strict=True):
            _fill(layout, pieces, buffers, target, _take(views, message))
        sends.pop(comm.rank, None)
        receives.pop(comm.rank, None)
    for number in range(pieces.rounds):
        with comm.local_phase("sending contiguous tensors"):
            going = [
                (_take(views, message), rank)
                for rank, batches in sends.items()
                for message in (batches[number] if number < len(batches) else ())
            ]
            coming = [
                (torch.empty(message.nbytes, dtype=torch.uint8, device="cpu"), rank, message)
                for rank, batches in receives.items()
                for message in (batches[number] if number < len(batches) else ())
            ]
        comm.exchange(going, [(values, rank) for values, rank, _ in coming])
        with comm.local_phase("sending contiguous tensors"):
            for values, _, message in coming:
                _fill(layout, pieces, buffers, message, values)
    return buffers


def _cut_rounds(messages: Sequence[Message], world_size: int) -> list[list[Message]]:
    """Cut the messages from one rank to another into rounds: sender and receiver cut the same."""
    most = max(_ROUND_BYTES // world_size, _limit(world_size))
    rounds: list[list[Message]] = []
    filled = most
    for message in messages:
        if filled + message.nbytes > most:
            rounds.append([])
            filled = 0
        rounds[-1].append(message)
        filled += message.nbytes
    return rounds


def view_part(tensors: Sequence[torch.Tensor], view: View) -> torch.Tensor:
    """Return a view of one of the rank's tensors."""
    tensor = tensors[view.item]
    if view.box is None:
        return tensor
    slices = (slice(first, first + size) for first, size in zip(view.box.offset, view.box.shape, strict=True))
    return tensor[tuple(slices)]


def _take(views: Sequence[torch.Tensor], message: Message) -> torch.Tensor:
    """Return the bytes of a message."""
    values = views[message.source]
    if message.box is not None:
        box = message.box
        values = values if box.shape == tuple(values.shape) else view_part([values], View(0, box))
        return as_bytes(plain_cpu(values))
    end = message.low + message.nbytes
    if is_plain(values) and values.is_contiguous():
        return as_bytes(values.detach())[message.low : end].cpu()
    return as_bytes(plain_cpu(values))[message.low : end]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8, on its device."""
    # a tensor of one element is contiguous with any stride, and torch views only those with a stride of 1 as bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _fill(
    layout: FolderLayout, pieces: Pieces, buffers: Sequence[torch.Tensor], message: Message, values: torch.Tensor
) -> None:
    """Put received values into the buffer that they belong to."""
    cut, (file, start) = layout.cuts[message.cut], layout.places[message.cut]
    at = start if message.box is not None else start + message.low
    number = bisect_right(pieces.buffers, (file, at + 1)) - 1
    base = at - pieces.buffers[number].start
    if message.box is None:
        buffers[number][base : base + message.nbytes] = values
        return
    itemsize = layout.tensors[cut.tensor].dtype.itemsize
    shape = (*cut.box.shape[:-1], cut.box.shape[-1] * itemsize) if cut.box.shape else (itemsize,)
    box = message.box
    offset = (*box.offset[:-1], box.offset[-1] * itemsize) if box.offset else (0,)
    extent = (*box.shape[:-1], box.shape[-1] * itemsize) if box.shape else (itemsize,)
    target = buffers[number][base : base + math.prod(shape)].view(shape)
    for axis, (first, size) in enumerate(zip(offset, extent, strict=True)):
        target = target.narrow(axis, first, size)
    target.copy_(values.view(extent))
