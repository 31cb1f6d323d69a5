"""Merge what all ranks store, on the main rank; each sends columns, not objects."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError, listed
from shardckpt.planning import Table, concat_tables, find_untiled, make_column
from shardckpt.storage import Columns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.planning import Ints
    from shardckpt.storage import PackedShards


class LocalPlan(NamedTuple):
    """A rank's items and their positions, as the rank sends them to the main rank.

    Attributes:
        stored: The boxes and objects.
        locations: Packed columns: ``files``, their names; ``boxes`` and ``objects``, the location of each item: number
            of the file, then what else the format needs, such as start and length in bytes; ``listed``, keys of objects
            that are not listed by their unique key, and ``listed_objects``, the number of the object for each.
    """

    stored: PackedShards
    locations: bytes


class MergedPlan(NamedTuple):
    """What all ranks store. A tensor's number is its position in ``keys``.

    Attributes:
        keys: The keys of the tensors.
        dtypes: Their dtypes.
        shapes: Their global shapes.
        bounds: int64 of shape (tensors + 1,): the boxes of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
        boxes: The boxes of all tensors, those of a tensor one after the other.
        locations: The location of each box, int64 of shape (boxes, columns); the first is the number of the file.
        files: The names of all files.
        objects: The location of each object, by the key that it is listed by.
    """

    keys: list[str]
    dtypes: list[torch.dtype]
    shapes: list[Ints]
    bounds: torch.Tensor
    boxes: Table
    locations: torch.Tensor
    files: list[str]
    objects: dict[str, list[int]]


class _GlobalTensor(NamedTuple):
    """A tensor of the checkpoint: its number, and what the first rank that stores a part says of it."""

    number: int
    dtype: torch.dtype
    shape: Ints
    rank: int


def merge_plans(plans: Iterable[LocalPlan]) -> MergedPlan:
    """Merge the plans of all ranks.

    Args:
        plans: The plans, in the order of the ranks. If several ranks store the same item, the lowest rank's counts.

    Returns:
        What all ranks store.

    Raises:
        ShardingError: Ranks disagree on a tensor, its boxes do not fill it exactly, or an object has its key.
    """
    tensors: dict[str, _GlobalTensor] = {}
    numbers_by_specs: dict[bytes, torch.Tensor] = {}
    files: list[str] = []
    objects: dict[str, list[int]] = {}
    tables: list[Table] = []
    locations: list[torch.Tensor] = []
    for rank, plan in enumerate(plans):
        specs, (table, object_keys) = plan.stored.specs, plan.stored.rows()
        # Many ranks store parts of the same tensors, and send the same bytes: each of these is unpacked once.
        if specs not in numbers_by_specs:
            numbers_by_specs[specs] = _number_tensors(tensors, rank, Columns(specs, f"the plan of rank {rank}"))
        columns = Columns(plan.locations, f"the plan of rank {rank}")
        places = columns.integers("objects")
        boxes = columns.integers("boxes")
        for found in (places, boxes):
            found[:, 0] += len(files)  # ranks number their own files from 0
        rows = places.tolist()
        for key, number in _list_keys(object_keys, columns):
            objects.setdefault(key, rows[number])
        files += columns.texts("files")
        locations.append(boxes)
        tables.append(table._replace(spec=numbers_by_specs[specs][table.spec]))

    twice = sorted(tensors.keys() & objects.keys())
    if twice:
        raise ShardingError(
            f"{listed(list(map(repr, twice)))} would be the key of a tensor and of an object: rename one"
        )
    table, location = concat_tables(tables), torch.cat(locations)
    order = _sort_distinct(table)
    table = table.rows(order)
    keys, shapes = list(tensors), [tensor.shape for tensor in tensors.values()]
    wrong = find_untiled(table, shapes)
    if wrong:
        shown = listed([repr(keys[number]) for number in wrong])
        raise ShardingError(
            f"the shards of all ranks do not fill {len(wrong)} tensors exactly: {shown}; save with "
            "validate_access_integrity=True to see which regions"
        )
    counts = torch.bincount(table.spec, minlength=len(keys))
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    dtypes = [tensor.dtype for tensor in tensors.values()]
    return MergedPlan(keys, dtypes, shapes, bounds, table, location[order], files, objects)


def _list_keys(unique_keys: list[str], columns: Columns) -> Iterable[tuple[str, int]]:
    """Return the keys under which the objects of a rank are listed, each with the number of the object."""
    if not columns.has("listed"):
        return zip(unique_keys, count(), strict=False)
    listed = list(zip(columns.texts("listed"), columns.integers("listed_objects").tolist(), strict=True))
    others = {number for _, number in listed}
    return [*((key, number) for number, key in enumerate(unique_keys) if number not in others), *listed]


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
        if (mine.dtype, mine.shape) != (first.dtype, first.shape):
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
