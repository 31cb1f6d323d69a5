"""The memory of a rank: touched pages, in which tensors lie as torch's own allocator lays them, and their values."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.workloads import SLICES, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Alignment of torch's CPU allocator.
_ALIGNMENT = 64
#: From this size on an allocation has pages of its own.
_LARGE = 128 << 10
#: Values are compared in blocks of at most so many bytes.
_BLOCK = 32 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32}
#: Odd, so that neighbours differ in whatever bits are kept.
_FACTORS = (40_503, 30_011, 2_654_435_761)


class Part(NamedTuple):
    """One of ``cells`` equal parts of a global tensor along ``axis``; ``number`` is the tensor's in its workload."""

    number: int
    spec: Spec
    axis: int
    cell: int
    cells: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the part."""
        return tuple(size // self.cells if a == self.axis else size for a, size in enumerate(self.spec.shape))

    @property
    def start(self) -> tuple[int, ...]:
        """Its first element in the global tensor."""
        return tuple(self.cell * size if a == self.axis else 0 for a, size in enumerate(self.shape))


@dataclass(frozen=True)
class Piece:
    """A part in memory: the tensor, and where in the state's memory it begins."""

    part: Part
    tensor: torch.Tensor
    place: int

    @property
    def key(self) -> str:
        """The global tensor's."""
        return self.part.spec.key


class State:
    """A rank's tensors, in one anonymous mapping: large ones 64 bytes into pages of their own, small ones side by side.

    Each tensor has a storage of its own, as from ``torch.empty``; the mapping as a whole is what the raw reference
    writes from and reads into.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        places, end = [], 0
        for part in parts:
            nbytes = part.spec.nbytes // part.cells
            place = _aligned(end, mmap.PAGESIZE) + _ALIGNMENT if nbytes >= _LARGE else _aligned(end, _ALIGNMENT)
            places.append(place)
            end = place + nbytes
        length = _aligned(max(end, 1), 2 * mmap.PAGESIZE)
        #: All of it, as bytes; page-aligned, an even number of pages.
        self.memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pieces = [self._piece(part, place) for part, place in zip(parts, places, strict=True)]

    def fill(self) -> None:
        """Give every element the value that its place in its global tensor has."""
        for piece in self.pieces:
            for view, lead, last in _blocks(piece):
                torch.add(lead, last, out=view)

    def blank(self) -> None:
        """Overwrite everything."""
        torch.frombuffer(self.memory, dtype=torch.uint8).fill_(0xA5)

    def faults(self) -> list[str]:
        """Keys of tensors that do not hold, bit for bit, what :meth:`fill` puts there."""
        return [
            piece.key
            for piece in self.pieces
            if not all(torch.equal(view, lead + last) for view, lead, last in _blocks(piece))
        ]

    def _piece(self, part: Part, place: int) -> Piece:
        dtype = getattr(torch, part.spec.dtype)
        count = part.spec.nbytes // part.cells // dtype.itemsize
        tensor = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=place)
        return Piece(part, tensor.view(part.shape), place)


def shards(specs: Sequence[Spec], axis: int, rank: int, world: int) -> list[Part]:
    """This rank's part of every tensor, cut along ``axis`` or the last that there is."""
    return [Part(n, spec, min(axis, len(spec.shape) - 1), rank, world) for n, spec in enumerate(specs)]


def slices(specs: Sequence[Spec], rank: int) -> list[Part]:
    """One 64th of the rows of every large tensor, another one on every rank."""
    return [Part(n, spec, 0, 17 + rank, SLICES) for n, spec in enumerate(specs) if spec.sliced]


def _blocks(piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows of a piece as integers of its width, and two tensors whose sum they are to hold."""
    part, dtype = piece.part, _INTEGERS[piece.tensor.itemsize]
    bits = piece.tensor.view(dtype)
    *lead_axes, last_axis = [_line(part, axis, dtype) for axis in range(len(part.shape))]
    if not lead_axes:
        yield bits, torch.tensor(0, dtype=dtype), last_axis
        return
    rows = max(1, _BLOCK // max(1, bits[0].nbytes))
    for start in range(0, part.shape[0], rows):
        lead = lead_axes[0][start : start + rows]
        for line in lead_axes[1:]:
            lead = lead[..., None] + line
        yield bits[start : start + rows], lead[..., None], last_axis


def _line(part: Part, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """What an element's index along an axis adds to its value."""
    start, size = part.start[axis], part.shape[axis]
    return (torch.arange(start, start + size) * _FACTORS[axis] + (axis == 0) * part.number * 7_919).to(dtype)


def _aligned(offset: int, to: int) -> int:
    return -(-offset // to) * to


__all__ = ["Part", "Piece", "State", "shards", "slices"]
