"""Descriptions of shards, without data, packed into bytes: cheap to send to another process, cache and compare."""

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
        specs: Packed keys, dtypes and global shapes of tensors; often the same bytes on many ranks.
        boxes: Packed boxes of these tensors, and the unique keys of objects.
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
            keys: The keys of the tensors.
            dtypes: The dtype of each tensor.
            shapes: The global shape of each tensor.
            table: The boxes; a tensor's number is its position in ``keys``.
            objects: Unique keys of the objects.

        Returns:
            The packed shards.
        """
        # apart from the boxes, which differ between ranks: these bytes are equal, and so parsed once
        specs = describe_specs(keys, [str(dtype).removeprefix("torch.") for dtype in dtypes], shapes)
        boxes = _pack_boxes(table, list(objects))
        return cls(pack_columns(specs), boxes, len(table.spec) + len(objects))

    def unpack_boxes(self) -> tuple[Table, list[str]]:
        """Return the table of the tensors' boxes, and the objects' unique keys."""
        columns = Columns(self.boxes, _SOURCE)
        table = Table(columns.integers("whole"), columns.integers("offset"), columns.integers("extent"))
        return table, columns.texts("objects")

    def select(self, rows: Sequence[int], objects: Collection[str]) -> PackedShards:
        """Return some of the boxes and objects.

        Args:
            rows: Indices of the boxes to keep, in the table that :meth:`unpack_boxes` returns.
            objects: Unique keys of the objects to keep.

        Returns:
            New packed shards, with the specs of all tensors.
        """
        table, keys = self.unpack_boxes()
        kept = [key for key in keys if key in objects]
        return PackedShards(self.specs, _pack_boxes(table.rows(make_column([*rows])), kept), len(rows) + len(kept))

    def rename(self, names: Mapping[str, str]) -> PackedShards:
        """Return the boxes of the tensors that get other keys, under these.

        Args:
            names: The new key of a tensor, by its key.

        Returns:
            New packed shards, without objects and without the boxes of other tensors.
        """
        columns, (table, _) = Columns(self.specs, _SOURCE), self.unpack_boxes()
        keys = columns.texts("keys")
        renamed = make_column([number for number, key in enumerate(keys) if key in names])
        boxes = table.rows(torch.isin(table.spec, renamed).nonzero().view(-1))
        specs: dict[str, Column] = {
            "keys": [names.get(key, key) for key in keys],
            "dtypes": columns.texts("dtypes"),
            "axes": columns.integers("axes"),
            "shapes": columns.integers("shapes"),
        }
        return PackedShards(pack_columns(specs), _pack_boxes(boxes, []), len(boxes.spec))

    def unpack(self) -> tuple[list[TensorSpec], Table]:
        """Return the specs and boxes of tensors and objects; an object is one box.

        Returns:
            The specs, of tensors and then objects; and the boxes, whose tensor numbers are indices of the specs.
        """
        keys, dtypes, shapes = list_specs(self.specs)
        specs = list(map(TensorSpec, repeat("tensor"), keys, map("torch.{}".format, dtypes), shapes))
        table, objects = self.unpack_boxes()
        boxes = Boxes()
        for key in objects:
            shard = PlainObject.empty_from_unique_key(key)
            boxes.add(len(specs), tuple(shard.global_offset), (1,) * len(shard.global_shape))
            specs.append(TensorSpec("object", shard.key, str(None), tuple(shard.global_shape)))
        return specs, concat_tables([table, boxes.table()])


def describe_specs(keys: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Ints]) -> dict[str, Column]:
    """Return the columns of tensors: their keys, the names of their dtypes, and their global shapes."""
    axes = [len(shape) for shape in shapes]
    matrix = make_matrix(shapes, max(axes, default=0), 1)
    return {"keys": keys, "dtypes": dtypes, "axes": make_column(axes), "shapes": matrix}


def list_specs(packed: bytes | Columns) -> tuple[list[str], list[str], list[Ints]]:
    """Return the arguments of :func:`describe_specs` from its columns or their bytes."""
    columns = packed if isinstance(packed, Columns) else Columns(packed, _SOURCE)
    padded = zip(columns.integers("axes").tolist(), columns.integers("shapes").tolist(), strict=True)
    return columns.texts("keys"), columns.texts("dtypes"), [tuple(shape[:axes]) for axes, shape in padded]


def _pack_boxes(table: Table, objects: Sequence[str]) -> bytes:
    return pack_columns({"whole": table.spec, "offset": table.offset, "extent": table.extent, "objects": objects})
