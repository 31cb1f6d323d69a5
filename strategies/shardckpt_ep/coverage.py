"""Check that the ranks hold every expert exactly once, and name the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import ShardingError, listed
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import Box, Ints, find_hole, find_overlap, intersect
from shardckpt.state_dict import map_reduce
from shardckpt.validation import validate_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardckpt.distributed import Comm


class Claim(NamedTuple):
    """A box of the tensor of all experts that a rank says it holds.

    Attributes:
        key: Key of the tensor, or of the objects.
        shape: Shape with all experts.
        dtype: Dtype of a tensor, as text; empty for objects.
        expert_dim: The axis that counts experts.
        main: Whether the rank holds the main replica, which is written.
    """

    key: str
    shape: Ints
    dtype: str
    expert_dim: int
    main: bool
    box: Box


def check_experts(shards: Sequence[ShardedTensor | ShardedObject], expert_dims: Mapping[str, int], comm: Comm) -> None:
    """Collective: check that the ranks describe every expert exactly once; all raise the same error if not.

    ``shards`` are this rank's expert tensors and objects of single experts; ``expert_dims`` has the axis that counts
    experts, by tensor key. The ShardingError names for every tensor the experts that no rank has, or several.
    """
    # The general validation is cheap: it compares sums. Claims are gathered only to name experts once it has failed.
    try:
        validate_shards(shards, comm)
    except ShardingError as generic:
        everyone = comm.gather([make_claim(shard, expert_dims.get(shard.key, 0)) for shard in shards])
        with comm.collective_phase("checking the experts of all ranks"):
            if comm.is_main:
                check_claims(everyone)
        raise generic from None


def check_claims(claims_by_rank: Sequence[Sequence[Claim]]) -> None:
    """Raise :class:`ShardingError`, which names the experts, if the claims of all ranks are not each expert once."""
    ranked = [(rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims]
    by_key = map_reduce(ranked, lambda item: item[1].key, lambda item: item, list)
    faults = [fault for key in sorted(by_key) for fault in _faults(key, by_key[key])]
    if faults:
        raise ShardingError("invalid sharding of experts:\n  " + listed(faults, "\n  "))


def make_claim(shard: ShardedTensor | ShardedObject, expert_dim: int) -> Claim:
    """Return the claim of a shard of an expert tensor, or of an object of one expert."""
    shape = tuple(shard.global_shape)
    extent, dtype = (
        (shard.local_shape, str(shard.dtype)) if isinstance(shard, ShardedTensor) else ((1,) * len(shape), "")
    )
    box = Box(tuple(shard.global_offset), tuple(extent))
    return Claim(shard.key, shape, dtype, expert_dim, is_main_replica(shard.replica_id), box)


def _faults(key: str, claims: list[tuple[int, Claim]]) -> Iterator[str]:
    """Yield the faults of the claims of one key, each with its rank."""
    rank, first = claims[0]
    for other, claim in claims:
        if claim[1:4] != first[1:4]:
            yield (
                f"{key!r}: ranks disagree on the tensor of all experts: shape {first.shape}, {first.dtype}, experts "
                f"along axis {first.expert_dim} on rank {rank}; {claim.shape}, {claim.dtype}, {claim.expert_dim} on "
                f"rank {other}. Where ranks have different numbers of experts, pass experts_per_rank or global_shape"
            )
            return
    mains = [(rank, claim.box) for rank, claim in claims if claim.main]  # copies may overlap them
    boxes = [box for _, box in mains]
    overlap = find_overlap(boxes)
    if overlap is None and find_hole(first.shape, boxes) is None:
        return
    repeated, missing, incomplete = _sort_experts(first, boxes)
    if overlap is not None:
        ranks = f"rank {mains[overlap.first][0]} and rank {mains[overlap.second][0]}"
        yield (
            f"{_format_experts(repeated)} of {key!r} are described by several ranks ({ranks}, which are not copies of "
            "each other): the mesh that was passed has other expert-parallel ranks, or lacks a dimension that holds "
            "copies"
        )
    if missing:
        yield f"{_format_experts(missing)} of {key!r} are described by no rank"
    if incomplete:
        yield f"{_format_experts(incomplete)} of {key!r} are described in part: some of their elements by no rank"


def _sort_experts(claim: Claim, boxes: Sequence[Box]) -> tuple[list[int], list[int], list[int]]:
    """Return the experts in which boxes overlap, the experts that no box touches, and the partly filled experts."""
    axis = claim.expert_dim
    repeated: list[int] = []
    missing: list[int] = []
    incomplete: list[int] = []
    for expert in range(claim.shape[axis]):
        offset = tuple(expert if dim == axis else 0 for dim in range(len(claim.shape)))
        own = Box(offset, tuple(1 if dim == axis else size for dim, size in enumerate(claim.shape)))
        found = [common for box in boxes if (common := intersect(box, own))]
        # find_hole compares volumes, which an overlap falsifies: it is asked only where none is
        if find_overlap(found) is not None:
            repeated.append(expert)
        elif not found and own.volume:
            missing.append(expert)
        elif find_hole(own.shape, [box.moved([-start for start in offset]) for box in found]) is not None:
            incomplete.append(expert)
    return repeated, missing, incomplete


def _format_experts(numbers: Iterable[int]) -> str:
    """Return ``experts 3, 7``, or with runs of more than two, ``experts 0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    short = 2
    texts = (f"{run[0]}-{run[-1]}" if len(run) > short else ", ".join(map(str, run)) for run in runs)
    return "experts " + ", ".join(texts)
