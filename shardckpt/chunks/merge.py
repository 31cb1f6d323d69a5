"""Merge the plans of all ranks, on the main rank: columns, since there may be millions of boxes."""

from __future__ import annotations

from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError, format_many, listed
from shardckpt.mapping.sharded_tensor import BlockScales
from shardckpt.planning.table import Table, concat_tables, find_untiled, make_bounds, make_column, make_matrix
from shardckpt.storage.columns import Columns
from shardckpt.storage.packed_shards import list_specs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.columns import Column
    from shardckpt.storage.packed_shards import PackedShards


class LocalPlan(NamedTuple):
    """A rank's boxes and objects, and their locations, as the rank sends them to the main rank.

    ``locations`` is packed columns. ``files`` has the names of the rank's files. ``boxes`` and ``objects`` have the
    location of each item: the number of its file, then further numbers of the format, such as start and length in
    bytes. Optional are, for objects that are not listed by their unique keys, ``listed``, these keys, and
    ``listed_objects``, the objects' numbers; and for tensors with block scales ``scaled``, their keys, ``scaled_by``,
    the keys of their scales, and ``scaled_block``, the sizes of their blocks.
    """

    stored: PackedShards
    locations: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that the rank sends."""
        return len(self.stored.specs) + len(self.stored.boxes) + len(self.locations)


class MergedPlan(NamedTuple):
    """The items that all ranks store. A tensor's number is its position in ``keys``.

    Attributes:
        keys: The keys of the tensors.
        dtypes: Their dtypes.
        shapes: Their global shapes.
        bounds: int64 of shape (tensors + 1,): the boxes of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
        boxes: The boxes of all tensors, ordered by tensor.
        locations: The location of each box, int64 of shape (boxes, columns); the first is the number of the file.
        files: The names of all files.
        objects: The location of each object, by the key under which it is listed.
        aliases: The number of a tensor by each of its further keys.
        scales: The number of a tensor's scales, and a block's size along each axis, by the number of the tensor.
    """

    keys: list[str]
    dtypes: list[torch.dtype]
    shapes: list[Ints]
    bounds: torch.Tensor
    boxes: Table
    locations: torch.Tensor
    files: list[str]
    objects: dict[str, list[int]]
    aliases: Mapping[str, int] = MappingProxyType({})
    scales: Mapping[int, tuple[int, Ints]] = MappingProxyType({})

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each tensor, by its key."""
        return {key: number for number, key in enumerate(self.keys)}


class ScaledTensor(NamedTuple):
    """A tensor with block scales.

    Attributes:
        number: Its number in a plan.
        key: Its key.
        shape: Its global shape.
        elements: The shape in elements, as blocks count them: a dtype such as float4 packs two in the last axis.
        scales: The key of its scales.
        block: A block's size along each axis.
    """

    number: int
    key: str
    shape: Ints
    elements: Ints
    scales: str
    block: Ints

    def find_scales(self, numbers: Mapping[str, int], shapes: Sequence[Ints]) -> int:
        """Return the number of the scales; ShardingError if they are not saved, or not one for each block.

        Args:
            numbers: The number of each saved tensor, by its key and by its further keys.
            shapes: The global shape of each, by its number.
        """
        if self.scales not in numbers:
            raise ShardingError(
                f"tensor {self.key!r} has block_scales in {self.scales!r}, which no rank saves: save it, too, or leave "
                "out block_scales"
            )
        number = numbers[self.scales]
        blocks = tuple(-(-size // length) for size, length in zip(self.elements, self.block, strict=True))
        if tuple(shapes[number]) != blocks:
            counted = "" if self.elements == self.shape else f", {self.elements} in elements,"
            raise ShardingError(
                f"tensor {self.key!r} of shape {self.shape}{counted} has block_scales of blocks {self.block}, so "
                f"{self.scales!r} has the shape {blocks}, but it has {shapes[number]}"
            )
        return number


class _GlobalTensor(NamedTuple):
    """A tensor of the checkpoint: its number, and its description by the first rank that stores a box of it."""

    number: int
    dtype: torch.dtype
    shape: Ints
    rank: int


class RankRows(NamedTuple):
    """The boxes that a rank stores of some tensors.

    Attributes:
        rank: The rank, for errors.
        specs: Packed specs of the tensors, as in :class:`shardckpt.storage.PackedShards`; often equal on many ranks.
        table: The boxes; a tensor's number is its position in the specs.
        locations: The location of each box, with the number of its file among the files of all ranks.
    """

    rank: int
    specs: bytes
    table: Table
    locations: torch.Tensor


def merge_plans(plans: Iterable[LocalPlan], aliases: Mapping[str, str] = MappingProxyType({})) -> MergedPlan:
    """Merge the plans of all ranks, given in the order of the ranks; of an item that several store, the first is kept.

    Args:
        plans: A plan of each rank.
        aliases: The key by which a tensor is stored, by each of its further keys.

    Raises:
        ShardingError: Ranks disagree on a tensor or its scales, its boxes do not fill it exactly, its scales do not
            fit, or an object has its key.
    """
    files: list[str] = []
    objects: dict[str, list[int]] = {}
    rows: list[RankRows] = []
    columns_of_ranks: list[tuple[int, Columns]] = []
    for rank, plan in enumerate(plans):
        table, object_keys = plan.stored.unpack_boxes()
        columns = Columns(plan.locations, f"the plan of rank {rank}")
        object_locations, box_locations = columns.integers("objects"), columns.integers("boxes")
        for locations in (object_locations, box_locations):
            locations[:, 0] += len(files)  # ranks number their own files from 0
        listed_locations = object_locations.tolist()
        for key, number in list_object_keys(object_keys, columns):
            objects.setdefault(key, listed_locations[number])
        files += columns.texts("files")
        rows.append(RankRows(rank, plan.stored.specs, table, box_locations))
        columns_of_ranks.append((rank, columns))
    merged = merge_rows(rows, objects, aliases)._replace(files=files, objects=objects)
    scaled = list_scaled(merged, columns_of_ranks)
    numbers = {**merged.numbers, **merged.aliases} if scaled else {}
    scales = {tensor.number: (tensor.find_scales(numbers, merged.shapes), tensor.block) for tensor in scaled}
    return merged._replace(scales=scales)


def merge_rows(rows: Sequence[RankRows], object_keys: Collection[str], aliases: Mapping[str, str]) -> MergedPlan:
    """Merge the boxes of at least one rank, as :func:`merge_plans` does; return a plan of tensors and boxes alone.

    ``rows`` are in the order of the ranks, and have all boxes of their tensors. No tensor may have one of
    ``object_keys``.
    """
    tensors: dict[str, _GlobalTensor] = {}
    numbers_by_specs: dict[bytes, torch.Tensor] = {}
    tables: list[Table] = []
    for rank, specs, table, _ in rows:
        # many ranks store boxes of the same tensors, and send the same bytes: these are parsed once
        if specs not in numbers_by_specs:
            numbers_by_specs[specs] = _number_tensors(tensors, rank, Columns(specs, f"the plan of rank {rank}"))
        tables.append(table._replace(spec=numbers_by_specs[specs][table.spec]))

    refuse_object_keys(object_keys, tensors, aliases)
    table, location = concat_tables(tables), torch.cat([found.locations for found in rows])
    order = _sort_distinct(table)
    table = table.rows(order)
    keys, shapes = list(tensors), [tensor.shape for tensor in tensors.values()]
    untiled = find_untiled(table, shapes)
    if untiled:
        shown = listed([repr(keys[number]) for number in untiled])
        raise ShardingError(
            f"the shards of all ranks do not fill {format_many(len(untiled), 'tensor')} exactly: {shown}; save with "
            "validate_access_integrity=True to see which regions"
        )
    bounds = make_bounds(torch.bincount(table.spec, minlength=len(keys)))
    dtypes = [tensor.dtype for tensor in tensors.values()]
    numbers_by_alias = {alias: tensors[key].number for alias, key in aliases.items()}
    return MergedPlan(keys, dtypes, shapes, bounds, table, location[order], [], {}, numbers_by_alias)


def refuse_object_keys(object_keys: Collection[str], *tensors: Collection[str]) -> None:
    """Raise ShardingError if an object has the key of a tensor."""
    twice = sorted(key for key in object_keys if any(key in keys for keys in tensors))
    if twice:
        raise ShardingError(
            f"{listed(list(map(repr, twice)))} would be the key of a tensor and of an object: rename one"
        )


def make_scale_columns(scales: Mapping[str, BlockScales]) -> dict[str, Column]:
    """Return the columns of :class:`LocalPlan` for tensors with block scales, given by key; none if there are none."""
    if not scales:
        return {}
    blocks = [tensor_scales.block for tensor_scales in scales.values()]
    return {
        "scaled": list(scales),
        "scaled_by": [tensor_scales.key for tensor_scales in scales.values()],
        "scaled_block": make_matrix(blocks, max(map(len, blocks)), 1),
    }


def has_scales(plan: LocalPlan) -> bool:
    """Return whether a rank's plan has a tensor with block scales."""
    return Columns(plan.locations, "a plan").has("scaled")


def list_object_keys(unique_keys: list[str], columns: Columns) -> Iterable[tuple[str, int]]:
    """Return the keys under which the objects of a rank are listed, each with the number of the object."""
    if not columns.has("listed"):
        return zip(unique_keys, count(), strict=False)
    renamed = list(zip(columns.texts("listed"), columns.integers("listed_objects").tolist(), strict=True))
    numbers = {number for _, number in renamed}
    return [*((key, number) for number, key in enumerate(unique_keys) if number not in numbers), *renamed]


def list_scaled(plan: MergedPlan, columns_of_ranks: Iterable[tuple[int, Columns]]) -> list[ScaledTensor]:
    """Return the tensors of a plan that have block scales; ShardingError if ranks disagree on them.

    ``columns_of_ranks`` has the number of each rank, and its columns of :func:`make_scale_columns`.
    """
    scales_by_key: dict[str, BlockScales] = {}
    numbers: dict[str, int] = {}
    for rank, columns in columns_of_ranks:
        if not columns.has("scaled"):
            continue
        numbers = numbers or plan.numbers  # made once, and only for a plan with scales
        blocks = columns.integers("scaled_block").tolist()
        for key, scales_key, block in zip(columns.texts("scaled"), columns.texts("scaled_by"), blocks, strict=True):
            axes = len(plan.shapes[numbers[key]])
            scales = BlockScales(scales_key, tuple(block[:axes]))  # make_matrix has padded it to the rank's most axes
            first = scales_by_key.setdefault(key, scales)
            if first != scales:
                raise ShardingError(
                    f"tensor {key!r}: ranks disagree on its block_scales: {first} before, {scales} on rank {rank}"
                )
    return [_describe_scaled(plan, numbers[key], scales) for key, scales in scales_by_key.items()]


def _describe_scaled(plan: MergedPlan, number: int, scales: BlockScales) -> ScaledTensor:
    shape = tuple(plan.shapes[number])
    is_packed = plan.dtypes[number] == torch.float4_e2m1fn_x2
    elements = (*shape[:-1], 2 * shape[-1]) if is_packed else shape
    return ScaledTensor(number, plan.keys[number], shape, elements, scales.key, scales.block)


def _number_tensors(tensors: dict[str, _GlobalTensor], rank: int, specs: Columns) -> torch.Tensor:
    """Return the numbers of a rank's tensors among the tensors of all ranks; add new ones to ``tensors``."""
    numbers = []
    for key, name, shape in zip(*list_specs(specs), strict=True):
        tensor = _GlobalTensor(len(tensors), getattr(torch, name), shape, rank)
        first = tensors.setdefault(key, tensor)
        if first is not tensor and (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            raise ShardingError(
                f"tensor {key!r}: ranks disagree on it: {first.dtype} {first.shape} on rank {first.rank}, "
                f"{tensor.dtype} {tensor.shape} on rank {rank}"
            )
        numbers.append(first.number)
    return make_column(numbers)


def _sort_distinct(table: Table) -> torch.Tensor:
    """Return the order of the rows by tensor, without those whose offset an earlier row of the tensor has.

    Rows come in the order of the ranks, and the sorts are stable: the lowest rank's copy stays.
    """
    if bool((table.spec[1:] > table.spec[:-1]).all()):  # one box per tensor, as most have
        return torch.arange(len(table.spec), device="cpu")
    order = table.spec.argsort(stable=True)
    corners = Table(table.spec, table.offset, torch.zeros_like(table.extent))
    hashes, by_hash = corners.hashes().sort(stable=True)
    equal = (hashes[1:] == hashes[:-1]).nonzero().view(-1)
    first, second = by_hash[equal], by_hash[equal + 1]
    # equal hashes are only candidates: the offsets decide
    same = (table.spec[first] == table.spec[second]) & (table.offset[first] == table.offset[second]).all(1)
    keep = torch.ones_like(table.spec, dtype=torch.bool)
    keep[second[same]] = False
    return order[keep[order]]
