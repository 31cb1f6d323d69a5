"""Descriptions of shards, without data, as bytes: cheap to send to another process, to cache and to compare."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.mapping.sharded_object import PlainObject
from shardckpt.planning.table import Boxes, Table, TensorSpec, concat_tables, make_column, make_matrix
from shardckpt.storage.columns import Column, Columns, pack_columns

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.planning.boxes import Ints

_SOURCE = "the columns of stored shards"


class PackedShards(NamedTuple):
    """Packed boxes of tensors and keys of objects.

    Attributes:
        specs: Packed tensor specs: keys, dtypes and global shapes; often the same bytes on many ranks.
        boxes: Packed boxes, and the objects' unique keys.
        size: Number of boxes and objects.
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
        """Pack descriptions of shards.

        Args:
            keys: Of the tensors.
            dtypes: Of the tensors, in the same order.
            shapes: Their global shapes.
            table: The boxes; its column of tensor numbers counts in ``keys``.
            objects: Unique keys of the objects.

        Returns:
            The packed shards.
        """
        axes = [len(shape) for shape in shapes]
        # apart from the boxes: equal bytes on many ranks are sent and parsed once
        specs: dict[str, Column] = {
            "keys": keys,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "axes": make_column(axes),
            "shapes": make_matrix(shapes, max(axes, default=0), 1),
        }
        boxes = _pack_boxes(table, list(objects))
        return cls(pack_columns(specs), boxes, len(table.spec) + len(objects))

    def rows(self) -> tuple[Table, list[str]]:
        """Return the table of the tensors' boxes, and the objects' unique keys."""
        rows = Columns(self.boxes, _SOURCE)
        table = Table(rows.integers("whole"), rows.integers("offset"), rows.integers("extent"))
        return table, rows.texts("objects")

    def only(self, rows: Sequence[int], objects: Collection[str]) -> PackedShards:
        """Return a selection of the shards.

        Args:
            rows: Indices of the boxes to keep, in the table that :meth:`rows` returns.
            objects: Unique keys of the objects to keep.

        Returns:
            New packed shards, with the specs of all tensors.
        """
        table, keys = self.rows()
        kept = [key for key in keys if key in objects]
        return PackedShards(self.specs, _pack_boxes(table.rows(make_column([*rows])), kept), len(rows) + len(kept))

    def rename(self, names: Mapping[str, str]) -> PackedShards:
        """Return the boxes of some tensors under other keys.

        Args:
            names: The other key by the key of each of these tensors.

        Returns:
            New packed shards, without objects and without the boxes of other tensors.
        """
        specs, (table, _) = Columns(self.specs, _SOURCE), self.rows()
        keys = specs.texts("keys")
        chosen = make_column([number for number, key in enumerate(keys) if key in names])
        rows = table.rows(torch.isin(table.spec, chosen).nonzero().view(-1))
        others = {name: specs.integers(name) for name in ("axes", "shapes")}
        texts = {"keys": [names.get(key, key) for key in keys], "dtypes": specs.texts("dtypes")}
        return PackedShards(pack_columns({**texts, **others}), _pack_boxes(rows, []), len(rows.spec))

    def unpack(self) -> tuple[list[TensorSpec], Table]:
        """Return all tensor specs, and the table of all boxes, with one spec and one box for each object.

        Returns:
            The specs, of tensors and then objects; and the boxes, whose tensor numbers are indices of the specs.
        """
        columns = Columns(self.specs, _SOURCE)
        dtypes = map("torch.{}".format, columns.texts("dtypes"))
        padded = zip(columns.integers("axes").tolist(), columns.integers("shapes").tolist(), strict=True)
        shapes = [tuple(shape[:axes]) for axes, shape in padded]
        specs = list(map(TensorSpec, repeat("tensor"), columns.texts("keys"), dtypes, shapes))
        table, objects = self.rows()
        boxes = Boxes()
        for key in objects:
            shard = PlainObject.empty_from_unique_key(key)
            boxes.add(len(specs), tuple(shard.global_offset), (1,) * len(shard.global_shape))
            specs.append(TensorSpec("object", shard.key, str(None), tuple(shard.global_shape)))
        return specs, concat_tables([table, boxes.table()])


def _pack_boxes(table: Table, objects: Sequence[str]) -> bytes:
    return pack_columns({"whole": table.spec, "offset": table.offset, "extent": table.extent, "objects": objects})
