"""Random indexes, as our own saves make them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from shardckpt.chunks import Chunk, Item, StoredTensor
from shardckpt.planning.boxes import Box
from shardckpt.testing.tensors import DTYPES
from shardckpt_torch_dist.dialects.stored import StoredIndex, tensors_to_columns

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from shardckpt.planning.boxes import Ints

#: Beside any text, names that mean something to DCP or are those of files.
NAMES = st.sampled_from(["fqn", "offset", "", "__0_0.distcp", "Metadata", "torch", "名.é"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)
FILES = ("__0_0.distcp", "__1_0.distcp", "big__3_1.distcp")
SIZES = st.integers(0, 5) | st.sampled_from([(1 << 31) - 1, 1 << 31, (1 << 40) + 7, 1 << 62])
PLACES = st.integers(0, 1000) | st.sampled_from([(1 << 31) - 1, 1 << 31, 1 << 45])
#: What a chunk may have along one axis, and along the others.
LONG, SHORT = (1 << 41), 4


@st.composite
def _items(draw: Callable[..., int], least: int = 0) -> Item:
    return Item(draw(st.sampled_from(FILES)), draw(PLACES), least + draw(st.integers(0, 700)))  # type: ignore[arg-type]


@st.composite
def _chunks(draw: Callable[..., int], shape: Ints, itemsize: int) -> Chunk:
    most = [SHORT if axis else LONG for axis in range(len(shape))]
    extent = tuple(draw(st.integers(0, min(pair))) for pair in zip(shape, most, strict=True))
    offset = tuple(draw(st.integers(0, size - part)) for size, part in zip(shape, extent, strict=True))
    volume = math.prod(extent)
    return Chunk(Box(offset, extent), draw(_items(volume * itemsize)), 0, volume)  # type: ignore[arg-type]


@st.composite
def _tensors(draw: Callable[..., object]) -> StoredTensor:
    dtype: torch.dtype = draw(st.sampled_from(DTYPES))  # type: ignore[assignment]
    shape = tuple(draw(st.lists(SIZES, max_size=6)))  # type: ignore[arg-type,var-annotated]
    chunks: list[Chunk] = draw(st.lists(_chunks(shape, dtype.itemsize), max_size=4))  # type: ignore[assignment]
    return StoredTensor(dtype, shape, {chunk.box.offset: chunk for chunk in chunks})


def index_of(tensors: dict[str, StoredTensor], objects: dict[str, Item]) -> StoredIndex:
    """The index of these."""
    dtypes, shapes = [tensor.dtype for tensor in tensors.values()], [tensor.shape for tensor in tensors.values()]
    bounds, chunks, files = tensors_to_columns(tensors)
    files += sorted({item.file for item in objects.values()}.difference(files))
    return StoredIndex(list(tensors), dtypes, shapes, bounds, chunks, files, objects)


#: Tensors with gaps and overlaps, and objects.
INDEXES = st.builds(
    index_of,
    st.dictionaries(NAMES, _tensors(), max_size=8),
    st.dictionaries(NAMES.map("{}/shard_0.1_2.3".format), _items(), max_size=4),
)


def tensors_of(index: StoredIndex) -> dict[str, StoredTensor]:
    """The tensors of an index as objects."""
    return {key: index.tensor(number) for number, key in enumerate(index.keys)}


def content(index: StoredIndex) -> tuple[dict[str, StoredTensor], dict[str, Item]]:
    """All that an index says, but for the numbers of its files."""
    return tensors_of(index), index.objects


__all__ = ["FILES", "INDEXES", "content", "index_of", "tensors_of"]
