"""Cases of a save and a load, drawn by hypothesis: tensors, each under a layout to save and one to load."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from shardckpt.testing.memory import plain
from shardckpt.testing.shard_specs import Ints, Layout, layouts, regions
from shardckpt.testing.tensors import CASTS, DTYPES, TensorSpec, tensor_specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


#: Characters of a case in the report of a failure.
LONGEST = 8000


@dataclass(frozen=True)
class TensorCase:
    """A global tensor, and the boxes of it that each rank saves, and loads.

    Attributes:
        spec: The tensor as it is saved.
        saved: The layout to save.
        loaded: The layout to load.
        dtype: That of the destinations.
        shape: The global shape that is wanted; another one than the saved is loaded with allow_shape_mismatch.
    """

    spec: TensorSpec
    saved: Layout
    loaded: Layout
    dtype: torch.dtype
    shape: Ints

    @property
    def key(self) -> str:
        """Its key."""
        return self.spec.key

    def wanted(self) -> torch.Tensor:
        """Return the global tensor that a load must see: in the wanted dtype and shape, zero where none is stored."""
        values = self.spec.values()
        if self.shape != self.spec.shape:
            common = tuple(slice(min(sizes)) for sizes in zip(self.shape, self.spec.shape, strict=True))
            stored = plain(values)
            grown = stored.new_zeros(self.shape)
            grown[common] = stored[common]
            values = grown.view(values.dtype)
        return values.to(self.dtype)


@dataclass(frozen=True)
class ObjectCase:
    """An object in a grid: the ranks that save it, the first with the main replica, and the ranks that load it."""

    offset: Ints
    savers: Ints
    loaders: Ints

    @property
    def value(self) -> dict[str, Any]:
        """The object."""
        return {"cell": list(self.offset), "words": ["some", b"thing", 1.5, None]}


@dataclass(frozen=True)
class SaveLoadCase:
    """One save and one load to test.

    Attributes:
        cases: The tensors.
        objects: The cells of the grid of objects.
        grid: Its shape.
        validate: Whether the load's layouts are partitions.
    """

    cases: tuple[TensorCase, ...]
    objects: tuple[ObjectCase, ...]
    grid: Ints
    validate: bool

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        text = repr(self)
        printer.text(text if len(text) < LONGEST else f"{text[:LONGEST]} ...")


@st.composite
def save_load_cases(
    draw: st.DrawFn,
    save_world: int,
    load_world: int,
    *,
    most: int = 8,
    plain: bool = False,
    prefixes: tuple[str, ...] = ("model",),
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> SaveLoadCase:
    """Draw up to ``most`` small tensors, now and then a large one, and objects, with layouts to save and to load.

    Args:
        draw: By hypothesis.
        save_world: Number of ranks that save.
        load_world: Number of ranks that load.
        most: Number of small tensors.
        plain: Whether every tensor is loaded in its dtype and shape, and completely.
        prefixes: Beginnings of keys to choose from.
        dtypes: To choose from.
    """
    validate = plain or draw(st.integers(0, 3)) < 3
    sizes = [False] * draw(st.integers(1, most)) + [True] * draw(st.sampled_from((0, 0, 0, 1)))
    cases = []
    for number, large in enumerate(sizes):
        whole = draw(tensor_specs(f"{draw(st.sampled_from(prefixes))}.{number:02}", large=large, dtypes=dtypes))
        dtype, shape = (whole.dtype, whole.shape) if plain else draw(_other(whole))
        load = draw((layouts if validate else regions)(shape, load_world))
        cases.append(TensorCase(whole, draw(layouts(whole.shape, save_world)), load, dtype, shape))
    grid = draw(st.sampled_from(((1,), (3,), (2, 2))))
    cells = [draw(_objects(offset, save_world, load_world)) for offset in product(*map(range, grid))]
    return SaveLoadCase(tuple(cases), tuple(cells), grid, validate)


@st.composite
def _other(draw: st.DrawFn, whole: TensorSpec) -> tuple[torch.dtype, Ints]:
    """The dtype and the global shape that a load wants; mostly the saved ones."""
    kind = draw(st.sampled_from(("same", "same", "same", "cast", "padded")))
    dtype = draw(st.sampled_from(CASTS.get(whole.dtype, (whole.dtype,)))) if kind == "cast" else whole.dtype
    if kind != "padded":
        return dtype, whole.shape
    return dtype, tuple(max(size + draw(st.integers(-3, 3)), 0) for size in whole.shape)


@st.composite
def _objects(draw: st.DrawFn, offset: Ints, save_world: int, load_world: int) -> ObjectCase:
    savers = draw(st.lists(st.integers(0, save_world - 1), min_size=1, max_size=2))
    loaders = draw(st.lists(st.integers(0, load_world - 1), min_size=1, max_size=3))
    return ObjectCase(offset, tuple(savers), tuple(loaders))
