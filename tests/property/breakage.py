"""Layouts that are none: partitions with one thing wrong, said by ranks of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from shardckpt.testing.shard_specs import Ints, Layout, ShardSpec, boxes_in, layouts
from shardckpt.testing.states import describe
from shardckpt.testing.tensors import TensorSpec, tensor_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardckpt.mapping import ShardedTensor

KINDS = ("none", "hole", "no main", "two mains", "moved", "overlap", "dtype", "global shape")


@dataclass(frozen=True)
class Claim:
    """A piece, with the dtype and the global shape that its rank says."""

    piece: ShardSpec
    dtype: torch.dtype
    shape: Ints


@dataclass(frozen=True)
class Claims:
    """What all ranks say of one tensor, and what is wrong with it."""

    key: str
    kind: str
    claims: tuple[Claim, ...]

    def shards(self, rank: int, *, filled: bool) -> list[ShardedTensor]:
        """What a rank says."""
        return [self._shard(claim, filled=filled) for claim in self.claims if claim.piece.rank == rank]

    def _shard(self, claim: Claim, *, filled: bool) -> ShardedTensor:
        piece = claim.piece
        shape = piece.local_shape if piece.flat is None else (piece.size,)
        data = torch.empty(shape, dtype=claim.dtype) if filled else None
        return describe(self.key, piece, claim.dtype, claim.shape, data)


@st.composite
def claims(draw: st.DrawFn, key: str, world: int, kinds: Iterable[str] = KINDS) -> Claims:
    """A tensor's layout with a fault of one of the kinds, or none where the layout has no room for it."""
    whole = draw(tensor_specs(key))
    layout = draw(layouts(whole.shape, world))
    kind = draw(st.sampled_from(tuple(kinds)))
    if kind in ("dtype", "global shape"):
        said = draw(_disagreeing(whole, layout, kind))
    else:
        pieces = draw(BREAKS[kind](whole, layout, world)) if kind in BREAKS else None
        said = pieces and _claimed(whole, pieces)
    return Claims(key, kind if said else "none", said or _claimed(whole, layout))


def _claimed(whole: TensorSpec, layout: Layout) -> tuple[Claim, ...]:
    return tuple(Claim(piece, whole.dtype, whole.shape) for piece in layout)


def _mains(layout: Layout) -> list[int]:
    """Numbers of the main replicas that have elements."""
    return [number for number, piece in enumerate(layout) if piece.is_main and piece.size]


@st.composite
def _hole(draw: st.DrawFn, _: TensorSpec, layout: Layout, _world: int) -> Layout | None:
    """One piece is nowhere; for another tensor than that with no pieces left, which nobody speaks of."""
    mains = _mains(layout)
    if not mains or len(layout) == 1:
        return None
    gone = draw(st.sampled_from(mains))
    return (*layout[:gone], *layout[gone + 1 :])


@st.composite
def _no_main(draw: st.DrawFn, _: TensorSpec, layout: Layout, _world: int) -> Layout | None:
    """The piece that should be the main replica says that it is a copy."""
    mains = _mains(layout)
    return _with(layout, draw(st.sampled_from(mains)), replica=(1, 0)) if mains else None


@st.composite
def _two_mains(draw: st.DrawFn, _: TensorSpec, layout: Layout, world: int) -> Layout | None:
    """A copy says that it is the main replica too."""
    mains = _mains(layout)
    if not mains:
        return None
    twin = replace(layout[draw(st.sampled_from(mains))], rank=draw(st.integers(0, world - 1)))
    place = draw(st.integers(0, len(layout)))
    return (*layout[:place], twin, *layout[place:])


@st.composite
def _moved(draw: st.DrawFn, _: TensorSpec, layout: Layout, _world: int) -> Layout | None:
    """A piece says that it is where another of the same size is: no element too few or too many, in the sum."""
    mains = _mains(layout)
    pairs = [(a, b) for a in mains for b in mains if a != b and layout[a].size == layout[b].size]
    if not pairs:
        return None
    a, b = draw(st.sampled_from(pairs))
    return _with(layout, a, **{name: getattr(layout[b], name) for name in ("offset", "shape", "lead", "grid", "flat")})


@st.composite
def _overlap(draw: st.DrawFn, whole: TensorSpec, layout: Layout, world: int) -> Layout | None:
    """One more piece, anywhere."""
    offset, shape = draw(boxes_in(whole.shape))
    return (*layout, ShardSpec(offset, shape, rank=draw(st.integers(0, world - 1)))) if math.prod(shape) else None


def _with(layout: Layout, number: int, **changes: object) -> Layout:
    return (*layout[:number], replace(layout[number], **changes), *layout[number + 1 :])  # type: ignore[arg-type]


@st.composite
def _disagreeing(draw: st.DrawFn, whole: TensorSpec, layout: Layout, kind: str) -> tuple[Claim, ...] | None:
    """One piece, main or copy, says another dtype or global shape than the others."""
    if len(layout) == 1 or not whole.shape:
        return None
    said = list(_claimed(whole, layout))
    number = draw(st.integers(0, len(said) - 1))
    if kind == "dtype":
        said[number] = replace(said[number], dtype=torch.int16 if whole.dtype != torch.int16 else torch.bfloat16)
    else:
        axis = draw(st.integers(0, len(whole.shape) - 1))
        shape = tuple(size + (number == axis) for number, size in enumerate(whole.shape))
        said[number] = Claim(replace(said[number].piece, grid=None), whole.dtype, shape)
    return tuple(said)


BREAKS: dict[str, Callable[..., st.SearchStrategy[Layout | None]]] = {
    "hole": _hole,
    "no main": _no_main,
    "two mains": _two_mains,
    "moved": _moved,
    "overlap": _overlap,
}
