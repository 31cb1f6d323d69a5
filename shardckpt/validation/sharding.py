"""Check that the shards of all ranks describe every global tensor exactly once, and agree on its shape and dtype.

Every rank contributes a fingerprint of its boxes, of the same few bytes for any number of shards (see
:func:`shardckpt.planning.table.fingerprint`). If ranks have different keys, one of each set of ranks with the same keys
sends them. Only if the fingerprints are wrong the main rank gathers all boxes, to name the fault.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import ShardingError, listed
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import (
    LANES,
    PRIME,
    Box,
    Boxes,
    Ints,
    Table,
    TensorSpec,
    are_equal_in_field,
    compute_weights,
    find_hole,
    find_overlap,
    fingerprint,
    fingerprint_specs,
    shard_parts,
    unflattened_box,
)
from shardckpt.state_dict import map_reduce

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from shardckpt.distributed import Comm


class Described(NamedTuple):
    """A rank's shards in columns.

    Attributes:
        specs: The tensors and objects that they are shards of.
        table: Their boxes, which refer to the specs by number.
        weights: int64 of shape (specs, LANES), by :func:`shardckpt.planning.table.compute_weights`.
        sums: The fingerprint of the boxes.
    """

    specs: list[TensorSpec]
    table: Table
    weights: torch.Tensor
    sums: list[int]


def validate_shards(shards: Sequence[ShardedBase], comm: Comm, described: Described | None = None) -> None:
    """Collective: check that the shards of all ranks describe every global tensor and object exactly once.

    Shards may be of any size. Each must have passed its own ``validate_metadata_integrity`` before.

    Args:
        shards: This rank's shards.
        comm: The ranks that save or load together.
        described: What :func:`describe_shards` returns for them, if that is known already.

    Raises:
        ShardingError: the same on every rank: shards disagree on dtype or global shape, overlap, or leave a hole.
    """
    with comm.local_phase("describing shards"):
        specs, _, weights, sums = described or describe_shards(shards)
    if not _fill_exactly(specs, weights, sums, comm):
        everyone = comm.gather([_make_claim(shard) for shard in shards])
        with comm.collective_phase("checking the shards of all ranks"):
            if comm.is_main:
                _refuse(_find_faults(everyone))


def validate_shards_by_rank(shards_by_rank: Sequence[Sequence[ShardedBase]]) -> None:
    """Check the shards of all ranks as :func:`validate_shards` does, where one process has them all.

    Args:
        shards_by_rank: The shards of every rank, in rank order.

    Raises:
        ShardingError: shards disagree on dtype or global shape, overlap, or leave a hole.
    """
    _refuse(_find_faults([[_make_claim(shard) for shard in shards] for shards in shards_by_rank]))


def _fill_exactly(specs: list[TensorSpec], weights: torch.Tensor, sums: list[int], comm: Comm) -> bool:
    """Collective: return whether the boxes of all ranks fill their tensors exactly."""
    mine = _digest(weights)
    squares = [element * element % PRIME for element in mine]
    # one message answers both questions: are the keys the same on all ranks, and what do the fingerprints add up to?
    total = comm.total(*sums, *mine, *squares)
    if _all_equal(total[LANES : 2 * LANES], total[2 * LANES :], comm.world_size):
        return _are_unique(specs) and are_equal_in_field(total[:LANES], fingerprint_specs(specs, weights))
    all_specs = _gather_specs(specs, mine, comm)
    return bool(
        comm.largest(
            comm.is_main
            and _are_unique(all_specs)
            and are_equal_in_field(total[:LANES], fingerprint_specs(all_specs, compute_weights(all_specs)))
        )[0]
    )


def _digest(weights: torch.Tensor) -> list[int]:
    """Return a hash, in elements of the field: equal on ranks that have the same specs in the same order."""
    digest = hashlib.sha256(repr(weights.tolist()).encode()).digest()
    return [int.from_bytes(digest[4 * lane : 4 * lane + 4], "little") % PRIME for lane in range(LANES)]


def _all_equal(sums: list[int], sums_of_squares: list[int], count: int) -> bool:
    """Return whether ``count`` digests are equal: their variance is 0. That of others is 0 once in 2^62."""
    return are_equal_in_field([count * square for square in sums_of_squares], [sum_ * sum_ for sum_ in sums])


def _are_unique(specs: list[TensorSpec]) -> bool:
    """Return whether no tensor has two descriptions."""
    return len({(spec.kind, spec.key) for spec in specs}) == len(specs)


def _gather_specs(specs: list[TensorSpec], mine: list[int], comm: Comm) -> list[TensorSpec]:
    """Collective: return, on the main rank, the specs of all ranks; of ranks with the same specs one sends them."""
    everyone = comm.gather(tuple(mine))
    senders = comm.broadcast({digest: rank for rank, digest in reversed(list(enumerate(everyone)))})
    gathered = comm.gather_some(specs, given=senders[tuple(mine)] == comm.rank)
    return list(dict.fromkeys(spec for part in gathered for spec in part))


def describe_shards(shards: Iterable[ShardedBase], *, copies: bool = False) -> Described:
    """Describe shards in columns.

    Args:
        shards: This rank's, with factories built.
        copies: Whether to include the boxes of replicas other than the main ones. Their specs are always included.

    Returns:
        The columns, with the fingerprint of the included boxes.

    Raises:
        ShardingError: one is neither a tensor nor an object.
    """
    numbers: dict[Any, int] = {}
    specs: list[TensorSpec] = []
    boxes = Boxes()
    for shard in shards:
        identity = _identify(shard)
        number = numbers.get(identity)
        if number is None:
            number = numbers[identity] = len(numbers)
            kind, key, dtype, shape = identity
            specs.append(TensorSpec(kind, key, str(dtype), tuple(shape)))
        if copies or is_main_replica(shard.replica_id):
            for box in _find_boxes(shard):
                boxes.add(number, *box)
    table, weights = boxes.table(), compute_weights(specs)
    return Described(specs, table, weights, fingerprint(table, weights))


def _identify(shard: ShardedBase) -> tuple[str, str, Any, Ints]:
    """Return what all shards of the same tensor or object must agree on: kind, key, dtype and global shape."""
    if isinstance(shard, ShardedTensor):
        return "tensor", shard.key, shard.dtype, tuple(shard.global_shape)
    if isinstance(shard, ShardedObject):
        return "object", shard.key, None, tuple(shard.global_shape)
    raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")


def _find_boxes(shard: ShardedBase) -> Iterable[Box]:
    """Return the boxes that a shard fills."""
    if isinstance(shard, ShardedTensor):
        return (unflattened_box(shard),) if shard.flattened_range is None else [part.box for part in shard_parts(shard)]
    if isinstance(shard, ShardedObject):
        return (Box(tuple(shard.global_offset), (1,) * len(shard.global_shape)),)
    return ()


@dataclass(frozen=True)
class _Claim:
    """A shard as the main rank gets it to name a fault: what it says of its tensor, and the boxes that it fills."""

    key: str
    kind: str
    dtype: Any
    global_shape: Ints
    main: bool
    boxes: tuple[Box, ...]


def _make_claim(shard: ShardedBase) -> _Claim:
    kind, key, dtype, shape = _identify(shard)
    return _Claim(key, kind, dtype, shape, is_main_replica(shard.replica_id), tuple(_find_boxes(shard)))


def _find_faults(claims_by_rank: Sequence[Sequence[_Claim]]) -> list[str]:
    """Return what is wrong with the shards of all ranks, sorted by key."""
    ranked = ((rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims)
    by_key = map_reduce(ranked, lambda item: (item[1].key, item[1].kind), lambda item: item, list)
    faults: list[str] = []
    for key, kind in sorted(by_key):
        faults.extend(f"{kind} {key!r}: {fault}" for fault in _faults_of_key(by_key[key, kind], kind))
    return faults


def _faults_of_key(claims: list[tuple[int, _Claim]], kind: str) -> Iterable[str]:
    first_rank, first = claims[0]
    for what in ("global_shape", "dtype"):
        for rank, claim in claims:
            if getattr(claim, what) != getattr(first, what):
                yield (
                    f"ranks disagree on its {what}: {getattr(first, what)} on rank {first_rank}, "
                    f"{getattr(claim, what)} on rank {rank}"
                )
                return
    mains = [(rank, box) for rank, claim in claims if claim.main for box in claim.boxes]
    boxes = [box for _, box in mains]
    overlap = find_overlap(boxes)
    if overlap is not None:
        yield (
            f"{format_box(overlap.common)} is described as the main replica twice, by rank {mains[overlap.first][0]} "
            f"and rank {mains[overlap.second][0]}: give copies a replica_id other than 0"
        )
        return
    hole = find_hole(first.global_shape, boxes)
    if hole is not None:
        part = "no object" if kind == "object" else "no shard"
        hint = "" if boxes else " (no rank holds a main replica: replica_id 0)"
        yield f"{part} describes {format_box(hole)} of the global shape {first.global_shape}{hint}"


def _refuse(faults: Sequence[str]) -> None:
    """Raise one error with the first faults, if there are any."""
    if faults:
        raise ShardingError("shards do not fit together:\n  " + listed(faults, "\n  "))


def format_box(box: Box) -> str:
    """Return a box as errors show it: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(box.offset, box.end, strict=True)) + "]"


__all__ = ["Described", "describe_shards", "format_box", "validate_shards", "validate_shards_by_rank"]
