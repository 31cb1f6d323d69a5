"""Merge the plans of all ranks into one index, on the main rank; a plan travels as columns, not as objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import ShardingError, listed
from shardckpt.planning import Table, concat_tables, find_untiled, make_column, make_matrix
from shardckpt.storage import Column, Columns, PackedShards, pack
from shardckpt_torch_dist.dialects import Chunks, Item, StoredIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.planning import Ints
    from shardckpt_torch_dist.plan.file_layout import FileLayout
    from shardckpt_torch_dist.plan.items import LocalItems


class LocalPlan(NamedTuple):
    """A rank's items and their positions, as the rank sends them to the main rank.

    Attributes:
        stored: The boxes and objects.
        places: Packed columns: the names of the files, and the position of each box and object.
    """

    stored: PackedShards
    places: bytes


def pack_plan(items: LocalItems, layout: FileLayout) -> LocalPlan:
    """Return the plan that a rank sends to the main rank.

    Args:
        items: The rank's items.
        layout: Their positions in the rank's files.
    """
    numbers = {name: number for number, name in enumerate(layout.files)}
    places: dict[str, Column] = {
        "files": layout.files,
        "places": make_matrix(layout.boxes, 3, 0),
        "object_places": make_matrix([(numbers[file], *place) for file, *place in layout.objects.values()], 3, 0),
    }
    stored = PackedShards.pack(items.keys, items.dtypes, items.shapes, items.boxes.table(), layout.objects)
    return LocalPlan(stored, pack(places))


def merge_plans(plans: Iterable[LocalPlan]) -> StoredIndex:
    """Merge the plans of all ranks into one index.

    Args:
        plans: The plans, in the order of the ranks. If several ranks store the same item, the lowest rank's counts.

    Returns:
        The index of what all ranks store.

    Raises:
        ShardingError: Ranks disagree on a tensor, or its boxes do not fill it exactly.
    """
    merge = _Merge()
    for rank, plan in enumerate(plans):
        merge.add(rank, plan)
    return merge.index()


class _Merge:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._first_rank: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._shapes: list[Ints] = []
        self._numbers_by_specs: dict[bytes, torch.Tensor] = {}
        self._files: list[str] = []
        self._objects: dict[str, Item] = {}
        self._tables: list[Table] = []
        self._places: list[torch.Tensor] = []

    def add(self, rank: int, plan: LocalPlan) -> None:
        """Add a rank's plan."""
        specs = plan.stored.specs
        table, keys = plan.stored.rows()
        # Many ranks store parts of the same tensors, and send the same bytes: each of these is unpacked once.
        if specs not in self._numbers_by_specs:
            self._numbers_by_specs[specs] = self._number_tensors(rank, Columns(specs, f"the plan of rank {rank}"))
        rows = Columns(plan.places, f"the plan of rank {rank}")
        files = rows.texts("files")
        objects = zip(keys, rows.integers("object_places").tolist(), strict=True)
        for key, (file, start, length) in objects:
            self._objects.setdefault(key, Item(files[file], start, length))  # the lowest rank's counts
        places = rows.integers("places")
        places[:, 0] += len(self._files)
        self._files += files
        self._places.append(places)
        self._tables.append(table._replace(spec=self._numbers_by_specs[specs][table.spec]))

    def index(self) -> StoredIndex:
        """Return the index of all plans that were added."""
        table, places = concat_tables(self._tables), torch.cat(self._places)
        # Ranks in order of their numbers, so that the copy of the lowest rank is the one that stays.
        order = _sort_distinct(table)
        table, places = table.rows(order), places[order]
        keys = list(self._numbers)
        wrong = find_untiled(table, self._shapes)
        if wrong:
            shown = listed([repr(keys[number]) for number in wrong])
            raise ShardingError(
                f"the shards of all ranks do not fill {len(wrong)} tensors exactly: {shown}; save with "
                "validate_access_integrity=True to see which regions"
            )
        counts = torch.bincount(table.spec, minlength=len(keys))
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        file, start, length = places.unbind(1)
        chunks = Chunks(table, file, start, length, torch.zeros_like(file), table.volume())
        return StoredIndex(keys, self._dtypes, self._shapes, bounds, chunks, self._files, self._objects)

    def _number_tensors(self, rank: int, specs: Columns) -> torch.Tensor:
        """Return the numbers in the index of a rank's tensors; new tensors are added."""
        shapes = specs.integers("shapes").tolist()
        numbers = []
        for key, name, axes, padded in zip(
            specs.texts("keys"), specs.texts("dtypes"), specs.integers("axes").tolist(), shapes, strict=True
        ):
            dtype, shape = getattr(torch, name), tuple(padded[:axes])
            number = self._numbers.setdefault(key, len(self._numbers))
            if number == len(self._dtypes):
                self._dtypes.append(dtype)
                self._shapes.append(shape)
                self._first_rank.append(rank)
            elif (dtype, shape) != (self._dtypes[number], self._shapes[number]):
                raise ShardingError(
                    f"tensor {key!r}: ranks disagree on it: {self._dtypes[number]} {self._shapes[number]} on rank "
                    f"{self._first_rank[number]}, {dtype} {shape} on rank {rank}"
                )
            numbers.append(number)
        return make_column(numbers)


def _sort_distinct(table: Table) -> torch.Tensor:
    """Return the rows sorted by tensor, without those whose offset an earlier row of the tensor has."""
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


__all__ = ["LocalPlan", "merge_plans", "pack_plan"]
