"""What all ranks store, put together on the main rank from one table of columns a rank."""

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
    from shardckpt_torch_dist.plan.file_layout import Placed
    from shardckpt_torch_dist.plan.items import LocalItems


class LocalPlan(NamedTuple):
    """A rank's items and where they will be, as it tells them to the main rank."""

    stored: PackedShards
    places: bytes


def local_plan(items: LocalItems, placed: Placed) -> LocalPlan:
    """The plan of a rank."""
    numbers = {name: number for number, name in enumerate(placed.files)}
    places: dict[str, Column] = {
        "files": placed.files,
        "places": make_matrix(placed.boxes, 3, 0),
        "object_places": make_matrix([(numbers[file], *place) for file, *place in placed.objects.values()], 3, 0),
    }
    stored = PackedShards.pack(items.keys, items.dtypes, items.shapes, items.boxes.table(), placed.objects)
    return LocalPlan(stored, pack(places))


def merged(plans: Iterable[LocalPlan]) -> StoredIndex:
    """The plans of all ranks as one index; what two ranks would store is the first one's.

    Raises:
        ShardingError: ranks disagree on a tensor, or its boxes do not fill it exactly.
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
        self._known: dict[bytes, torch.Tensor] = {}
        self._files: list[str] = []
        self._objects: dict[str, Item] = {}
        self._tables: list[Table] = []
        self._places: list[torch.Tensor] = []

    def add(self, rank: int, plan: LocalPlan) -> None:
        """Take a rank's plan in."""
        specs = plan.stored.specs
        table, keys = plan.stored.rows()
        if specs not in self._known:
            self._known[specs] = self._numbers_of(rank, Columns(specs, f"the plan of rank {rank}"))
        rows = Columns(plan.places, f"the plan of rank {rank}")
        files = rows.texts("files")
        objects = zip(keys, rows.integers("object_places").tolist(), strict=True)
        for key, (file, start, length) in objects:
            self._objects.setdefault(key, Item(files[file], start, length))
        places = rows.integers("places")
        places[:, 0] += len(self._files)
        self._files += files
        self._places.append(places)
        self._tables.append(table._replace(spec=self._known[specs][table.spec]))

    def index(self) -> StoredIndex:
        """The index of all that was taken in."""
        table, places = concat_tables(self._tables), torch.cat(self._places)
        order = _without_twins(table)
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

    def _numbers_of(self, rank: int, specs: Columns) -> torch.Tensor:
        """The numbers here of a rank's tensors."""
        shapes = specs.integers("shapes").tolist()
        found = []
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
            found.append(number)
        return make_column(found)


def _without_twins(table: Table) -> torch.Tensor:
    """Rows by the number of their whole, in their order, each offset of a whole once."""
    order = table.spec.argsort(stable=True)
    corners = Table(table.spec, table.offset, torch.zeros_like(table.extent))
    hashes, by_hash = corners.hashes().sort(stable=True)
    alike = (hashes[1:] == hashes[:-1]).nonzero().view(-1)
    first, second = by_hash[alike], by_hash[alike + 1]
    same = (table.spec[first] == table.spec[second]) & (table.offset[first] == table.offset[second]).all(1)
    keep = torch.ones_like(table.spec, dtype=torch.bool)
    keep[second[same]] = False
    return order[keep[order]]


__all__ = ["LocalPlan", "local_plan", "merged"]
