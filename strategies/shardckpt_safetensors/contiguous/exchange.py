"""Assign the bytes of the files with contiguous tensors to ranks, and exchange the values that others write.

A rank writes its own part of a payload if that is one range of many pages of the file. All other bytes go to the owner
of the payload, which writes them: of a tensor that is split by columns, of a small one, and the ends of a range inside
of pages. So no page has two writers. Each payload of full pages has an owner, and so has the rest of each file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError
from shardckpt.planning import Box, assign_holders, cut_box, cut_flat_range, find_overlap, intersect
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
    """The part of a payload that one of this rank's boxes has: the number of that box, and the part itself."""

    item: int
    box: Box


class Write(NamedTuple):
    """Bytes of a file that this rank writes.

    Attributes:
        file: The number of the file.
        offset: Where they begin in the file.
        source: The number of the tensor that has them: first come the views, then the buffers.
        start: Where they begin in the tensor's bytes.
        stop: Where they end there.
        segments: Lengths of their segments.
        keys: How many payloads begin in them.
    """

    file: int
    offset: int
    source: int
    start: int
    stop: int
    segments: list[int]
    keys: int


class Message(NamedTuple):
    """Values that go to the owner of a payload: a range of its bytes, or a box of its elements.

    Attributes:
        payload: The number of the payload.
        offset: Where the range begins in the payload's bytes; 0 for a box.
        nbytes: Bytes of the message.
        box: The box, in the checkpoint's tensor; None for a range.
        source: The number of the sender's view that has the values; -1 at the receiver.
        source_offset: Where the range begins in that view's bytes.
    """

    payload: int
    offset: int
    nbytes: int
    box: Box | None
    source: int = -1
    source_offset: int = 0


class Buffer(NamedTuple):
    """The bytes ``start`` to ``stop`` of a file, which this rank receives before it writes them."""

    file: int
    start: int
    stop: int


class ExchangePlan(NamedTuple):
    """The bytes that a rank writes, sends and receives.

    Attributes:
        views: The parts of payloads that it has.
        writes: The ranges that it writes, from the views and then from the buffers.
        own: The parts that it copies from views to buffers.
        sends: The messages that it sends in each round, by receiver.
        receives: The messages that it receives in each round, by sender.
        buffers: The memory for the parts that it copies and receives.
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
        (PAGE if in_ranges[payload.tensor_number] else payload.nbytes) if large else 0
        for payload, large in zip(layout.payloads, is_large, strict=True)
    ]
    rests = [file.size - file.rest + len(file.frame[0].data) for file in layout.files]
    owners = assign_holders([everyone] * (len(sizes) + len(rests)), sizes + rests)
    of_file = owners[len(sizes) :]
    places = zip(owners, layout.places, is_large, strict=False)
    return [owner if large else of_file[file] for owner, (file, _), large in places], of_file


def plan_exchange(
    layout: FolderLayout, boxes: Boxes, in_ranges: Sequence[bool], owners: Sequence[int], comm: Comm, *, shared: bool
) -> ExchangePlan:
    """Collective: plan this rank's writes and messages.

    The tensors of ``boxes``, which this rank has, are numbered as in the layout. ``owners`` are the owners of the
    payloads. It is a ShardingError if ranks send the same elements, or boxes that do not fill their payload. A gap
    between ranges is found by the commit: no segment has its bytes.
    """
    with comm.local_phase("planning contiguous tensors"):
        views, writes, messages = _plan_local(layout, boxes, in_ranges, owners, comm, shared=shared)
        own = messages.pop(comm.rank, [])
        packed = {rank: _pack(sent) for rank, sent in messages.items()}
    arrived = comm.all_to_all(packed)
    with comm.local_phase("planning contiguous tensors"):
        received = {rank: _unpack(data) for rank, data in arrived.items()}
        buffers = _plan_buffers(layout, [*own, *chain.from_iterable(received.values())])
        for number, (file, start, stop) in enumerate(buffers, len(views)):
            writes.append(_make_write(layout, file, start, number, 0, stop - start))
        sends, receives = (
            {rank: _split_rounds(listed, comm.world_size) for rank, listed in each.items()}
            for each in (messages, received)
        )
        most = max(map(len, (*sends.values(), *receives.values())), default=0)
    (rounds,) = comm.largest(most)
    return ExchangePlan(views, writes, own, sends, receives, buffers, rounds)


def _plan_local(
    layout: FolderLayout, boxes: Boxes, in_ranges: Sequence[bool], owners: Sequence[int], comm: Comm, *, shared: bool
) -> tuple[list[View], list[Write], dict[int, list[Message]]]:
    """Return the views of this rank's values, the writes from them, and the messages to each owner."""
    payloads: list[list[int]] = [[] for _ in layout.tensors]
    for number, payload in enumerate(layout.payloads):
        payloads[payload.tensor_number].append(number)
    views: list[View] = []
    writes: list[Write] = []
    messages: dict[int, list[Message]] = {}
    most = min(_MESSAGE_BYTES, _count_round_bytes(comm.world_size))
    for item, (tensor, *held) in enumerate(zip(boxes.spec, boxes.offsets, boxes.extents, strict=True)):
        itemsize = layout.tensors[tensor].dtype.itemsize
        for number in payloads[tensor]:
            whole, (file, start), owner = layout.payloads[number].box, layout.places[number], owners[number]
            common = intersect(Box(*held), whole)
            if common is None:
                continue
            view, nbytes = len(views), common.volume * itemsize
            views.append(View(item, common))
            begin = find_range(common, whole) if in_ranges[tensor] else None
            outbox = messages.setdefault(owner, [])
            if begin is None:
                parts = cut_box(common, itemsize, most)
                outbox += [Message(number, 0, part.volume * itemsize, part, view) for part in parts]
                continue
            first = begin * itemsize
            # the full pages of the range, as bytes of the view
            low, high = -(start + first) % PAGE, nbytes - (start + first + nbytes) % PAGE
            if high - low <= SMALL_RECORD or not (shared or owner == comm.rank):
                low = high = nbytes
            else:
                writes.append(_make_write(layout, file, start + first + low, view, low, high))
            for begins, ends in ((0, low), (high, nbytes)):
                steps = [*range(begins, ends, most), ends]
                outbox += [Message(number, first + a, b - a, None, view, a) for a, b in pairwise(steps)]
    return views, writes, {rank: sent for rank, sent in messages.items() if sent}


def _make_write(layout: FolderLayout, file: int, offset: int, source: int, start: int, stop: int) -> Write:
    return Write(file, offset, source, start, stop, *layout.cut_range(file, offset, offset + stop - start))


def _pack(messages: Sequence[Message]) -> bytes:
    """Return the description of messages for the receiver: the places of their values in the payloads."""
    return json.dumps([message[:4] for message in messages], separators=(",", ":")).encode()


def _unpack(data: bytes) -> list[Message]:
    found = json.loads(data)
    return [Message(payload, offset, nbytes, box and Box(*map(tuple, box))) for payload, offset, nbytes, box in found]


def _plan_buffers(layout: FolderLayout, messages: Sequence[Message]) -> list[Buffer]:
    """Return the ranges of files that messages fill, neighbours joined.

    It is a ShardingError if elements are received twice, or boxes do not fill their payload.
    """
    boxes: dict[int, list[Box]] = {}
    ranges = []
    for message in messages:
        if message.box is not None:
            boxes.setdefault(message.payload, []).append(message.box)
            continue
        file, start = layout.places[message.payload]
        ranges.append(Buffer(file, start + message.offset, start + message.offset + message.nbytes))
    for number, found in boxes.items():
        payload, (file, start) = layout.payloads[number], layout.places[number]
        if find_overlap(found) is not None or sum(box.volume for box in found) < payload.box.volume:
            raise _make_error(layout, number)
        ranges.append(Buffer(file, start, start + payload.nbytes))
    joined: list[Buffer] = []
    for file, start, stop in sorted(ranges):
        last = joined[-1] if joined and joined[-1].file == file else None
        if last is not None and start < last.stop:
            raise _make_error(layout, layout.find_payload(file, start))
        if last is not None and start == last.stop:
            joined[-1] = Buffer(file, last.start, stop)
        else:
            joined.append(Buffer(file, start, stop))
    return joined


def _make_error(layout: FolderLayout, number: int) -> ShardingError:
    key = layout.tensors[layout.payloads[number].tensor_number].key
    return ShardingError(
        f"the shards of all ranks do not fill 1 tensor exactly: {key!r}; save with validate_access_integrity=True to "
        "see which regions"
    )


def exchange_values(
    layout: FolderLayout, plan: ExchangePlan, values: Sequence[torch.Tensor], comm: Comm
) -> list[torch.Tensor]:
    """Collective: send and receive the values of the views; return the filled buffers, uint8 on the CPU.

    Rounds bound the memory of the messages.
    """
    with comm.local_phase("planning the exchange of contiguous tensors"):
        buffers = [torch.empty(b.stop - b.start, dtype=torch.uint8, device="cpu") for b in plan.buffers]
        for message in plan.own:
            _fill(layout, plan, buffers, message, _read_message(plan, values, message))
    for number in range(plan.rounds):
        with comm.local_phase("sending contiguous tensors"):
            going = [(_read_message(plan, values, message), rank) for rank, message in _list_round(plan.sends, number)]
            coming = [
                (torch.empty(message.nbytes, dtype=torch.uint8, device="cpu"), rank, message)
                for rank, message in _list_round(plan.receives, number)
            ]
        comm.exchange(going, [(received, rank) for received, rank, _ in coming])
        with comm.local_phase("sending contiguous tensors"):
            for received, _, message in coming:
                _fill(layout, plan, buffers, message, received)
    return buffers


def _list_round(rounds: dict[int, list[list[Message]]], number: int) -> list[tuple[int, Message]]:
    """Return the messages of a round, each with its other rank."""
    return [(rank, message) for rank, found in rounds.items() if number < len(found) for message in found[number]]


def _split_rounds(messages: Sequence[Message], world_size: int) -> list[list[Message]]:
    """Split the messages from one rank to another into rounds: the sender and the receiver split them equally."""
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


def _read_message(plan: ExchangePlan, values: Sequence[torch.Tensor], message: Message) -> torch.Tensor:
    """Return the bytes of a message; of a plain tensor with strides no more is copied."""
    found, first, stop = values[message.source], message.source_offset, message.source_offset + message.nbytes
    if message.box is not None:
        return as_bytes(plain_cpu(select_box(found, message.box, plan.views[message.source].box)))
    found = found.detach() if is_plain(found) else plain_cpu(found)  # wrappers may have no boxes
    if found.is_contiguous():
        return as_bytes(found)[first:stop].cpu()
    itemsize = found.dtype.itemsize
    begin = first // itemsize
    whole, parts = Box.from_shape(found.shape), cut_flat_range(found.shape, begin, -(-stop // itemsize))
    copied = torch.cat([as_bytes(plain_cpu(found[part.box.within(whole)])) for part in parts])
    return copied[first - begin * itemsize :][: message.nbytes]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8, on its device."""
    # a tensor of one element is contiguous with any stride, and torch views only those with a stride of 1 as bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _fill(
    layout: FolderLayout, plan: ExchangePlan, buffers: Sequence[torch.Tensor], message: Message, values: torch.Tensor
) -> None:
    """Put received values into the buffer that they belong to."""
    payload, (file, start) = layout.payloads[message.payload], layout.places[message.payload]
    at = start + message.offset
    number = bisect_right(plan.buffers, (file, at + 1)) - 1
    rest = buffers[number][at - plan.buffers[number].start :]
    if message.box is None:
        rest[: message.nbytes] = values
        return
    itemsize = layout.tensors[payload.tensor_number].dtype.itemsize
    whole = rest[: payload.nbytes].view(*payload.box.shape, itemsize)
    whole[message.box.within(payload.box)] = values.view(*message.box.shape, itemsize)
