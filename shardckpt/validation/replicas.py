"""Choose the main replica of shards that say ``replicated``, and check that their copies have the same values.

If all ranks have the same replicated shards, one sum of a few bytes says so; only otherwise ranks exchange lists.
Values are not sent: ranks exchange digests of the shards that several of them have.
"""

from __future__ import annotations

import copy
import hashlib
import math
import pickle
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from shardckpt.errors import ShardingError, listed
from shardckpt.mapping import Replicated, ShardedBase, ShardedObject, ShardedTensor
from shardckpt.planning import find_holders, shard_id
from shardckpt.state_dict import diff
from shardckpt.storage import digest_function, digest_vote, negotiate_digest
from shardckpt.tensors import dequantized, is_quantized, movable, plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.storage import Digest

#: A digest of a shard's id, of 16 bytes for any key.
_ShortId: TypeAlias = bytes
#: The digests of each shard's copies, with the ranks that have each.
_Seen: TypeAlias = "Mapping[_ShortId, Mapping[int, Collection[int]]]"

#: Bytes that are copied from an accelerator at a time.
_CHUNK = 16 << 20
#: Elements of a ``"sampled"`` tensor that are compared: few bytes, and enough to say whether most of them differ.
_SAMPLE = 32
#: Where a rank has no element: smaller than the bits of any, so that a maximum over ranks ignores it.
_NOTHING = -(1 << 63) + 1
#: Samples that are exchanged in one message.
_SAMPLES_AT_ONCE = 256


class Replicas(NamedTuple):
    """The replicated shards of a rank, and the ranks that have each; found without looking at values.

    Attributes:
        short_ids: The short id of each replicated shard, by the shard's number in the list that was given.
        holders: The ranks that have each of them, ascending; None if no rank has any replicated shard.
    """

    short_ids: dict[int, _ShortId]
    holders: dict[_ShortId, tuple[int, ...]] | None


def find_replicas(shards: Sequence[ShardedBase], comm: Comm) -> Replicas:
    """Collective: find out which ranks have which replicated shards.

    Args:
        shards: This rank's, with factories built.
        comm: The ranks that save or load together.

    Returns:
        This rank's replicated shards and their holders.
    """
    with comm.local_phase("listing replicated shards"):
        short_ids = {number: _short_id(shard) for number, shard in enumerate(shards) if _replicated(shard)}
        ordered = sorted(short_ids.values())
    return Replicas(short_ids, _exchange_holders(ordered, comm))


def choose_main_replicas(
    shards: Sequence[ShardedBase], comm: Comm, *, compare: bool, replicas: Replicas | None = None
) -> list[ShardedBase]:
    """Collective: make the copy of each replicated shard on the lowest rank that has it the main replica.

    Args:
        shards: This rank's, with factories built; they are not changed.
        comm: The ranks that save or load together.
        compare: Whether to check that copies have the same values; of ``"sampled"`` tensors, that at least half of a
            few elements are equal. ``"unchecked"`` ones are not compared.
        replicas: What :func:`find_replicas` returned for these shards; must be given on all ranks or none.

    Returns:
        The shards in the same order; replicated ones are copies with replica id 0 on that rank, and 1 on all others.

    Raises:
        ShardingError: on every rank; it names the shards whose copies differ, and the ranks that have them.
    """
    short_ids, holders = replicas or find_replicas(shards, comm)
    if holders is None:
        return list(shards)
    if compare:
        mine = ((shards[number], short_id) for number, short_id in short_ids.items() if len(holders[short_id]) > 1)
        _compare(sorted((pair for pair in mine if _is_compared(pair[0])), key=lambda pair: pair[1]), comm)
    renumbered = list(shards)
    for number, short_id in short_ids.items():
        renumbered[number] = _set_replica_id(shards[number], holders[short_id][0] == comm.rank)
    return renumbered


def _replicated(shard: ShardedBase) -> Replicated:
    return shard.replicated if isinstance(shard, (ShardedTensor, ShardedObject)) else False


def _short_id(shard: Any) -> _ShortId:
    return hashlib.sha256(repr((shard_id(shard), shard.replicated)).encode()).digest()[:16]


def _exchange_holders(short_ids: list[_ShortId], comm: Comm) -> dict[_ShortId, tuple[int, ...]] | None:
    """Collective: return the ranks that have each of this rank's replicated shards; None if no rank has any."""
    if comm.all_alike(b"".join(short_ids)):
        return dict.fromkeys(short_ids, tuple(range(comm.world_size))) if short_ids else None
    holders = find_holders(comm.all_gather(sorted(set(short_ids))))
    return {short_id: holders[short_id] for short_id in short_ids}


def _set_replica_id(shard: Any, is_main: bool) -> Any:
    changed = copy.copy(shard)
    changed.replica_id = int(not is_main)
    return changed


def _is_compared(shard: Any) -> bool:
    return _replicated(shard) is True or _is_sampled(shard)


def _is_sampled(shard: Any) -> bool:
    """Return whether a sample of the shard is compared: of a weight. Of vectors and scalars any rank's will do."""
    if _replicated(shard) != "sampled" or not isinstance(shard, ShardedTensor) or len(shard.global_shape) < 2:  # noqa: PLR2004
        return False
    return shard.data is not None and shard.data.layout == torch.strided and not shard.data.is_meta


def _compare(shared: list[tuple[Any, _ShortId]], comm: Comm) -> None:
    """Collective: raise on all ranks if copies differ.

    Args:
        shared: This rank's shards that other ranks have, too, ordered by their short ids.
        comm: The ranks.
    """
    vote = comm.largest(digest_vote())[0]  # all ranks must use the same digest
    with comm.local_phase("comparing replicated shards"):
        digest = digest_function(negotiate_digest(vote))
        sampled = [(shard, short_id) for shard, short_id in shared if _is_sampled(shard)]
        samples = dict(
            zip((short_id for _, short_id in sampled), _samples([shard.data for shard, _ in sampled]), strict=True)
        )
        mine = [(m, digest(tensor_bytes(samples[m])) if m in samples else _digest(s.data, digest)) for s, m in shared]
    if comm.all_alike(b"".join(short_id + value.to_bytes(8, "little") for short_id, value in mine)):
        return
    different = _different(comm.all_gather(mine))
    objects = {m: s.data for s, m in shared if m in different and isinstance(s, ShardedObject)}
    equal = _equal_objects(comm.all_gather(objects))  # pickles of equal values may differ
    equal |= _mostly_equal({short_id: sample for short_id, sample in samples.items() if short_id in different}, comm)
    with comm.collective_phase("comparing replicated shards"):
        faults = {
            shard.key: (shard, different[short_id])
            for shard, short_id in shared
            if short_id in different.keys() - equal
        }
        _refuse(faults)


def _samples(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bits of a few elements of each tensor as int64 on the CPU; one copy per dtype and device."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        groups[tensor.dtype, tensor.device].append(number)
    found: dict[int, torch.Tensor] = {}
    for numbers in groups.values():
        parts = [_sample(tensors[number]) for number in numbers]
        bits = _bits(torch.cat(parts).cpu())
        found.update(zip(numbers, torch.split(bits, [part.numel() for part in parts]), strict=True))
    return [found[number] for number in range(len(tensors))]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most _SAMPLE elements from all over a tensor, at indices that depend on its shape alone."""
    values = (dequantized(tensor) if is_quantized(tensor) else tensor).detach()
    step = max(1, values.numel() // _SAMPLE) | 1  # odd: an even step would stay in a few columns of most weights
    if values.is_contiguous():
        return movable(values.view(-1))[::step][:_SAMPLE]
    places = torch.arange(0, values.numel(), step, device=values.device)[:_SAMPLE]
    return movable(values[torch.unravel_index(places, values.shape)])


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements as int64; of 8-byte elements the upper 63, so that they can be negated."""
    if values.is_complex():
        real, imaginary = (_bits(part) for part in torch.view_as_real(values.resolve_conj()).unbind(-1))
        return (31 * real + imaginary) >> 1
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    bits = values.resolve_neg().contiguous().view(width).to(torch.int64)
    return bits >> 1 if width == torch.int64 else bits


def _mostly_equal(samples: Mapping[_ShortId, torch.Tensor], comm: Comm) -> set[_ShortId]:
    """Collective: return the samples of which at least half of the elements are equal on all ranks.

    The largest and the smallest value of each element over all ranks say whether it is equal, so the bytes that travel
    do not depend on the number of ranks.
    """
    ids = sorted({short_id for theirs in comm.all_gather(sorted(samples)) for short_id in theirs})
    equal = set()
    for first in range(0, len(ids), _SAMPLES_AT_ONCE):
        batch = ids[first : first + _SAMPLES_AT_ONCE]
        bits = [samples[short_id].tolist() if short_id in samples else [] for short_id in batch]
        padded = [value for values in bits for value in (*values, *[None] * (_SAMPLE - len(values)))]
        numbers = [_NOTHING if value is None else value for value in padded]
        negated = [_NOTHING if value is None else -value for value in padded]  # the largest of these is -smallest
        found = comm.largest(*numbers, *negated)
        largest, smallest = found[: len(numbers)], found[len(numbers) :]
        for number, short_id in enumerate(batch):
            place = slice(number * _SAMPLE, (number + 1) * _SAMPLE)
            pairs = [pair for pair in zip(largest[place], smallest[place], strict=True) if pair[0] != _NOTHING]
            if 2 * sum(high != -low for high, low in pairs) <= len(pairs):
                equal.add(short_id)
    return equal


def _different(everyone: list[list[tuple[_ShortId, int]]]) -> _Seen:
    seen: dict[_ShortId, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(everyone):
        for short_id, value in digests:
            seen[short_id][value].append(rank)
    return {short_id: ranks for short_id, ranks in seen.items() if len(ranks) > 1}


def _equal_objects(everyone: list[dict[_ShortId, Any]]) -> set[_ShortId]:
    """Return the objects whose values are equal although their pickles differ."""
    copies = defaultdict(list)
    for objects in everyone:
        for short_id, value in objects.items():
            copies[short_id].append(value)
    return {
        short_id for short_id, values in copies.items() if not any(any(diff(values[0], other)) for other in values[1:])
    }


def _refuse(faults: dict[str, tuple[Any, Mapping[int, Collection[int]]]]) -> None:
    if not faults:
        return
    shown = [f"{key!r}: {_groups(ranks)}" for key, (_, ranks) in sorted(faults.items())]
    shards = [shard for shard, _ in faults.values()]
    if any(map(_is_sampled, shards)):
        what = "check_replicas=False would save one rank's values for all, but most of the values differ between ranks"
    else:
        what = "replicated values differ between ranks"
    advice = (
        "Describe each rank's values as a shard of their own: as a DTensor; as a ShardedTensor with another offset; "
        "local tensors of experts by their layouts (shardckpt_ep.expert_layouts and expert_sharded_state_dict); states "
        "of a CheckpointManager as PerRank. Or give each rank's values a key of their own"
    )
    if not any(isinstance(shard, ShardedTensor) and len(shard.global_shape) > 1 for shard in shards):  # no weights
        advice += (
            ". If any rank's values will do, such as BatchNorm's statistics, pass check_replicas=False (to "
            "to_sharded_state_dict, or in the CheckpointConfig): then those of the lowest rank are saved"
        )
    raise ShardingError(f"{what}:\n  " + listed(shown, "\n  ") + f"\n{advice}")


def _groups(ranks: Mapping[int, Collection[int]]) -> str:
    """Return which ranks have the same value, as text that fits in a line for any number of ranks."""
    groups = [", ".join(map(str, sorted(set(group))[:4])) + ", ..." * (len(group) > 4) for group in ranks.values()]  # noqa: PLR2004
    return " / ".join(f"one value on rank {group}" for group in groups[:4]) + " / ..." * (len(groups) > 4)  # noqa: PLR2004


def _digest(value: Any, digest: Digest) -> int:
    if not isinstance(value, torch.Tensor):
        return digest(pickle.dumps(value))
    parts = [digest(tensor_bytes(plain_cpu(part))) for part in _parts(value)]
    return parts[0] if len(parts) == 1 else digest(b"".join(part.to_bytes(8, "little") for part in parts))


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensor in parts that are small enough to copy; all ranks cut the same parts, on any kind of device."""
    if tensor.nbytes <= _CHUNK or is_quantized(tensor) or tensor.layout != torch.strided:
        return (tensor,)
    return torch.split(tensor.detach().reshape(-1), math.ceil(_CHUNK / tensor.element_size()))


__all__ = ["Replicas", "choose_main_replicas", "find_replicas"]
