"""Lay out a rank's items in data files: headers, positions and padding are known before anything is written."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.chunks import LocalPlan, make_scale_columns
from shardckpt.errors import ShardingError
from shardckpt.planning import assign_holders, make_matrix
from shardckpt.storage import HEADER_LIMIT, HeaderEntry, PackedShards, encode_header, pack_columns
from shardckpt.tensors import LARGE, PAGE, page_offset
from shardckpt_safetensors.dtypes import declare, dtype_name
from shardckpt_safetensors.index_names import CODECS
from shardckpt_safetensors.index_parts import ALIGN
from shardckpt_safetensors.names import check_names
from shardckpt_safetensors.write_plan import FilePlan, WritePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.chunks import LocalItems
    from shardckpt.planning import Ints
    from shardckpt.storage import Column
    from shardckpt_safetensors.write_plan import Payload

#: Most items in a file: headers stay well below the limits of readers.
_MOST_ITEMS = 1 << 16
PADDING = "__padding__"
_METADATA = "__metadata__"


class FileItem(NamedTuple):
    """An item that is to be laid out.

    Attributes:
        name: Its name in the header.
        kind: The header's name of its dtype.
        shape: Its shape in the header.
        nbytes: Its size.
        place: The required position in the file modulo the size of a page; None if any multiple of 64 will do.
    """

    name: str
    kind: str
    shape: Ints
    nbytes: int
    place: int | None = None


class FileLayout(NamedTuple):
    """The layout of a data file.

    ``head`` are its first bytes, up to the first payload. ``starts`` says where each payload begins, in bytes, and
    ``tails`` has the bytes of padding behind each.
    """

    head: bytes
    starts: list[int]
    tails: list[int]


def lay_out_file(items: Sequence[FileItem]) -> FileLayout:
    """Lay out the items of a data file, at least one, in their order: return its header, and where each lies.

    It is a ShardingError if the header would be longer than readers accept.
    """
    # modulo a page, positions are known before the header is: it is padded to begin the first payload at its place
    align = PAGE if any(item.place is not None for item in items) else ALIGN
    position = first = items[0].place or 0
    entries: list[HeaderEntry] = []
    taken: set[str] = {_METADATA}
    tails: list[int] = []
    for number, item in enumerate(items):
        entries.append(HeaderEntry(_unique(item.name, taken), item.kind, item.shape, item.nbytes))
        position += item.nbytes
        tail = 0
        if number + 1 < len(items):
            place = items[number + 1].place
            tail = -position % ALIGN if place is None else (place - position) % PAGE
        if tail:
            entries.append(HeaderEntry(_unique(f"{PADDING}{number}", taken), "U8", (tail,), tail))
        position += tail
        tails.append(tail)
    head = encode_header(entries, align=align, rest=first % align)
    if len(head) > HEADER_LIMIT:
        raise ShardingError(
            f"{len(items)} keys need a header of {len(head)} bytes, readers accept {HEADER_LIMIT}: shorten the keys, "
            "or pass a larger thread_count"
        )
    steps = (item.nbytes + tail for item, tail in zip(items, tails, strict=True))
    starts = list(accumulate(steps, initial=len(head)))[:-1]
    return FileLayout(head, starts, tails)


def lay_out(items: LocalItems, objects: Mapping[str, Payload], rank: int, count: int) -> tuple[WritePlan, LocalPlan]:
    """Assign the items to files by bytes, and give each a position; return the write plan and its LocalPlan.

    There are ``count`` files, or more if one had too many items. It is a ShardingError if the format cannot hold a key
    or a dtype.
    """
    keys = [items.keys[number] for number in items.boxes.spec]
    placed = [
        FileItem(name, "U8", (len(payload.data),), len(payload.data)) for name, payload in objects.items()
    ] + _place_tensors(items)
    check_names((*objects, *items.keys))
    count = max(count, -(-len(placed) // _MOST_ITEMS))
    chosen = [0] * len(placed)
    if count > 1:
        chosen = assign_holders([tuple(range(count))] * len(placed), [item.nbytes for item in placed])
    files: list[FilePlan] = []
    starts = [0] * len(placed)
    numbers = {bucket: number for number, bucket in enumerate(sorted(set(chosen)))}
    for bucket in numbers:
        here = [number for number, choice in enumerate(chosen) if choice == bucket]
        layout = lay_out_file([placed[number] for number in here])
        for number, start in zip(here, layout.starts, strict=True):
            starts[number] = start
        behind = sum(number < len(objects) for number in here)  # objects come first
        files.append(
            FilePlan(
                name=f"rank_{rank}_{len(files)}.safetensors",
                head=layout.head,
                objects={placed[n].name: tail for n, tail in zip(here[:behind], layout.tails, strict=False)},
                positions=[n - len(objects) for n in here[behind:]],
                sizes=[placed[n].nbytes for n in here[behind:]],
                tails=layout.tails[behind:],
                nbytes=layout.starts[-1] + placed[here[-1]].nbytes,
            )
        )

    of_file = [numbers[bucket] for bucket in chosen]
    codecs = [CODECS.index(payload.codec) for payload in objects.values()]
    first = len(objects)
    rows = [(of_file[n], starts[n], placed[n].nbytes, codec) for n, codec in enumerate(codecs)]
    boxes = list(zip(of_file[first:], starts[first:], strict=True))
    columns: dict[str, Column] = {
        "files": [file.name for file in files],
        "boxes": make_matrix(boxes, 2, 0),
        "objects": make_matrix(rows, 4, 0),
    }
    locations = pack_columns(columns | make_scale_columns(items.scales))
    stored = PackedShards.pack(items.keys, items.dtypes, items.shapes, items.boxes.table(), objects)
    plan = WritePlan(files=files, tensors=items.tensors, keys=keys, objects=objects, stored=stored)
    return plan, LocalPlan(stored, locations)


def _place_tensors(items: LocalItems) -> list[FileItem]:
    for key, dtype in zip(items.keys, items.dtypes, strict=True):
        dtype_name(key, dtype)
    found = []
    boxes = zip(items.boxes.spec, items.boxes.offsets, items.boxes.extents, items.tensors, strict=True)
    for number, offset, extent, tensor in boxes:
        dtype = items.dtypes[number]
        nbytes = tensor.numel() * dtype.itemsize
        name = piece_name(items.keys[number], offset, extent, items.shapes[number])
        # direct writes take large payloads from where they are, if both places are equal modulo a page
        found.append(FileItem(name, *declare(dtype, extent), nbytes, page_offset(tensor) if nbytes >= LARGE else None))
    return found


def piece_name(key: str, offset: Ints, extent: Ints, shape: Ints) -> str:
    """Return the name that a header has for a box of a tensor: with its range along each axis if it is not all."""
    if extent == shape:
        return key
    return f"{key}[{','.join(f'{low}:{low + size}' for low, size in zip(offset, extent, strict=True))}]"


def _unique(name: str, taken: set[str]) -> str:
    """Return a name that the header does not have yet: names in it are for people."""
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}~{number}"
    taken.add(found)
    return found
