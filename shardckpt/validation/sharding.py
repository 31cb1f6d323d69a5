"""Check that the shards of all ranks describe every global tensor exactly once, and agree on its shape and dtype.

Every rank contributes a fingerprint of its boxes, of the same few bytes for any number of shards (see
:func:`shardckpt.planning.table.fingerprint`). If ranks have different keys, one of each set of ranks with the same keys
sends a hash of each tensor to the rank that owns its key: no rank receives those of all. Only if the fingerprints are
wrong the main rank gathers all boxes, to name the fault.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from shardckpt.errors import ShardingError, listed
from shardckpt.mapping.base import ShardedBase, is_main_replica
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import Box, Ints, shard_parts, unflattened_box
from shardckpt.planning.coverage import find_hole, find_overlap
from shardckpt.planning.shard_fields import list_boxes, list_fields
from shardckpt.planning.table import (
    LANES,
    PRIME,
    Boxes,
    Table,
    TensorSpec,
    are_equal_in_field,
    compute_weights,
    concat_tables,
    find_untiled,
    fingerprint,
    fingerprint_each,
    fingerprint_specs,
    make_column,
)
from shardckpt.state_dict import format_path, nested_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.distributed.comm import Comm


#: The row that is sent for a tensor: a hash of its kind and key, its weights, and its share of the fingerprint. Two
#: keys with one hash look like one tensor with two shapes: all boxes are gathered then, which is slow and gives the
#: right answer.
_ROW = struct.Struct(f"<8s{2 * LANES}I")
#: How many places of a key an error shows.
_SHOWN_PLACES = 4
#: The specs of a rank's shards, and their boxes.
Columns: TypeAlias = "tuple[list[TensorSpec], Table]"
#: Kind and key of a tensor or object.
Name: TypeAlias = "tuple[str, str]"


class RankBox(NamedTuple):
    """A box, with the rank that has it and the global shape that the rank gives."""

    rank: int
    shape: Ints
    box: Box


@dataclass(frozen=True)
class ShardColumns:
    """A rank's shards in columns: the tensors and objects that they are shards of, and a table of their boxes.

    The boxes refer to the specs by number.
    """

    specs: list[TensorSpec]
    table: Table

    @cached_property
    def weights(self) -> torch.Tensor:
        """int64 of shape (specs, LANES), by :func:`shardckpt.planning.table.compute_weights`."""
        return compute_weights(self.specs)

    @cached_property
    def sums(self) -> list[int]:
        """The fingerprint of the boxes."""
        return fingerprint(self.table, self.weights)


def validate_shards(
    shards: Sequence[ShardedBase], comm: Comm, columns: ShardColumns | None = None, *, state: Any = None
) -> None:
    """Collective: check that the shards of all ranks describe every global tensor and object exactly once.

    Shards may be of any size. Each must have passed its own ``validate_metadata_integrity`` before. ``columns`` is the
    result of :func:`describe_shards` for them, if that is known already; ``state`` is this rank's state dict, for the
    places in errors. Shards that disagree on dtype or global shape, overlap, or leave a hole are a ShardingError, the
    same on every rank.
    """
    with comm.local_phase("describing shards"):
        columns = columns or describe_shards(shards)
        is_exact = comm.world_size == 1 and _fill_alone(columns)
        if not is_exact:
            _ = columns.sums
    if not is_exact and not _fill_exactly(columns, comm):
        # seldom, and slow for many shards: only to name the fault
        everyone = comm.gather(((columns.specs, columns.table), _find_repeated(state)))
        with comm.collective_phase("checking the shards of all ranks"):
            if comm.is_main:
                _refuse(_find_faults([described for described, _ in everyone], [places for _, places in everyone]))


def validate_shards_by_rank(shards_by_rank: Sequence[Sequence[ShardedBase]]) -> None:
    """Check the shards of all ranks, in rank order, as :func:`validate_shards` does, where one process has them all."""
    described = map(describe_shards, shards_by_rank)
    _refuse(_find_faults([(columns.specs, columns.table) for columns in described]))


def _find_repeated(state: Any) -> dict[str, list[str]]:
    """Return the places in a state dict of each key that stands at several."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, leaf in nested_items(state):
        if isinstance(leaf, ShardedBase):
            places[leaf.key].append(format_path(path))
    return {key: found for key, found in places.items() if len(found) > 1}


def _fill_alone(columns: ShardColumns) -> bool:
    """Return whether the boxes fill their tensors exactly, without the boxes of other ranks, which takes no hashes."""
    return _are_unique(columns.specs) and not find_untiled(columns.table, [spec.shape for spec in columns.specs])


def _fill_exactly(columns: ShardColumns, comm: Comm) -> bool:
    """Collective: return whether the boxes of all ranks fill their tensors exactly."""
    specs, weights, sums = columns.specs, columns.weights, columns.sums
    # a hash in elements of the field: equal on ranks that have the same specs in the same order
    digest = hashlib.sha256(repr(weights.tolist()).encode()).digest()
    mine = [int.from_bytes(digest[4 * lane : 4 * lane + 4], "little") % PRIME for lane in range(LANES)]
    # one message answers both questions: whether the keys are the same on all ranks, and the sum of the fingerprints
    total = comm.total(*sums, *mine, *(element * element % PRIME for element in mine))
    sums, digests, squares = total[:LANES], total[LANES : 2 * LANES], total[2 * LANES :]
    # the digests are equal if their variance is 0; that of others is 0 once in 2^62
    if are_equal_in_field([comm.world_size * square for square in squares], [one * one for one in digests]):
        return _are_unique(specs) and are_equal_in_field(sums, fingerprint_specs(specs, weights))
    # a tensor counts once, whichever ranks have it: of ranks with the same ones the first sends them to their owners
    is_sender = _is_first(digest, comm)
    with comm.local_phase("sending tensors to their owners"):
        rows = _hash_specs(specs, weights, comm.world_size) if is_sender else {}
    found = comm.all_to_all(rows)
    with comm.local_phase("comparing tensors"):
        owned: dict[bytes, list[int]] = {}
        packed = (row for part in found.values() for row in _ROW.iter_unpack(part))
        is_one = all(owned.setdefault(name, hashed) == hashed for name, *hashed in packed)
        filled = [sum(hashed[LANES + lane] for hashed in owned.values()) for lane in range(LANES)]
    *filled, conflicts = comm.total(*filled, not is_one)
    return not conflicts and are_equal_in_field(sums, filled)


def _is_first(digest: bytes, comm: Comm) -> bool:
    """Collective: return whether this rank is the first of all ranks with the same digest."""
    seen = comm.all_to_all({int.from_bytes(digest[:8], "little") % comm.world_size: digest})
    firsts = {theirs: rank for rank, theirs in reversed(seen.items())}
    return bool(comm.all_to_all(dict.fromkeys(firsts.values(), b"first")))


def _hash_specs(specs: list[TensorSpec], weights: torch.Tensor, world_size: int) -> dict[int, bytes]:
    """Return a row for each tensor, by the rank that owns its key."""
    parts: dict[int, list[bytes]] = defaultdict(list)
    added = fingerprint_each(specs, weights)
    for spec, row in zip(specs, torch.cat([weights, added], 1).tolist(), strict=True):
        name = hashlib.sha256(f"{spec.kind}\0{spec.key}".encode("utf-8", "surrogatepass")).digest()[:8]
        parts[int.from_bytes(name, "little") % world_size].append(_ROW.pack(name, *row))
    return {owner: b"".join(rows) for owner, rows in parts.items()}


def _are_unique(specs: list[TensorSpec]) -> bool:
    return len({(spec.kind, spec.key) for spec in specs}) == len(specs)


def describe_shards(shards: Sequence[ShardedBase], *, copies: bool = False) -> ShardColumns:
    """Describe shards in columns; tensors come before objects.

    With ``copies`` the boxes of replicas other than the main ones are included. Their specs always are. Anything other
    than a tensor or an object is a ShardingError.
    """
    plain = [shard for shard in shards if type(shard) is ShardedTensor and shard.flattened_range is None]
    numbers: dict[tuple[str, str, Any, Ints], int] = {}
    spec = make_column(_number_tensors(plain, numbers))
    tables = [list_boxes(plain, spec)]
    if not copies:
        mains = [shard.replica_id == 0 or is_main_replica(shard.replica_id) for shard in plain]
        if not all(mains):
            tables = [tables[0].rows(torch.tensor(mains, dtype=torch.bool, device="cpu"))]
    if len(plain) < len(shards):
        tables.append(_describe_others(shards, numbers, copies=copies))
    names = {dtype: str(dtype) for _, _, dtype, _ in numbers}
    specs = [TensorSpec(kind, key, names[dtype], shape) for kind, key, dtype, shape in numbers]
    return ShardColumns(specs, concat_tables(tables) if len(tables) > 1 else tables[0])


def _number_tensors(shards: Sequence[ShardedTensor], numbers: dict[tuple[str, str, Any, Ints], int]) -> list[int]:
    """Return the number of each shard's tensor, and add the numbers of new ones to ``numbers``."""
    keys, dtypes, shapes = list_fields(shards, "key", "dtype", "global_shape")
    # the properties that all shards of a tensor must agree on
    commons = zip(repeat("tensor"), keys, dtypes, map(tuple, shapes))
    return [numbers.setdefault(common, len(numbers)) for common in commons]


def _describe_others(
    shards: Iterable[ShardedBase], numbers: dict[tuple[str, str, Any, Ints], int], *, copies: bool
) -> Table:
    """Return the boxes of objects and of flattened shards, and add the numbers of new ones to ``numbers``."""
    boxes = Boxes()
    for shard in shards:
        if type(shard) is ShardedTensor and shard.flattened_range is None:
            continue
        number = numbers.setdefault(_find_common(shard), len(numbers))
        if copies or is_main_replica(shard.replica_id):
            for box in _find_boxes(shard):
                boxes.add(number, *box)
    return boxes.table()


def _find_common(shard: ShardedBase) -> tuple[str, str, Any, Ints]:
    """Return the common fields of all shards of a tensor or object: kind, key, dtype and global shape."""
    if isinstance(shard, ShardedTensor):
        return "tensor", shard.key, shard.dtype, tuple(shard.global_shape)
    if isinstance(shard, ShardedObject):
        return "object", shard.key, None, tuple(shard.global_shape)
    raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")


def _find_boxes(shard: ShardedBase) -> Iterable[Box]:
    if isinstance(shard, ShardedTensor):
        return (unflattened_box(shard),) if shard.flattened_range is None else [part.box for part in shard_parts(shard)]
    if isinstance(shard, ShardedObject):
        return (Box(tuple(shard.global_offset), (1,) * len(shard.global_shape)),)
    return ()


def group_by_name(columns_by_rank: Iterable[Columns]) -> dict[Name, list[RankBox]]:
    """Return the boxes of all ranks by the tensors and objects that they belong to, in rank order."""
    found: dict[Name, list[RankBox]] = defaultdict(list)
    for rank, (specs, table) in enumerate(columns_by_rank):
        corners = zip(table.spec.tolist(), table.offset.tolist(), table.extent.tolist(), strict=True)
        for number, offset, extent in corners:
            kind, key, _, shape = specs[number]
            axes = len(shape)
            found[kind, key].append(RankBox(rank, shape, Box(tuple(offset[:axes]), tuple(extent[:axes]))))
    return dict(found)


def _find_faults(columns_by_rank: Sequence[Columns], places: Sequence[dict[str, list[str]]] = ()) -> list[str]:
    """Return the faults of the shards of all ranks, sorted by key; ``places`` are each rank's repeated keys'."""
    specs: dict[Name, list[tuple[int, TensorSpec]]] = defaultdict(list)
    for rank, (described, _) in enumerate(columns_by_rank):
        for spec in described:
            specs[spec.kind, spec.key].append((rank, spec))
    boxes = group_by_name(columns_by_rank)
    return [
        f"{kind} {key!r}: {fault}"
        for kind, key in sorted(specs, key=lambda name: name[::-1])
        for fault in _faults_of_key(
            specs[kind, key], boxes.get((kind, key), []), [of_rank.get(key, []) for of_rank in places]
        )
    ]


def _faults_of_key(
    specs: list[tuple[int, TensorSpec]], parts: list[RankBox], places: Sequence[list[str]]
) -> Iterable[str]:
    first_rank, first = specs[0]
    # one fault per key is enough, and the first explains the others
    for what, field in (("global_shape", "shape"), ("dtype", "dtype")):
        for rank, spec in specs:
            if getattr(spec, field) != getattr(first, field):
                yield (
                    f"ranks disagree on its {what}: {getattr(first, field)} on rank {first_rank}, "
                    f"{getattr(spec, field)} on rank {rank}"
                )
                return
    boxes = [part.box for part in parts]
    overlap = find_overlap(boxes)
    if overlap is not None:
        first_rank, second_rank = parts[overlap.first].rank, parts[overlap.second].rank
        who, advice = f"by rank {first_rank} and rank {second_rank}", "give copies a replica_id other than 0"
        if first_rank == second_rank:
            found = places[first_rank] if places else []
            where = f", which names this key at {' and at '.join(found[:_SHOWN_PLACES])}" if found else ""
            who, advice = f"both times by rank {first_rank}{where}", f"give each a key of its own, or {advice}"
        yield f"{format_box(overlap.common)} is described as the main replica twice, {who}: {advice}"
        return
    hole = find_hole(first.shape, boxes)
    if hole is not None:
        part = "no object" if first.kind == "object" else "no shard"
        hint = "" if boxes else " (no rank holds a main replica: replica_id 0)"
        yield f"{part} describes {format_box(hole)} of the global shape {first.shape}{hint}"


def _refuse(faults: Sequence[str]) -> None:
    """Raise one error with the first faults, if there are any."""
    if faults:
        # Megatron's term, for which its callers look
        raise ShardingError("Invalid access pattern, shards do not fit together:\n  " + listed(faults, "\n  "))


def format_box(box: Box) -> str:
    """Return a box as errors show it: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(box.offset, box.end, strict=True)) + "]"
