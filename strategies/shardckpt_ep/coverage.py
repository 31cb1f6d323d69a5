"""Check that the ranks hold every expert exactly once, and name the experts of which that is not true."""

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
    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import Overlap


class Claim(NamedTuple):
    """A box of the tensor of all experts that a rank says it holds.

    Attributes:
        key: Key of the tensor, or of the objects.
        shape: Shape with all experts.
        dtype: Dtype of a tensor, as text; empty for objects.
        expert_dim: The axis that counts experts.
        main: Whether the rank holds the main replica, which is written.
        box: The box.
    """

    key: str
    shape: Ints
    dtype: str
    expert_dim: int
    main: bool
    box: Box


def check_experts(shards: Sequence[ShardedBase], expert_dims: Mapping[str, int], comm: Comm) -> None:
    """Collective: check that the ranks describe every expert exactly once; all raise the same error if not.

    Args:
        shards: This rank's shards of expert tensors, and its objects of single experts.
        expert_dims: The axis that counts experts, by tensor key.
        comm: The ranks that save or load together.

    Raises:
        ShardingError: for every tensor, it names the experts that no rank has, or several.
    """
    # The general validation is cheap: it compares sums. Claims are gathered only to name experts once it has failed.
    try:
        validate_shards(shards, comm)
    except ShardingError as generic:
        everyone = comm.gather([_claim(shard, expert_dims) for shard in shards])
        with comm.collective_phase("checking the experts of all ranks"):
            if comm.is_main:
                check_claims(everyone)
        raise generic from None


def check_claims(claims_by_rank: Sequence[Sequence[Claim]]) -> None:
    """Check the experts of all ranks.

    Args:
        claims_by_rank: The claims of every rank, in rank order.

    Raises:
        ShardingError: ranks disagree on a tensor, or experts are missing or claimed by several ranks; it names them.
    """
    ranked = [(rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims]
    by_key = map_reduce(ranked, lambda item: item[1].key, lambda item: item, list)
    faults = [fault for key in sorted(by_key) for fault in _faults(key, by_key[key])]
    if faults:
        raise ShardingError("invalid sharding of experts:\n  " + listed(faults, "\n  "))


def _claim(shard: ShardedBase, expert_dims: Mapping[str, int]) -> Claim:
    """Return the claim of a shard."""
    main = is_main_replica(shard.replica_id)
    if isinstance(shard, ShardedTensor):
        box = Box(tuple(shard.global_offset), tuple(shard.local_shape))
        return Claim(shard.key, tuple(shard.global_shape), str(shard.dtype), expert_dims[shard.key], main, box)
    if isinstance(shard, ShardedObject):
        box = Box(tuple(shard.global_offset), (1,) * len(shard.global_shape))
        return Claim(shard.key, tuple(shard.global_shape), "", 0, main, box)
    raise ShardingError(
        f"{shard.key!r}: a {type(shard).__name__} cannot hold an expert: describe it as a ShardedTensor or by "
        "expert_object"
    )


def _faults(key: str, claims: list[tuple[int, Claim]]) -> Iterator[str]:
    """Yield what is wrong with the claims of one key, each with its rank."""
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
    if overlap is not None:
        yield _describe_overlap(key, first, mains, overlap)
    # find_hole compares volumes, which an overlap falsifies: then look for holes expert by expert
    if overlap is not None or find_hole(first.shape, boxes) is not None:
        yield from _describe_missing(key, first, mains)


def _describe_overlap(key: str, claim: Claim, mains: list[tuple[int, Box]], overlap: Overlap) -> str:
    ranks = (mains[overlap.first][0], mains[overlap.second][0])
    count = claim.shape[claim.expert_dim]
    twice = [expert for expert in range(count) if find_overlap(_clip(mains, _expert_box(claim, expert)))]
    return (
        f"{_format_experts(twice)} of {key!r} are described by several ranks (rank {ranks[0]} and rank {ranks[1]}, "
        "which are not copies of each other): the mesh that was passed has other expert-parallel ranks, or lacks a "
        "dimension that holds copies"
    )


def _describe_missing(key: str, claim: Claim, mains: list[tuple[int, Box]]) -> Iterator[str]:
    missing, incomplete = [], []
    for expert in range(claim.shape[claim.expert_dim]):
        wanted = _expert_box(claim, expert)
        found = _clip(mains, wanted)
        if not found and wanted.volume:
            missing.append(expert)
        elif _has_hole(wanted, found):
            incomplete.append(expert)
    if missing:
        yield f"{_format_experts(missing)} of {key!r} are described by no rank"
    if incomplete:
        yield f"{_format_experts(incomplete)} of {key!r} are described in part: some of their elements by no rank"


def _clip(mains: list[tuple[int, Box]], to: Box) -> list[Box]:
    """Return the parts of the boxes that lie in another box."""
    return [common for _, box in mains if (common := intersect(box, to))]


def _has_hole(wanted: Box, found: Sequence[Box]) -> bool:
    """Return whether boxes inside another leave a part of it uncovered."""
    if find_overlap(found) is not None:
        return False  # reported as an overlap
    back = tuple(-offset for offset in wanted.offset)
    return find_hole(wanted.shape, [box.moved(back) for box in found]) is not None


def _expert_box(claim: Claim, expert: int) -> Box:
    """Return the box of one expert in the tensor of all."""
    axis = claim.expert_dim
    offset = tuple(expert if dim == axis else 0 for dim in range(len(claim.shape)))
    return Box(offset, tuple(1 if dim == axis else size for dim, size in enumerate(claim.shape)))


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


__all__ = ["Claim", "check_claims", "check_experts"]
