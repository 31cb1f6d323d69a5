"""Whether the shards of all ranks fit together: they agree on what is global, and fill it exactly, each once.

Every rank announces sums over its boxes, which are as many bytes for any number of shards (see
:func:`shardckpt.planning.table.fingerprint`); of ranks with the same keys one announces them. Only if something is
wrong are the boxes of all ranks compared, to name it.
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
        wholes: What they are parts of.
        table: Their boxes.
        weights: Of the wholes, by :func:`shardckpt.planning.table.compute_weights`.
        sums: The fingerprint of the boxes.
    """

    specs: list[TensorSpec]
    table: Table
    weights: torch.Tensor
    sums: list[int]


def validate_shards(shards: Sequence[ShardedBase], comm: Comm, described: Described | None = None) -> None:
    """Collective: check that the shards of all ranks describe every global tensor and object exactly once.

    Each shard by itself was checked before. Grids may be regular or not. Every rank raises the same error, with all
    faults found.

    Args:
        shards: This rank's shards.
        comm: The ranks that save or load together.
        described: What :func:`describe_shards` gives for them, where that is known already.

    Raises:
        ShardingError: shards that disagree on dtype or global shape, overlap, or leave a hole.
    """
    with comm.local_phase("describing shards"):
        specs, _, weights, sums = described or describe_shards(shards)
    if not _fit(specs, weights, sums, comm):
        everyone = comm.gather([_claim(shard) for shard in shards])
        with comm.collective_phase("checking the shards of all ranks"):
            if comm.is_main:
                _refuse(_find_faults(everyone))


def validate_shards_by_rank(shards_by_rank: Sequence[Sequence[ShardedBase]]) -> None:
    """Check here and now what :func:`validate_shards` checks together, and raise as it does."""
    _refuse(_find_faults([[_claim(shard) for shard in shards] for shards in shards_by_rank]))


def _fit(specs: list[TensorSpec], weights: torch.Tensor, sums: list[int], comm: Comm) -> bool:
    """Collective: return whether the boxes of all ranks add up to what they are parts of."""
    mine = _digest(weights)
    squares = [element * element % PRIME for element in mine]
    total = comm.total(*sums, *mine, *squares)
    if _all_equal(total[LANES : 2 * LANES], total[2 * LANES :], comm.world_size):
        return _agree(specs) and are_equal_in_field(total[:LANES], fingerprint_specs(specs, weights))
    known = _everyones(specs, mine, comm)
    return bool(
        comm.largest(
            comm.is_main
            and _agree(known)
            and are_equal_in_field(total[:LANES], fingerprint_specs(known, compute_weights(known)))
        )[0]
    )


def _digest(weights: torch.Tensor) -> list[int]:
    """Elements of the field, the same where ranks have the same wholes in the same order, and hardly ever else."""
    digest = hashlib.sha256(repr(weights.tolist()).encode()).digest()
    return [int.from_bytes(digest[4 * lane : 4 * lane + 4], "little") % PRIME for lane in range(LANES)]


def _all_equal(sums: list[int], sums_of_squares: list[int], count: int) -> bool:
    """Whether ``count`` digests are equal, by sums: their variance is 0 (in the field: others' is, once in 2^62)."""
    return are_equal_in_field([count * square for square in sums_of_squares], [sum_ * sum_ for sum_ in sums])


def _agree(specs: list[TensorSpec]) -> bool:
    """Whether nothing is said twice, in different ways."""
    return len({(spec.kind, spec.key) for spec in specs}) == len(specs)


def _everyones(specs: list[TensorSpec], mine: list[int], comm: Comm) -> list[TensorSpec]:
    """Collective: return, on the main rank, the wholes of all ranks; of ranks with the same ones one announces them."""
    everyone = comm.gather(tuple(mine))
    speakers = comm.broadcast({digest: rank for rank, digest in reversed(list(enumerate(everyone)))})
    announced = comm.gather_some(specs, given=speakers[tuple(mine)] == comm.rank)
    return list(dict.fromkeys(spec for part in announced for spec in part))


def describe_shards(shards: Iterable[ShardedBase], *, copies: bool = False) -> Described:
    """What the shards are parts of, and the boxes of main replicas; of all, if ``copies`` count as well."""
    numbers: dict[Any, int] = {}
    specs: list[TensorSpec] = []
    boxes = Boxes()
    for shard in shards:
        about = _about(shard)
        number = numbers.get(about)
        if number is None:
            number = numbers[about] = len(numbers)
            kind, key, dtype, shape = about
            specs.append(TensorSpec(kind, key, str(dtype), tuple(shape)))
        if copies or is_main_replica(shard.replica_id):
            for box in _boxes(shard):
                boxes.add(number, *box)
    table, weights = boxes.table(), compute_weights(specs)
    return Described(specs, table, weights, fingerprint(table, weights))


def _about(shard: ShardedBase) -> tuple[str, str, Any, Ints]:
    """What its whole must agree in."""
    if isinstance(shard, ShardedTensor):
        return "tensor", shard.key, shard.dtype, tuple(shard.global_shape)
    if isinstance(shard, ShardedObject):
        return "object", shard.key, None, tuple(shard.global_shape)
    raise ShardingError(f"{shard.key!r}: cannot store a {type(shard).__name__}; build factories first")


def _boxes(shard: ShardedBase) -> Iterable[Box]:
    """The boxes that a shard fills."""
    if isinstance(shard, ShardedTensor):
        return (unflattened_box(shard),) if shard.flattened_range is None else [part.box for part in shard_parts(shard)]
    if isinstance(shard, ShardedObject):
        return (Box(tuple(shard.global_offset), (1,) * len(shard.global_shape)),)
    return ()


@dataclass(frozen=True)
class _Claim:
    """A shard as the check sees it: what it says of the whole, and the boxes that it fills."""

    key: str
    kind: str
    dtype: Any
    global_shape: Ints
    main: bool
    boxes: tuple[Box, ...]


def _claim(shard: ShardedBase) -> _Claim:
    kind, key, dtype, shape = _about(shard)
    return _Claim(key, kind, dtype, shape, is_main_replica(shard.replica_id), tuple(_boxes(shard)))


def _find_faults(claims_by_rank: Sequence[Sequence[_Claim]]) -> list[str]:
    """What is wrong with the shards of all ranks, sorted by key."""
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
    """A box as errors show it: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(box.offset, box.end, strict=True)) + "]"


__all__ = ["Described", "describe_shards", "format_box", "validate_shards", "validate_shards_by_rank"]
