"""Shards without their data as bytes: cheap to send to another process, to keep, and to compare."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.mapping import ShardedObject
from shardckpt.planning import Boxes, Table, TensorSpec, concat_tables, make_column, make_matrix
from shardckpt.storage.columns import Column, Columns, pack

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from shardckpt.planning import Ints

_SOURCE = "the columns of stored shards"


class PackedShards(NamedTuple):
    """Boxes of tensors, and objects.

    Attributes:
        specs: The tensors' keys, dtypes and global shapes; alike on many ranks.
        boxes: The boxes, and the objects' unique keys.
        size: How many boxes and objects there are.
    """

    specs: bytes
    boxes: bytes
    size: int

    @classmethod
    def pack(
        cls,
        keys: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Ints],
        table: Table,
        objects: Collection[str],
    ) -> PackedShards:
        """The columns as bytes.

        Args:
            keys: Of the tensors.
            dtypes: Of every tensor.
            shapes: Global ones, of every tensor.
            table: Boxes of the tensors.
            objects: Unique keys of objects.
        """
        axes = [len(shape) for shape in shapes]
        specs: dict[str, Column] = {
            "keys": keys,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "axes": make_column(axes),
            "shapes": make_matrix(shapes, max(axes, default=0), 1),
        }
        boxes = _pack_boxes(table, list(objects))
        return cls(pack(specs), boxes, len(table.spec) + len(objects))

    def rows(self) -> tuple[Table, list[str]]:
        """The boxes of the tensors, and the objects' unique keys."""
        rows = Columns(self.boxes, _SOURCE)
        table = Table(rows.integers("whole"), rows.integers("offset"), rows.integers("extent"))
        return table, rows.texts("objects")

    def only(self, rows: Sequence[int], objects: Collection[str]) -> PackedShards:
        """Some of the boxes, by their numbers, and of the objects."""
        table, keys = self.rows()
        kept = [key for key in keys if key in objects]
        return PackedShards(self.specs, _pack_boxes(table.rows(make_column([*rows])), kept), len(rows) + len(kept))

    def unpack(self) -> tuple[list[TensorSpec], Table]:
        """What the boxes are parts of, and all boxes, an object's among them."""
        columns = Columns(self.specs, _SOURCE)
        dtypes = map("torch.{}".format, columns.texts("dtypes"))
        padded = zip(columns.integers("axes").tolist(), columns.integers("shapes").tolist(), strict=True)
        shapes = [tuple(shape[:axes]) for axes, shape in padded]
        specs = list(map(TensorSpec, repeat("tensor"), columns.texts("keys"), dtypes, shapes))
        table, objects = self.rows()
        boxes = Boxes()
        for key in objects:
            shard = ShardedObject.empty_from_unique_key(key)
            boxes.add(len(specs), tuple(shard.global_offset), (1,) * len(shard.global_shape))
            specs.append(TensorSpec("object", shard.key, str(None), tuple(shard.global_shape)))
        return specs, concat_tables([table, boxes.table()])


def _pack_boxes(table: Table, objects: Sequence[str]) -> bytes:
    return pack({"whole": table.spec, "offset": table.offset, "extent": table.extent, "objects": objects})


__all__ = ["PackedShards"]
