"""Merge the plans of all ranks by owners: each merges the tensors of one part, and no rank has the boxes of all.

The key of a tensor decides its part, and the number of a part the rank that owns it. The boxes go to the owners as
columns. Many ranks describe the same tensors: each sends a hash of its descriptions, and the owner asks the first rank
with each hash for them. A tensor and its block scales may be in two parts: the owner of the tensor asks the owner of
the scales. The main rank gets the names of files and the objects, and for each part the number of its tensors, their
further keys and their scales.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections import defaultdict
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.chunks.merge import (
    LocalPlan,
    MergedPlan,
    RankRows,
    ScaledTensor,
    list_object_keys,
    list_scaled,
    merge_plans,
    merge_rows,
    refuse_object_keys,
)
from shardckpt.distributed.routing import find_owner, join_parts, place_owner, split_parts
from shardckpt.planning.table import Table, make_column
from shardckpt.storage.columns import Column, Columns, pack_columns
from shardckpt.storage.packed_shards import PackedShards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.planning.boxes import Ints

_SOURCE = "a plan for an owner"
_DIGEST = "specs"


class OwnedParts(NamedTuple):
    """The result of this rank's merge.

    Attributes:
        parts: The tensors and boxes of the parts that it owns, by the number of the part; parts without tensors are
            left out.
        rest: On the main rank the files and objects of all ranks, without tensors, and the aliases and scales of all
            parts, whose tensors are numbered from the first part to the last; None on the others.
    """

    parts: dict[int, MergedPlan]
    rest: MergedPlan | None


def merge_by_owners(
    plan: LocalPlan,
    count: int,
    comm: Comm,
    aliases: Mapping[str, str] = MappingProxyType({}),
    *,
    scaled: bool = False,
) -> OwnedParts:
    """Collective: merge the plans of all ranks in ``count`` parts, each on the rank that owns it; return this rank's.

    The count is at least 1. A rank may own several parts. ``scaled`` says whether a tensor of any rank has block
    scales. These, and the aliases, are the same on all ranks. Errors are as of
    :func:`shardckpt.chunks.merge.merge_plans`, on all ranks.
    """
    with comm.local_phase("planning for all ranks"):
        rest_of_plan = drop_boxes(plan)
    plans = comm.gather(rest_of_plan)
    with comm.local_phase("planning for all ranks"):
        rest = merge_plans(plans) if comm.is_main else None
        refuse_object_keys(() if rest is None else rest.objects, aliases)
        counts = pack_file_counts(plans)
    counts = comm.broadcast(counts)
    with comm.local_phase("sending boxes to their owners"):
        first_file = sum(array("I", zlib.decompress(counts))[: comm.rank])
        specs = SpecsByPart(plan, count)
        messages = address_parts(route_rows(plan, first_file, specs), comm.world_size)
    arrived = comm.all_to_all(messages)
    with comm.local_phase("sending boxes to their owners"):
        owned = PartMerge(arrived)
    asked = comm.all_to_all(owned.questions)
    with comm.local_phase("sending boxes to their owners"):
        answers = {rank: answer(question, specs) for rank, question in asked.items()}
    answered = comm.all_to_all(answers)
    with comm.local_phase("planning for all ranks"):
        parts = owned.merge(answered, aliases, count)
    if not (aliases or scaled):
        return OwnedParts(parts, rest)
    with comm.local_phase("planning for all ranks"):
        seeking = owned.seek_scales(aliases, count, comm.world_size)
    sought = comm.all_to_all(seeking)
    with comm.local_phase("planning for all ranks"):
        links = link_parts(parts, sought)
    gathered = comm.gather_some(links, given=bool(links))
    with comm.local_phase("planning for all ranks"):
        return OwnedParts(parts, None if rest is None else number_links(rest, gathered))


def drop_boxes(plan: LocalPlan) -> LocalPlan:
    """Return a plan with its files and objects alone."""
    table, objects = plan.stored.unpack_boxes()
    columns = Columns(plan.locations, _SOURCE)
    kept = {name: columns.integers(name) for name in ("boxes", "objects", "listed_objects") if columns.has(name)}
    kept["boxes"] = kept["boxes"][:0]
    texts = {name: columns.texts(name) for name in ("files", "listed") if columns.has(name)}
    return LocalPlan(PackedShards.pack([], [], [], table.rows(slice(0)), objects), pack_columns({**texts, **kept}))


def pack_file_counts(plans: Sequence[LocalPlan]) -> bytes:
    """Return the number of files of each rank; compressed, because most ranks have as many as the others."""
    return zlib.compress(array("I", [len(Columns(plan.locations, _SOURCE).texts("files")) for plan in plans]).tobytes())


class SpecsByPart:
    """The tensors of a rank, by the part that they are in.

    Attributes:
        count: The number of parts of all ranks.
        owners: int64 of shape (tensors,): the part of each tensor.
        numbers: By part, the numbers of its tensors.
        packed: By part, its specs and the block scales of its tensors, packed.
        digests: By part, a hash of ``packed``.
    """

    def __init__(self, plan: LocalPlan, count: int) -> None:
        self.count = count
        specs = Columns(plan.stored.specs, _SOURCE)
        keys, dtypes = specs.texts("keys"), specs.texts("dtypes")
        axes, shapes = specs.integers("axes"), specs.integers("shapes")
        owner_by_key = {key: find_owner(key, count) for key in keys}
        scaled = _part_scales(Columns(plan.locations, _SOURCE), owner_by_key)
        found: dict[int, list[int]] = defaultdict(list)
        for number, key in enumerate(keys):
            found[owner_by_key[key]].append(number)
        self.owners = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
        self.numbers: dict[int, torch.Tensor] = {}
        self.packed: dict[int, bytes] = {}
        for owner, numbers in found.items():
            own = make_column(numbers)
            self.owners[own] = owner
            self.numbers[owner] = own
            columns: dict[str, Column] = {"keys": [keys[n] for n in numbers], "dtypes": [dtypes[n] for n in numbers]}
            columns |= {"axes": axes[own], "shapes": shapes[own], **scaled.get(owner, {})}
            self.packed[owner] = pack_columns(columns)
        self.digests = {owner: hashlib.sha256(data).hexdigest()[:16] for owner, data in self.packed.items()}


def _part_scales(columns: Columns, owner_by_key: Mapping[str, int]) -> dict[int, dict[str, Column]]:
    """Return the columns of a rank's plan with the scales of its tensors, by the part of the tensors."""
    if not columns.has("scaled"):
        return {}
    keys, by, blocks = columns.texts("scaled"), columns.texts("scaled_by"), columns.integers("scaled_block")
    rows: dict[int, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        rows[owner_by_key[key]].append(number)
    return {
        owner: {
            "scaled": [keys[n] for n in numbers],
            "scaled_by": [by[n] for n in numbers],
            "scaled_block": blocks[make_column(numbers)],
        }
        for owner, numbers in rows.items()
    }


def route_rows(plan: LocalPlan, first_file: int, specs: SpecsByPart) -> dict[int, bytes]:
    """Return the items of a rank in each part: the boxes, their locations and keys of objects, as packed columns.

    There is a message for each part with boxes or objects of the rank, by the number of the part. ``first_file`` is the
    number of its first file among the files of all ranks.
    """
    columns = Columns(plan.locations, _SOURCE)
    table, objects = plan.stored.unpack_boxes()
    locations = columns.integers("boxes")
    locations[:, 0] += first_file
    names: dict[int, list[str]] = defaultdict(list)
    for key, _ in list_object_keys(objects, columns):
        names[find_owner(key, specs.count)].append(key)
    of_row = specs.owners[table.spec]
    order = of_row.argsort(stable=True)
    ends = torch.bincount(of_row, minlength=specs.count).cumsum(0).tolist()
    found = {}
    for owner in sorted({*specs.numbers, *names}):
        here = order[ends[owner - 1] if owner else 0 : ends[owner]]
        own = specs.numbers.get(owner, here[:0])
        rows: dict[str, Column] = {
            "spec": torch.searchsorted(own, table.spec[here]),
            "offset": table.offset[here],
            "extent": table.extent[here],
            "place": locations[here],
            "objects": names[owner],
        }
        found[owner] = pack_columns(rows, {_DIGEST: specs.digests.get(owner, "")})
    return found


def address_parts(parts: Mapping[int, bytes], world_size: int) -> dict[int, bytes]:
    """Return one message for each rank that owns some of the parts."""
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for number, data in parts.items():
        found[place_owner(number, world_size)].append((number, data))
    return {owner: join_parts(some) for owner, some in found.items()}


def answer(question: bytes, specs: SpecsByPart) -> bytes:
    """Return the specs that an owner has asked this rank for."""
    return join_parts((number, specs.packed[number]) for number in array("I", question))


class PartMerge:
    """The messages that an owner has received: the rows of its parts, by the rank that sent them.

    Attributes:
        questions: For each rank that it needs specs from, the numbers of their parts, as packed integers.
    """

    def __init__(self, messages: Mapping[int, bytes]) -> None:
        self._rows: dict[int, list[tuple[int, Columns]]] = defaultdict(list)
        #: The first rank that has the specs with a digest, by part and digest.
        self._holders: dict[tuple[int, str], int] = {}
        asked: dict[int, array[int]] = defaultdict(lambda: array("I"))
        for rank, message in sorted(messages.items()):
            for number, data in split_parts(message):
                columns = Columns(data, f"the plan of rank {rank}")
                self._rows[number].append((rank, columns))
                digest = columns.metadata[_DIGEST]
                if digest and self._holders.setdefault((number, digest), rank) == rank:
                    asked[rank].append(number)
        self.questions = {rank: numbers.tobytes() for rank, numbers in asked.items()}
        #: The tensors with block scales, by the number of their part.
        self._scaled: dict[int, list[ScaledTensor]] = {}

    def merge(self, answers: Mapping[int, bytes], aliases: Mapping[str, str], count: int) -> dict[int, MergedPlan]:
        """Return the items of all ranks in each part that has tensors, by the number of the part.

        ``aliases`` are the aliases of all ``count`` parts. Files, locations of objects, and scales are not there.
        Errors are as of :func:`shardckpt.chunks.merge.merge_plans`.
        """
        specs = {(number, rank): data for rank, message in answers.items() for number, data in split_parts(message)}
        of_part: dict[int, dict[str, str]] = defaultdict(dict)
        for alias, key in aliases.items():
            of_part[find_owner(key, count)][alias] = key
        merged = {}
        for number in sorted(self._rows):
            parts, objects = self._list_rows(number, specs)
            if parts:
                merged[number] = merge_rows(parts, objects, of_part[number])
                unique: dict[bytes, int] = {}  # the first rank with each specs
                for part in parts:
                    unique.setdefault(part.specs, part.rank)
                scaled = ((rank, Columns(packed, _SOURCE)) for packed, rank in unique.items())
                self._scaled[number] = list_scaled(merged[number], scaled)
        return merged

    def seek_scales(self, aliases: Mapping[str, str], count: int, world_size: int) -> dict[int, bytes]:
        """Return the questions for the owners of the scales of this rank's tensors, by rank; after :meth:`merge`."""
        questions: dict[int, list[list[object]]] = defaultdict(list)
        for number, tensors in self._scaled.items():
            for tensor in tensors:
                scales_part = find_owner(aliases.get(tensor.scales, tensor.scales), count)
                questions[place_owner(scales_part, world_size)].append([number, scales_part, *tensor])
        return {rank: json.dumps(rows).encode() for rank, rows in questions.items()}

    def _list_rows(self, number: int, specs: Mapping[tuple[int, int], bytes]) -> tuple[list[RankRows], set[str]]:
        """Return the rows of a part, and the keys of objects that would be in it if they were tensors."""
        parts, objects = [], set()
        for rank, columns in self._rows[number]:
            table = Table(*map(columns.integers, ("spec", "offset", "extent")))
            objects.update(columns.texts("objects"))
            if digest := columns.metadata[_DIGEST]:  # else it has objects alone
                own = specs[number, self._holders[number, digest]]
                parts.append(RankRows(rank, own, table, columns.integers("place")))
        return parts, objects


class PartLinks(NamedTuple):
    """The facts about a part that the index of all ranks needs.

    Attributes:
        tensors: How many tensors it has.
        aliases: The number of a tensor by each of its further keys.
        scales: For each tensor of any part whose scales are in this one: that part, the tensor's number in it, the
            number of the scales here, and a block's size along each axis.
    """

    tensors: int
    aliases: Mapping[str, int]
    scales: list[tuple[int, int, int, Ints]]


def link_parts(parts: Mapping[int, MergedPlan], sought: Mapping[int, bytes]) -> dict[int, PartLinks]:
    """Return the links of the parts that a rank owns, from the questions for scales, which are checked."""
    scales: dict[int, list[tuple[int, int, int, Ints]]] = defaultdict(list)
    names = {number: {**part.numbers, **part.aliases} for number, part in parts.items()} if sought else {}
    for _, message in sorted(sought.items()):
        for part, scales_part, number, key, shape, elements, scales_key, block in json.loads(message):
            tensor = ScaledTensor(number, key, tuple(shape), tuple(elements), scales_key, tuple(block))
            shapes = parts[scales_part].shapes if scales_part in parts else ()
            found = tensor.find_scales(names.get(scales_part, {}), shapes)
            scales[scales_part].append((part, number, found, tensor.block))
    return {n: PartLinks(len(part.keys), dict(part.aliases), scales[n]) for n, part in parts.items()}


def number_links(rest: MergedPlan, gathered: Sequence[Mapping[int, PartLinks]]) -> MergedPlan:
    """Return the plan of the main rank with the aliases and scales of all parts, whose tensors follow each other."""
    links = dict(sorted((number, found) for some in gathered for number, found in some.items()))
    first = dict(zip(links, accumulate((found.tensors for found in links.values()), initial=0), strict=False))
    aliases = {alias: first[n] + number for n, found in links.items() for alias, number in found.aliases.items()}
    scales = {
        first[part] + number: (first[n] + by, block)
        for n, found in links.items()
        for part, number, by, block in found.scales
    }
    return rest._replace(aliases=dict(sorted(aliases.items())), scales=dict(sorted(scales.items())))
