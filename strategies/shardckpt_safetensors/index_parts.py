"""The parts of a large index: rows of boxes in files of their own; a reader takes the pages that it needs.

FORMAT.md specifies them as the feature ``index_parts``. A part begins with the columns of its tensors and of its pages;
the boxes follow row by row. A row of each page stands in the head, so a few reads find the boxes of a region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import Table, list_rows, make_bounds, make_column, make_matrix, number_groups, sort_unique
from shardckpt.storage import INTEGERS, LENGTH_BYTES, Columns, header_length, narrow_dtype, pack_columns, parse_json
from shardckpt_safetensors.dtypes import dtype_name
from shardckpt_safetensors.index_columns import check_column, join_tensors, read_column, read_tensors
from shardckpt_safetensors.index_names import HEADER
from shardckpt_safetensors.names import Strings, StringTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.chunks import MergedPlan
    from shardckpt.storage import CheckpointReader

#: Longest header, in bytes.
HEADER_LIMIT = 1 << 22
#: Payloads begin at multiples of it, in bytes.
ALIGN = 64
#: Rows of a page. A page has a digest of 12 bytes and a row in the head, which a reader reads whole; of the pages
#: themselves one a tensor, as a rule. With 1,000 tensors of 16,384 boxes 128 to 160 rows are the least to read.
PAGE_ROWS = 128
#: Most boxes of an index in parts that becomes one file when keys are removed.
MOST_ROWS = 1 << 20

_DTYPES = {name: dtype for dtype, name in INTEGERS.items()}
#: Bytes that are read by one call, at most.
_READ_BYTES = 4 << 20
#: Pairs of a wanted box and a page that are compared, at most; where there are more, all rows are taken.
_MOST_PAIRS = 1 << 22
_FAR = 1 << 62


class _PartHeader(BaseModel):
    """The JSON of a part."""

    model_config = ConfigDict(strict=True, extra="ignore")

    dtypes: list[str]
    row: Annotated[list[str], Field(min_length=4, max_length=4)]
    page: Annotated[int, Field(ge=1, lt=1 << 31)]


class PartHead(NamedTuple):
    """The head of a part: its bytes, the most axes of its tensors, and the unit of the starts of payloads in bytes."""

    nbytes: int
    axes: int
    unit: int


class EncodedPart(NamedTuple):
    """A part of the index: all of its bytes, its head, before the rows, and the bytes of a page of rows."""

    data: bytes
    head: PartHead
    page: int

    def cut(self) -> list[bytes]:
        """Return the head and the pages: each has a digest of its own, so that a reader checks only those it reads."""
        starts = [0, *range(self.head.nbytes, len(self.data), self.page)]
        return [self.data[start:stop] for start, stop in zip(starts, [*starts[1:], len(self.data)], strict=True)]


def encode_part(plan: MergedPlan, page_rows: int = PAGE_ROWS, unit: int = ALIGN) -> EncodedPart:
    """Encode some tensors, with their boxes in order, as a part of the index: the head, then the rows in pages.

    All payloads begin at multiples of ``unit``, which is the same for all parts of an index: 64, or 1.
    """
    strings = StringTable()
    columns, dtypes, boxes, locations = encode_tensors(plan, strings)
    fields = (boxes.offset, boxes.extent, locations[:, :1], locations[:, 1:2] // unit)
    kinds = [narrow_dtype(field) for field in fields]
    narrow = [field.to(kind).contiguous() for field, kind in zip(fields, kinds, strict=True)]
    rows = torch.cat([field.view(torch.uint8) for field in narrow], 1)
    columns |= {"tensor_reach": _find_reach(boxes, len(plan.keys)), "page_offset": boxes.offset[::page_rows]}
    text = _PartHeader(dtypes=dtypes, row=[INTEGERS[kind] for kind in kinds], page=page_rows).model_dump_json()
    # the narrowest columns come last, in this order: the rows are the end of the file
    data = pack_columns({**strings.columns(), **columns, "box": rows}, {HEADER: text})
    return EncodedPart(data, PartHead(len(data) - rows.numel(), boxes.offset.shape[1], unit), page_rows * rows.shape[1])


def encode_tensors(
    plan: MergedPlan, strings: StringTable
) -> tuple[dict[str, torch.Tensor], list[str], Table, torch.Tensor]:
    """Return the columns of a plan's tensors, the names of their dtypes, and their boxes and locations, in order.

    The boxes have as many axes as the tensor with the most.
    """
    axes = [len(shape) for shape in plan.shapes]
    width = max(axes, default=0)
    names = list(map(dtype_name, plan.keys, plan.dtypes))
    dtypes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    boxes = plan.boxes.pad_axes(width)
    order = _sort_rows(boxes.spec, boxes.offset)
    columns = {
        "tensor": strings.add_names(plan.keys),
        "tensor_dtype": make_column([dtypes[name] for name in names]),
        "tensor_axes": make_column(axes),
        "tensor_shape": make_matrix(plan.shapes, width, 1),
        "tensor_end": plan.bounds[1:],
    }
    return columns, list(dtypes), boxes.rows(order).first_axes(width), plan.locations[order]


def find_alignment(locations: torch.Tensor) -> int:
    """Return the alignment of payloads in bytes: 64, or 1 for any; ``locations`` are their files and starts."""
    return 1 if bool((locations[:, 1] % ALIGN != 0).any()) else ALIGN


def _sort_rows(spec: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the order of rows by tensor, and by offset within a tensor."""
    order = torch.arange(len(spec), device="cpu")
    if bool((spec[1:] > spec[:-1]).all()):  # one box per tensor, as most have
        return order
    for column in (*reversed(offset.unbind(1)), spec):
        order = order[column[order].argsort(stable=True)]
    return order


class IndexParts:
    """The parts of an index that are in files of their own: tensors and pages in memory, boxes when they are requested.

    ``files`` has their names, and the bytes of each before its rows. ``unit`` is the unit of the starts of payloads, in
    bytes. ``tensors`` are the tensors of all parts.
    """

    def __init__(self, files: Sequence[tuple[str, int]], reader: CheckpointReader, unit: int) -> None:
        self._reader = reader
        self._unit = unit
        self.names = [name for name, _ in files]
        self._files = reader.map(lambda file: _PartFile(reader, *file), files, size=lambda file: file[1])
        self.tensors = join_tensors([file.tensors for file in self._files])
        width = self.tensors.extents.shape[1]
        self._rows, self._pages, self._numbers = (
            make_bounds(make_column([getattr(file, name) for file in self._files]))
            for name in ("rows", "pages", "count")
        )
        self._page_rows = make_column([file.page_rows for file in self._files])
        # the row behind the last page ends every search
        self._offset = torch.full((int(self._pages[-1]) + 1, width), _FAR, device="cpu")
        self._reach = torch.zeros(len(self.tensors.keys), width, dtype=torch.int64, device="cpu")
        for number, file in enumerate(self._files):
            self._offset[self._pages[number] : self._pages[number + 1]] = _pad(file.offset, width, 0)
            self._reach[self._numbers[number] : self._numbers[number + 1]] = _pad(file.reach, width, 1)

    def find_parts(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the number of the part that has each tensor."""
        return torch.searchsorted(self._numbers[1:], numbers, right=True)

    def take(self, which: torch.Tensor | slice) -> tuple[torch.Tensor, ...]:
        """Return offset, extent, file and start of boxes as int64, after reading the pages that they are in.

        ``which`` are their rows, ascending; parts follow each other.
        """
        rows = torch.arange(which.start, which.stop, device="cpu") if isinstance(which, slice) else which
        cuts = torch.searchsorted(rows, self._rows).tolist()
        runs: list[tuple[int, torch.Tensor, int, int]] = []
        for number, file in enumerate(self._files):
            local = rows[cuts[number] : cuts[number + 1]] - self._rows[number]
            runs += ((number, *run) for run in file.cut_runs(local))
        raw = self._reader.map(self._read, runs, size=lambda run: (run[3] - run[2]) * self._files[run[0]].width)
        width = self._offset.shape[1]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        found: list[tuple[torch.Tensor, ...]] = [(none.reshape(0, width), none.reshape(0, width), none, none)]
        for number in sorted({run[0] for run in runs}):
            own = torch.cat([part for part, run in zip(raw, runs, strict=True) if run[0] == number])
            found.append(self._files[number].decode(own, width))
        offset, extent, files, start = (torch.cat(columns) for columns in zip(*found, strict=True))
        return offset, extent, files, start * self._unit

    def _read(self, run: tuple[int, torch.Tensor, int, int]) -> torch.Tensor:
        """Read pages, and return some of their rows as bytes."""
        number, local, first, stop = run
        file = self._files[number]
        data = bytearray((stop - first) * file.width)
        self._reader.read_into(file.name, file.head + first * file.width, memoryview(data), "the index")
        return torch.frombuffer(data, dtype=torch.uint8).view(-1, file.width)[local - first]

    def find_rows(self, numbers: torch.Tensor, wanted: Table) -> torch.Tensor:
        """Return the rows, ascending, of all boxes that share elements with some wanted ones; others are among them.

        ``wanted`` are boxes, with the place of their tensor in ``numbers`` for each.
        """
        wanted = wanted.pad_axes(self._offset.shape[1])
        owner = numbers[wanted.spec]
        part = self.find_parts(owner)
        base, rows, pages = self._rows[part], self._page_rows[part], self._pages[part]
        start, stop = self.tensors.bounds[owner], self.tensors.bounds[owner + 1]
        first = pages + (start - base) // rows
        count = torch.where(start < stop, pages + (stop - 1 - base) // rows + 1 - first, 0)
        ends = count.cumsum(0)
        if len(ends) and int(ends[-1]) > _MOST_PAIRS:
            return list_rows(sort_unique(owner), self.tensors.bounds)
        one = number_groups(ends)  # a pair for each box and each page of its tensor
        page = torch.arange(len(one), device="cpu") + (first - ends + count)[one]
        # boxes of the page lie from low to high, in the order of the rows; boxes that reach into the wanted one begin
        # from least to most, along each axis
        low = torch.where((page == first[one])[:, None], 0, self._offset[page])
        high = torch.where((page + 1 == (first + count)[one])[:, None], _FAR, self._offset[page + 1])
        least, most = wanted.offset - self._reach[owner] + 1, wanted.offset + wanted.extent - 1
        equal = torch.cat([torch.ones(len(one), 1, dtype=torch.bool, device="cpu"), low == high], 1)[:, :-1]
        is_bounded = equal.to(torch.uint8).cumprod(1).bool()  # along an axis only if those before it do not change
        outside = (is_bounded & ((low > most[one]) | (high < least[one]))).any(1)
        one, page = one[~outside], page[~outside]
        begin = base[one] + (page - pages[one]) * rows[one]
        begin, end = torch.maximum(begin, start[one]), torch.minimum(begin + rows[one], stop[one])
        ends = (end - begin).cumsum(0)
        run = number_groups(ends)
        return sort_unique(torch.arange(len(run), device="cpu") + (end - ends)[run])

    def check(self, boxes: Table) -> None:
        """Compare the reaches and page offsets in the heads with the boxes."""
        reach = _find_reach(boxes, len(self.tensors.keys))
        for number, file in enumerate(self._files):
            tensors = slice(int(self._numbers[number]), int(self._numbers[number + 1]))
            rows = slice(int(self._rows[number]), int(self._rows[number + 1]), file.page_rows)
            axes = file.reach.shape[1]
            if not torch.equal(file.reach.long(), reach[tensors, :axes]):
                raise CorruptCheckpointError(f"{file.source}: its column 'tensor_reach' is not that of its boxes")
            if not torch.equal(file.offset.long(), boxes.offset[rows, :axes]):
                raise CorruptCheckpointError(f"{file.source}: its column 'page_offset' is not that of its boxes")


class _PartFile:
    """A part: its head in memory."""

    def __init__(self, reader: CheckpointReader, name: str, head: int) -> None:
        self.name, self.head = name, head
        self.source = f"{reader.directory / name}"
        size = reader.size(name)
        data = bytearray(min(head, size))
        reader.read_into(name, 0, memoryview(data), "the index")
        try:
            header_length(bytes(data[:LENGTH_BYTES]), len(data), self.source, HEADER_LIMIT)
            self._parse(Columns(data, self.source, size), size)
        except CorruptCheckpointError as exc:
            raise exc if str(exc).startswith(self.source) else type(exc)(f"{self.source}: {exc}") from exc

    def _parse(self, columns: Columns, size: int) -> None:
        try:
            header = _PartHeader.model_validate(parse_json(columns.metadata.get(HEADER, "").encode()))
        except (ValueError, ValidationError) as exc:
            raise CorruptCheckpointError(f"the JSON in its metadata is damaged: {exc}") from exc
        strings = Strings(columns.raw("text"), read_column(columns, "text_end", (-1,)).long())
        self.tensors = read_tensors(columns, strings, header.dtypes)
        self.count, self.rows = len(self.tensors.keys), int(self.tensors.bounds[-1])
        axes = self.tensors.extents.shape[1]
        check_column(set(header.row) <= _DTYPES.keys(), "box", f"has fields of {header.row!r:.100}")
        self._kinds = [_DTYPES[name] for name in header.row]
        self._sizes = [kind.itemsize * cells for kind, cells in zip(self._kinds, (axes, axes, 1, 1), strict=True)]
        self.width = sum(self._sizes)
        self.page_rows, self.pages = header.page, -(-self.rows // header.page)
        kind, shape, start, stop = columns.locate("box")
        check_column((kind, tuple(shape)) == ("U8", (self.rows, self.width)), "box", f"is of {kind} and shape {shape}")
        check_column(
            (start, stop) == (self.head, size), "box", f"has bytes {start} to {stop}, expected {self.head} to {size}"
        )
        self.offset = read_column(columns, "page_offset", (self.pages, axes))
        self.reach = read_column(columns, "tensor_reach", (self.count, axes))

    def cut_runs(self, local: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        """Return runs of pages that follow each other: the requested rows, the first row and the one behind them."""
        if not len(local):
            return []
        most = max(1, _READ_BYTES // (self.page_rows * self.width))
        pages, counts = (local // self.page_rows).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        place = torch.arange(len(pages), device="cpu")
        begins = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), pages[1:] - pages[:-1] > 1])
        since = place - torch.where(begins, place, 0).cummax(0).values
        firsts = (begins | (since % most == 0)).nonzero().view(-1)
        lasts = torch.cat([firsts[1:], place[-1:] + 1]) - 1
        ends = counts.cumsum(0)
        cuts = [0, *ends[lasts].tolist()]
        low, high = pages[firsts] * self.page_rows, ((pages[lasts] + 1) * self.page_rows).clamp(max=self.rows)
        return [
            (local[cuts[n] : cuts[n + 1]], first, stop)
            for n, (first, stop) in enumerate(zip(low.tolist(), high.tolist(), strict=True))
        ]

    def decode(self, raw: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        """Return the fields of rows as int64, with as many axes as the widest part has."""
        offset, extent, file, start = (
            _from_bytes(field, kind) for field, kind in zip(torch.split(raw, self._sizes, 1), self._kinds, strict=True)
        )
        return _pad(offset, width, 0), _pad(extent, width, 1), file.view(-1), start.view(-1)


def _from_bytes(raw: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the numbers in each row as int64."""
    # a copy: the memory of a slice may begin where no number can
    own = raw.clone(memory_format=torch.contiguous_format)
    # by a flat view: rows of no bytes, as scalars have for axes, have a stride of one byte
    return own.view(-1).view(kind).view(len(raw), raw.shape[1] // kind.itemsize).long()


def _find_reach(boxes: Table, count: int) -> torch.Tensor:
    """Return the largest extent along each axis of the boxes of each tensor; 0 of one without boxes."""
    found = torch.zeros(count, boxes.extent.shape[1], dtype=torch.int64, device="cpu")
    return found.scatter_reduce_(0, boxes.spec[:, None].expand_as(boxes.extent), boxes.extent, "amax")


def _pad(column: torch.Tensor, axes: int, filler: int) -> torch.Tensor:
    more = column.new_full((len(column), axes - column.shape[1]), filler, dtype=torch.int64)
    return torch.cat([column.long(), more], 1)
