"""The base of load strategies that read boxes: what an author gets without a line of their own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import ChunkLoadStrategy, StoredChunk
from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError
from shardckpt.manifest import Manifest
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Box
from shardckpt.storage import CheckpointReader
from shardckpt.strategy import LoadContext, lists_columns
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

VALUES = torch.arange(24.0).view(4, 6)


class Reader(ChunkLoadStrategy):
    """Its boxes are rows of a tensor in memory; each one's source is its values."""

    backend, version = "rows", 1

    def __init__(self, rows: Sequence[tuple[int, int]]) -> None:
        self._rows = rows
        self.asked = 0

    def list_chunks(self, context: LoadContext) -> Iterator[StoredChunk]:
        """Yield the rows."""
        self.asked += 1
        for start, stop in self._rows:
            box = Box((start, 0), (stop - start, 6))
            yield StoredChunk("w", torch.float32, (4, 6), box, "rows", VALUES[start:stop])

    def read_chunk(self, chunk: StoredChunk, context: LoadContext) -> torch.Tensor:
        """Return them."""
        return chunk.source

    def load_common(self, context: LoadContext) -> dict[str, Any]:
        """Return nothing."""
        return {}


@contextmanager
def _open(tmp_path: Path) -> Iterator[LoadContext]:
    """The context of a load; no file is read."""
    with CheckpointReader(tmp_path, Manifest(backend="rows", version=1)) as reader:
        yield LoadContext(reader, Comm(alone=True))


def test_shards_of_any_kind_are_filled_from_boxes(tmp_path: Path) -> None:
    """A box of several chunks, a flattened part, another dtype, no memory: one listing serves all."""
    with _open(tmp_path) as context:
        strategy = Reader([(0, 1), (1, 3), (3, 4)])
        middle = ShardedTensor("w", torch.zeros(2, 3, dtype=torch.float64), torch.float64, (2, 3), (4, 6), (1, 3), None)
        flat = ShardedTensor(
            "w", torch.zeros(7), torch.float32, (4, 6), (4, 6), (0, 0), None, flattened_range=slice(5, 12)
        )
        empty = ShardedTensor.from_global_shape("w", torch.float32, (4, 6))
        found = strategy.load([middle, flat, empty], context)
        assert found[0] is middle.data
        assert torch.equal(found[0], VALUES[1:3, 3:].double())
        assert torch.equal(found[1], VALUES.flatten()[5:12])
        assert torch.equal(found[2], VALUES)
        assert [(each.key, each.data, tuple(each.global_shape)) for each in strategy.load_index(context)] == [
            ("w", None, (4, 6))
        ]
        assert [(box.offset, box.shape, box.file) for box in strategy.list_boxes(context.reader)] == [
            ((0, 0), (1, 6), "rows"),
            ((1, 0), (2, 6), "rows"),
            ((3, 0), (1, 6), "rows"),
        ]
        assert strategy.asked == 1


@table(("rows", "text"), [([(0, 1), (2, 4)], "does not hold its elements"), ([(0, 3), (2, 4)], "chunks overlap")])
def test_holes_and_overlaps_are_refused_before_anything_changes(
    tmp_path: Path, rows: list[tuple[int, int]], text: str
) -> None:
    """What the boxes do not fill, or fill twice, is damage, and no destination has changed then."""
    target = torch.full((4, 6), -1.0)
    shard = ShardedTensor.from_rank_offsets("w", target)
    with _open(tmp_path) as context, pytest.raises(CorruptCheckpointError, match=text):
        Reader(rows).load([shard], context)
    assert bool((target == -1).all())


def test_elements_that_are_not_stored_are_zero_where_shapes_may_differ(tmp_path: Path) -> None:
    """With allow_shape_mismatch a larger shard has what is stored, and zeros."""
    with _open(tmp_path) as context:
        shard = ShardedTensor.from_rank_offsets("w", torch.full((5, 7), -1.0), allow_shape_mismatch=True)
        (found,) = Reader([(0, 4)]).load([shard], context)
        assert torch.equal(found[:4, :6], VALUES)
        assert not found[4].any()
        assert not found[:, 6].any()


def test_a_format_without_objects_refuses_them(tmp_path: Path) -> None:
    """By the object's name."""
    with _open(tmp_path) as context, pytest.raises(ShardingError, match=r"'extra': 'rows' stores no objects"):
        Reader([(0, 4)]).load([ShardedObject("extra", None, (1,), (0,))], context)


@table("shape", [(5, 7), (4, 5), (24,), ()])
def test_values_of_another_shape_than_the_box_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Of larger ones, others than the stored elements would be taken: the error names the key, and both shapes."""

    class Wrong(Reader):
        def read_chunk(self, chunk: StoredChunk, context: LoadContext) -> torch.Tensor:
            return torch.zeros(shape)

    with _open(tmp_path) as context, pytest.raises(CorruptCheckpointError, match=r"'w': .*shape .*\(4, 6\)"):
        Wrong([(0, 4)]).load([ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))], context)


def test_an_author_who_forgets_to_read_is_told(tmp_path: Path) -> None:
    """A strategy with neither read_chunk nor read_part says so."""
    with _open(tmp_path) as context:

        class Forgetful(Reader):
            read_chunk = ChunkLoadStrategy.read_chunk

        with pytest.raises((CheckpointingException, NotImplementedError), match="Forgetful has neither read_chunk nor"):
            Forgetful([(0, 4)]).load([ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6))], context)


def test_a_listing_needs_no_line_of_the_format(tmp_path: Path) -> None:
    """The base lists tensors and objects in columns, as ``inspect`` asks for them; ``load_index`` describes these."""

    class WithObject(Reader):
        def list_objects(self, context: LoadContext) -> list[str]:
            return ["rng/shard_0_1"]

    strategy = WithObject([(0, 1), (1, 4)])
    with _open(tmp_path) as context:
        columns, index = strategy.list_columns(context), strategy.load_index(context)
    assert lists_columns(strategy)
    assert columns == (["w"], [torch.float32], [(4, 6)], ["rng/shard_0_1"], {}, ())
    assert [(type(each), each.key, tuple(each.global_shape)) for each in index] == [
        (ShardedTensor, "w", (4, 6)),
        (ShardedObject, "rng", (1,)),
    ]
    assert strategy.asked == 1
