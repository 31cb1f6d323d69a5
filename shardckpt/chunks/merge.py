"""Merge what all ranks store, on the main rank; each sends columns, not objects."""

from __future__ import annotations

from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError, format_many, listed
from shardckpt.mapping.sharded_tensor import BlockScales
from shardckpt.planning.table import Table, concat_tables, find_untiled, make_bounds, make_column, make_matrix
from shardckpt.storage.columns import Columns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.columns import Column
    from shardckpt.storage.packed_shards import PackedShards


class LocalPlan(NamedTuple):
    """A rank's boxes and objects, and their positions, as the rank sends them to the main rank.

    ``locations`` is packed columns: ``files``, their names; ``boxes`` and ``objects``, the location of each item:
    number of the file, then what else the format needs, such as start and length in bytes; ``listed``, keys of objects
    that are not listed by their unique key, and ``listed_objects``, the number of the object for each; ``scaled``, keys
    of tensors, and for each ``scaled_by``, the key of its scales, and ``scaled_block``.
    """

    stored: PackedShards
    locations: bytes

    @property
    def nbytes(self) -> int:
        """Its size, as it is sent."""
        return len(self.stored.specs) + len(self.stored.boxes) + len(self.locations)


class MergedPlan(NamedTuple):
    """The items that all ranks store. A tensor's number is its position in ``keys``.

    Attributes:
        keys: The keys of the tensors.
        dtypes: Their dtypes.
        shapes: Their global shapes.
        bounds: int64 of shape (tensors + 1,): the boxes of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
        boxes: The boxes of all tensors, those of a tensor one after the other.
        locations: The location of each box, int64 of shape (boxes, columns); the first is the number of the file.
        files: The names of all files.
        objects: The location of each object, by the key that it is listed by.
        aliases: The number of a tensor by each of its further keys.
        scales: By the number of a tensor, that of its scales, and a block's size along each axis.
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
        elements: The same in elements, which blocks count; shapes of torch's float4 count pairs along the last axis.
        by: The key of its scales.
        block: A block's size along each axis.
    """

    number: int
    key: str
    shape: Ints
    elements: Ints
    by: str
    block: Ints

    def find_scales(self, names: Mapping[str, int], shapes: Sequence[Ints]) -> int:
        """Return the number of the scales, after a check that they are there and fit."""
        if self.by not in names:
            raise ShardingError(
                f"tensor {self.key!r} has block_scales in {self.by!r}, which no rank saves: save it, too, or leave out "
                "block_scales"
            )
        number = names[self.by]
        blocks = tuple(-(-size // length) for size, length in zip(self.elements, self.block, strict=True))
        if tuple(shapes[number]) != blocks:
            counted = "" if self.elements == self.shape else f", {self.elements} in elements,"
            raise ShardingError(
                f"tensor {self.key!r} of shape {self.shape}{counted} has block_scales of blocks {self.block}, so "
                f"{self.by!r} has the shape {blocks}, but it has {shapes[number]}"
            )
        return number


class _GlobalTensor(NamedTuple):
    """A tensor of the checkpoint: its number; dtype and shape, as the first rank that stores a part of it has them."""

    number: int
    dtype: torch.dtype
    shape: Ints
    rank: int


class RankRows(NamedTuple):
    """The boxes that a rank stores of some tensors.

    Attributes:
        rank: The rank, for errors.
        specs: Packed specs of the tensors, as in :class:`shardckpt.storage.PackedShards`; often equal on many ranks.
        table: The boxes, whose tensor numbers count in the specs.
        locations: The location of each box, with the number of its file among those of all ranks.
    """

    rank: int
    specs: bytes
    table: Table
    locations: torch.Tensor


def merge_plans(plans: Iterable[LocalPlan], aliases: Mapping[str, str] = MappingProxyType({})) -> MergedPlan:
    """Merge the plans of all ranks, in their order; if several store the same item, the lowest rank's counts.

    ``aliases`` has further keys of tensors, and the key by which each is stored. If ranks disagree on a tensor, its
    boxes do not fill it exactly, or an object has its key, it is a ShardingError.
    """
    files: list[str] = []
    objects: dict[str, list[int]] = {}
    parts: list[RankRows] = []
    scaled: list[tuple[int, Columns]] = []
    for rank, plan in enumerate(plans):
        table, object_keys = plan.stored.rows()
        columns = Columns(plan.locations, f"the plan of rank {rank}")
        places = columns.integers("objects")
        boxes = columns.integers("boxes")
        for found in (places, boxes):
            found[:, 0] += len(files)  # ranks number their own files from 0
        rows = places.tolist()
        for key, number in list_object_keys(object_keys, columns):
            objects.setdefault(key, rows[number])
        files += columns.texts("files")
        parts.append(RankRows(rank, plan.stored.specs, table, boxes))
        scaled.append((rank, columns))
    merged = merge_rows(parts, objects, aliases)._replace(files=files, objects=objects)
    with_scales = list_scaled(merged, scaled)
    names = {**merged.numbers, **merged.aliases} if with_scales else {}
    return merged._replace(scales={t.number: (t.find_scales(names, merged.shapes), t.block) for t in with_scales})


def merge_rows(parts: Sequence[RankRows], object_keys: Collection[str], aliases: Mapping[str, str]) -> MergedPlan:
    """Merge the boxes of at least one rank, in the order of the ranks; of each tensor there are those of all ranks.

    Returns the tensors and boxes, without files, objects and scales. No tensor may have one of ``object_keys``. The
    rest is as for :func:`merge_plans`.
    """
    tensors: dict[str, _GlobalTensor] = {}
    numbers_by_specs: dict[bytes, torch.Tensor] = {}
    tables: list[Table] = []
    for rank, specs, table, _ in parts:
        # Many ranks store parts of the same tensors, and send the same bytes: each of these is unpacked once.
        if specs not in numbers_by_specs:
            numbers_by_specs[specs] = _number_tensors(tensors, rank, Columns(specs, f"the plan of rank {rank}"))
        tables.append(table._replace(spec=numbers_by_specs[specs][table.spec]))

    refuse_object_keys(object_keys, tensors, aliases)
    table, location = concat_tables(tables), torch.cat([part.locations for part in parts])
    order = _sort_distinct(table)
    table = table.rows(order)
    keys, shapes = list(tensors), [tensor.shape for tensor in tensors.values()]
    wrong = find_untiled(table, shapes)
    if wrong:
        shown = listed([repr(keys[number]) for number in wrong])
        raise ShardingError(
            f"the shards of all ranks do not fill {format_many(len(wrong), 'tensor')} exactly: {shown}; save with "
            "validate_access_integrity=True to see which regions"
        )
    counts = torch.bincount(table.spec, minlength=len(keys))
    bounds = make_bounds(counts)
    dtypes = [tensor.dtype for tensor in tensors.values()]
    numbers = {alias: tensors[key].number for alias, key in aliases.items()}
    return MergedPlan(keys, dtypes, shapes, bounds, table, location[order], [], {}, numbers)


def refuse_object_keys(object_keys: Collection[str], *tensors: Collection[str]) -> None:
    """Raise ShardingError if an object has the key of a tensor."""
    twice = sorted(key for key in object_keys if any(key in keys for keys in tensors))
    if twice:
        raise ShardingError(
            f"{listed(list(map(repr, twice)))} would be the key of a tensor and of an object: rename one"
        )


def make_scale_columns(scales: Mapping[str, BlockScales]) -> dict[str, Column]:
    """Return the columns of a plan that say what scales tensors, by their keys; none if there are no scales."""
    if not scales:
        return {}
    blocks = [each.block for each in scales.values()]
    return {
        "scaled": list(scales),
        "scaled_by": [each.key for each in scales.values()],
        "scaled_block": make_matrix(blocks, max(map(len, blocks)), 1),
    }


def has_scales(plan: LocalPlan) -> bool:
    """Return whether a rank's plan says what scales a tensor."""
    return Columns(plan.locations, "a plan").has("scaled")


def list_object_keys(unique_keys: list[str], columns: Columns) -> Iterable[tuple[str, int]]:
    """Return the keys under which the objects of a rank are listed, each with the number of the object."""
    if not columns.has("listed"):
        return zip(unique_keys, count(), strict=False)
    listed = list(zip(columns.texts("listed"), columns.integers("listed_objects").tolist(), strict=True))
    others = {number for _, number in listed}
    return [*((key, number) for number, key in enumerate(unique_keys) if number not in others), *listed]


def list_scaled(plan: MergedPlan, scaled: Iterable[tuple[int, Columns]]) -> list[ScaledTensor]:
    """Return the tensors of a plan that have block scales, as columns of ranks say, each with its rank."""
    found: dict[str, BlockScales] = {}
    numbers: dict[str, int] = {}
    for rank, columns in scaled:
        if not columns.has("scaled"):
            continue
        numbers = numbers or plan.numbers
        blocks = columns.integers("scaled_block").tolist()
        for key, by, block in zip(columns.texts("scaled"), columns.texts("scaled_by"), blocks, strict=True):
            mine = BlockScales(by, tuple(block[: len(plan.shapes[numbers[key]])]))  # without what pads a rank's rows
            if found.setdefault(key, mine) != mine:
                raise ShardingError(
                    f"tensor {key!r}: ranks disagree on its block_scales: {found[key]} before, {mine} on rank {rank}"
                )
    return [_describe_scaled(plan, numbers[key], scales) for key, scales in found.items()]


def _describe_scaled(plan: MergedPlan, number: int, scales: BlockScales) -> ScaledTensor:
    shape = tuple(plan.shapes[number])
    is_packed = plan.dtypes[number] == torch.float4_e2m1fn_x2
    elements = (*shape[:-1], 2 * shape[-1]) if is_packed else shape
    return ScaledTensor(number, plan.keys[number], shape, elements, scales.key, scales.block)


def _number_tensors(tensors: dict[str, _GlobalTensor], rank: int, specs: Columns) -> torch.Tensor:
    """Return the numbers of a rank's tensors in the index; new tensors are added."""
    numbers = []
    for key, name, axes, padded in zip(
        specs.texts("keys"),
        specs.texts("dtypes"),
        specs.integers("axes").tolist(),
        specs.integers("shapes").tolist(),
        strict=True,
    ):
        mine = _GlobalTensor(len(tensors), getattr(torch, name), tuple(padded[:axes]), rank)
        first = tensors.setdefault(key, mine)
        if first is not mine and (mine.dtype, mine.shape) != (first.dtype, first.shape):
            raise ShardingError(
                f"tensor {key!r}: ranks disagree on it: {first.dtype} {first.shape} on rank {first.rank}, "
                f"{mine.dtype} {mine.shape} on rank {rank}"
            )
        numbers.append(first.number)
    return make_column(numbers)


def _sort_distinct(table: Table) -> torch.Tensor:
    """Return the rows sorted by tensor, without those whose offset an earlier row of the tensor has.

    Rows come in the order of the ranks, and the sorts are stable: the lowest rank's copy is the one that stays.
    """
    if bool((table.spec[1:] > table.spec[:-1]).all()):  # one box per tensor, as most have
        return torch.arange(len(table.spec), device="cpu")
    order = table.spec.argsort(stable=True)
    corners = Table(table.spec, table.offset, torch.zeros_like(table.extent))
    hashes, by_hash = corners.hashes().sort(stable=True)
    equal = (hashes[1:] == hashes[:-1]).nonzero().view(-1)
    first, second = by_hash[equal], by_hash[equal + 1]
    # Equal hashes are only candidates: the offsets decide.
    same = (table.spec[first] == table.spec[second]) & (table.offset[first] == table.offset[second]).all(1)
    keep = torch.ones_like(table.spec, dtype=torch.bool)
    keep[second[same]] = False
    return order[keep[order]]
