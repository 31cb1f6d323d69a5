"""Batches: many global tensors, each under one layout to save and another to load, with objects beside them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.property.layouts import Ints, Layout, layouts, regions
from tests.property.memory import plain
from tests.property.tensors import CASTS, Whole, wholes

if TYPE_CHECKING:
    import torch


#: Characters of a batch in the report of a failure.
LONGEST = 8000


@dataclass(frozen=True)
class Case:
    """A global tensor, who saves what of it, and who loads what of it.

    Attributes:
        whole: As it is saved.
        saved: The layout to save.
        loaded: The layout to load.
        dtype: That of the destinations.
        shape: The global shape that is wanted; another one than the saved is loaded with allow_shape_mismatch.
    """

    whole: Whole
    saved: Layout
    loaded: Layout
    dtype: torch.dtype
    shape: Ints

    @property
    def key(self) -> str:
        """Its name."""
        return self.whole.key

    def wanted(self) -> torch.Tensor:
        """The global tensor that a load is to see: of the wanted dtype and shape, zero where nothing is stored."""
        values = self.whole.values()
        if self.shape != self.whole.shape:
            common = tuple(slice(min(sizes)) for sizes in zip(self.shape, self.whole.shape, strict=True))
            stored = plain(values)
            grown = stored.new_zeros(self.shape)
            grown[common] = stored[common]
            values = grown.view(values.dtype)
        return values.to(self.dtype)


@dataclass(frozen=True)
class Cell:
    """A place in a grid of objects, the ranks that save it, of which the first is the main one, and those that load."""

    offset: Ints
    savers: Ints
    loaders: Ints

    @property
    def value(self) -> dict[str, Any]:
        """What is stored there."""
        return {"cell": list(self.offset), "words": ["some", b"thing", 1.5, None]}


@dataclass(frozen=True)
class Batch:
    """What one save and one load are about.

    Attributes:
        cases: The tensors.
        objects: The cells of the grid of objects.
        grid: Its shape.
        validate: Whether the load's layouts are partitions.
    """

    cases: tuple[Case, ...]
    objects: tuple[Cell, ...]
    grid: Ints
    validate: bool

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        text = repr(self)
        printer.text(text if len(text) < LONGEST else f"{text[:LONGEST]} ...")


@st.composite
def batches(
    draw: st.DrawFn,
    save_world: int,
    load_world: int,
    *,
    most: int = 8,
    plain: bool = False,
    prefixes: tuple[str, ...] = ("model",),
) -> Batch:
    """A batch of up to ``most`` small tensors, and now and then a large one.

    Args:
        draw: By hypothesis.
        save_world: Number of ranks that save.
        load_world: Number of ranks that load.
        most: Number of small tensors.
        plain: Whether every tensor is wanted as it is saved, in partitions.
        prefixes: Beginnings of keys to choose from.
    """
    validate = plain or draw(st.integers(0, 3)) < 3
    sizes = [False] * draw(st.integers(1, most)) + [True] * draw(st.sampled_from((0, 0, 0, 1)))
    cases = []
    for number, large in enumerate(sizes):
        whole = draw(wholes(f"{draw(st.sampled_from(prefixes))}.{number:02}", large=large))
        dtype, shape = (whole.dtype, whole.shape) if plain else draw(_other(whole))
        load = draw((layouts if validate else regions)(shape, load_world))
        cases.append(Case(whole, draw(layouts(whole.shape, save_world)), load, dtype, shape))
    grid = draw(st.sampled_from(((1,), (3,), (2, 2))))
    cells = [draw(_objects(offset, save_world, load_world)) for offset in product(*map(range, grid))]
    return Batch(tuple(cases), tuple(cells), grid, validate)


@st.composite
def _other(draw: st.DrawFn, whole: Whole) -> tuple[torch.dtype, Ints]:
    """The dtype and the global shape that a load wants; mostly the saved ones."""
    kind = draw(st.sampled_from(("same", "same", "same", "cast", "padded")))
    dtype = draw(st.sampled_from(CASTS.get(whole.dtype, (whole.dtype,)))) if kind == "cast" else whole.dtype
    if kind != "padded":
        return dtype, whole.shape
    return dtype, tuple(max(size + draw(st.integers(-3, 3)), 0) for size in whole.shape)


@st.composite
def _objects(draw: st.DrawFn, offset: Ints, save_world: int, load_world: int) -> Cell:
    savers = draw(st.lists(st.integers(0, save_world - 1), min_size=1, max_size=2))
    loaders = draw(st.lists(st.integers(0, load_world - 1), min_size=1, max_size=3))
    return Cell(offset, tuple(savers), tuple(loaders))


__all__ = ["Batch", "Case", "Cell", "batches"]
