"""Whether the ranks hold every expert, each once; and if not, which experts are wrong."""

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
    """A box that a rank says it has of all experts.

    Attributes:
        key: Of the tensor, or of the objects.
        shape: With all experts.
        dtype: Of a tensor, as text.
        expert_dim: The axis that counts experts.
        main: Whether the rank is the one to write it.
        box: The box.
    """

    key: str
    shape: Ints
    dtype: str
    expert_dim: int
    main: bool
    box: Box


def check_experts(shards: Sequence[ShardedBase], expert_dims: Mapping[str, int], comm: Comm) -> None:
    """Check that the ranks describe every expert exactly once; the same verdict on all of them.

    Args:
        shards: This rank's shards of expert tensors, and its objects of single experts.
        expert_dims: The axis that counts experts, by tensor key.
        comm: The ranks that save or load together.

    Raises:
        ShardingError: names, for every tensor, the experts that no rank has, or several.
    """
    try:
        validate_shards(shards, comm)
    except ShardingError as generic:
        everyone = comm.gather([_claim(shard, expert_dims) for shard in shards])
        with comm.collective_phase("checking the experts of all ranks"):
            if comm.is_main:
                refuse_faults(everyone)
        raise generic from None


def refuse_faults(claims_by_rank: Sequence[Sequence[Claim]]) -> None:
    """Raise one error with what is wrong with the experts of all ranks, if anything is."""
    ranked = [(rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims]
    by_key = map_reduce(ranked, lambda item: item[1].key, lambda item: item, list)
    faults = [fault for key in sorted(by_key) for fault in _faults(key, by_key[key])]
    if faults:
        raise ShardingError("experts do not fit together:\n  " + listed(faults, "\n  "))


def _claim(shard: ShardedBase, expert_dims: Mapping[str, int]) -> Claim:
    main = is_main_replica(shard.replica_id)
    if isinstance(shard, ShardedTensor):
        box = Box(tuple(shard.global_offset), tuple(shard.local_shape))
        return Claim(shard.key, tuple(shard.global_shape), str(shard.dtype), expert_dims[shard.key], main, box)
    if isinstance(shard, ShardedObject):
        box = Box(tuple(shard.global_offset), (1,) * len(shard.global_shape))
        return Claim(shard.key, tuple(shard.global_shape), "", 0, main, box)
    raise ShardingError(f"{shard.key!r}: a {type(shard).__name__} is no expert's")


def _faults(key: str, claims: list[tuple[int, Claim]]) -> Iterator[str]:
    rank, first = claims[0]
    for other, claim in claims:
        if claim[1:4] != first[1:4]:
            yield (
                f"{key!r}: ranks disagree on the tensor of all experts: shape {first.shape}, {first.dtype}, experts "
                f"along axis {first.expert_dim} on rank {rank}; {claim.shape}, {claim.dtype}, {claim.expert_dim} on "
                f"rank {other}. Where experts are dealt out unevenly, give experts_per_rank or global_shape"
            )
            return
    mains = [(rank, claim.box) for rank, claim in claims if claim.main]
    boxes = [box for _, box in mains]
    overlap = find_overlap(boxes)
    if overlap is not None:
        yield _twice(key, first, mains, overlap)
    if overlap is not None or find_hole(first.shape, boxes) is not None:
        yield from _missing(key, first, mains)


def _twice(key: str, whole: Claim, mains: list[tuple[int, Box]], overlap: Overlap) -> str:
    ranks = (mains[overlap.first][0], mains[overlap.second][0])
    axis = whole.expert_dim
    twice = [expert for expert in range(whole.shape[axis]) if find_overlap(_parts(_slab(whole, expert), mains))]
    return (
        f"{_experts(twice)} of {key!r} are described by several ranks (rank {ranks[0]} and rank {ranks[1]}, which "
        "are not copies of each other): their expert-parallel ranks are not those of the mesh given for them, or a "
        "mesh dimension that holds copies is missing from it"
    )


def _missing(key: str, whole: Claim, mains: list[tuple[int, Box]]) -> Iterator[str]:
    none, part = [], []
    for expert in range(whole.shape[whole.expert_dim]):
        slab = _slab(whole, expert)
        found = _parts(slab, mains)
        if not found and slab.volume:
            none.append(expert)
        elif _has_hole(slab, found):
            part.append(expert)
    if none:
        yield f"{_experts(none)} of {key!r} are described by no rank"
    if part:
        yield f"{_experts(part)} of {key!r} are described in part: some of their elements by no rank"


def _parts(slab: Box, mains: list[tuple[int, Box]]) -> list[Box]:
    """What the boxes have of a slab."""
    return [common for _, box in mains if (common := intersect(box, slab))]


def _has_hole(slab: Box, found: Sequence[Box]) -> bool:
    if find_overlap(found) is not None:
        return False  # said already
    back = tuple(-offset for offset in slab.offset)
    return find_hole(slab.shape, [box.moved(back) for box in found]) is not None


def _slab(whole: Claim, expert: int) -> Box:
    """All of one expert."""
    axis = whole.expert_dim
    offset = tuple(expert if dim == axis else 0 for dim in range(len(whole.shape)))
    return Box(offset, tuple(1 if dim == axis else size for dim, size in enumerate(whole.shape)))


def _experts(numbers: Iterable[int]) -> str:
    """``experts 3, 7``, or with runs of more than two, ``experts 0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    short = 2
    texts = (f"{run[0]}-{run[-1]}" if len(run) > short else ", ".join(map(str, run)) for run in runs)
    return "experts " + ", ".join(texts)


__all__ = ["Claim", "check_experts", "refuse_faults"]
