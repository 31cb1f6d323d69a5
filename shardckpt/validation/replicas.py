"""Which rank's copy of replicated shards is the main one, and whether the copies are the same.

Ranks with the same shards find that out by one sum of a few bytes; only others announce what they have. Values are
digested where several ranks have them, and not sent.
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
from shardckpt.storage import CRC32, digest_function, preferred
from shardckpt.tensors import dequantized, is_quantized, movable, plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.storage import Digest

#: A digest of a shard's id, of 16 bytes for any key.
_ShortId: TypeAlias = bytes
#: The different digests that ranks have of each shard's copies, with the ranks that have them.
_Seen: TypeAlias = "Mapping[_ShortId, Mapping[int, Collection[int]]]"

#: Bytes that are taken from an accelerator at a time.
_CHUNK = 16 << 20


#: Elements of a ``"sampled"`` tensor that are compared: enough to tell most of it from little of it, and a few bytes.
_SAMPLE = 32
#: Stands where a rank has no element: smaller than any element's bits.
_NOTHING = -(1 << 63) + 1
#: Tensors whose samples travel in one message.
_SAMPLES_AT_ONCE = 256


class Replicas(NamedTuple):
    """Which of a rank's shards are replicated, and which ranks have them: found by their descriptions alone.

    Attributes:
        short_ids: Those of these shards, by their numbers.
        holders: The ranks that have each of them, ascending; None where no rank has any.
    """

    short_ids: dict[int, _ShortId]
    holders: dict[_ShortId, tuple[int, ...]] | None


def find_replicas(shards: Sequence[ShardedBase], comm: Comm) -> Replicas:
    """Collective: find out which ranks have which replicated shards.

    Args:
        shards: This rank's, factories built.
        comm: The ranks that save or load together.
    """
    with comm.local_phase("listing replicated shards"):
        short_ids = {number: _short_id(shard) for number, shard in enumerate(shards) if _replicated(shard)}
        ordered = sorted(short_ids.values())
    return Replicas(short_ids, _exchange_holders(ordered, comm))


def choose_main_replicas(
    shards: Sequence[ShardedBase], comm: Comm, *, compare: bool, replicas: Replicas | None = None
) -> list[ShardedBase]:
    """Collective: return the shards, replicated ones with replica id 0 on the lowest rank that has them, elsewhere 1.

    Args:
        shards: This rank's, factories built; they stay as they are, replicated ones are copied.
        comm: The ranks that save or load together.
        compare: Whether copies must have the same values, unless they are ``"unchecked"``; of ``"sampled"`` tensors
            only most of a few elements.
        replicas: Which they are, where all ranks know that already.

    Raises:
        ShardingError: on every rank, naming shards whose copies differ and the ranks that have them.
    """
    short_ids, holders = replicas or find_replicas(shards, comm)
    if holders is None:
        return list(shards)
    if compare:
        mine = ((shards[number], short_id) for number, short_id in short_ids.items() if len(holders[short_id]) > 1)
        _compare(sorted((pair for pair in mine if _is_compared(pair[0])), key=lambda pair: pair[1]), comm)
    settled = list(shards)
    for number, short_id in short_ids.items():
        settled[number] = _settled(shards[number], holders[short_id][0] == comm.rank)
    return settled


def _replicated(shard: ShardedBase) -> Replicated:
    return shard.replicated if isinstance(shard, (ShardedTensor, ShardedObject)) else False


def _short_id(shard: Any) -> _ShortId:
    return hashlib.sha256(repr((shard_id(shard), shard.replicated)).encode()).digest()[:16]


def _exchange_holders(short_ids: list[_ShortId], comm: Comm) -> dict[_ShortId, tuple[int, ...]] | None:
    """Collective: return the ranks that have each of this rank's replicated shards; None where no rank has any."""
    if comm.all_alike(b"".join(short_ids)):
        return dict.fromkeys(short_ids, tuple(range(comm.world_size))) if short_ids else None
    holders = find_holders(comm.all_gather(sorted(set(short_ids))))
    return {short_id: holders[short_id] for short_id in short_ids}


def _settled(shard: Any, is_main: bool) -> Any:
    settled = copy.copy(shard)
    settled.replica_id = int(not is_main)
    return settled


def _is_compared(shard: Any) -> bool:
    return _replicated(shard) is True or _is_sampled(shard)


def _is_sampled(shard: Any) -> bool:
    """Whether it is a weight of which a sample is compared: any rank's vector or scalar will do."""
    if _replicated(shard) != "sampled" or not isinstance(shard, ShardedTensor) or len(shard.global_shape) < 2:  # noqa: PLR2004
        return False
    return shard.data is not None and shard.data.layout == torch.strided and not shard.data.is_meta


def _compare(shared: list[tuple[Any, _ShortId]], comm: Comm) -> None:
    """Collective: raise on all ranks if copies differ; ``shared`` has this rank's shards that others have, too."""
    without_xxhash = comm.largest(preferred() == CRC32)[0]
    with comm.local_phase("comparing replicated shards"):
        digest = digest_function(CRC32 if without_xxhash else preferred())
        sampled = [(shard, short_id) for shard, short_id in shared if _is_sampled(shard)]
        samples = dict(
            zip((short_id for _, short_id in sampled), _samples([shard.data for shard, _ in sampled]), strict=True)
        )
        mine = [(m, digest(tensor_bytes(samples[m])) if m in samples else _digest(s.data, digest)) for s, m in shared]
    if comm.all_alike(b"".join(short_id + value.to_bytes(8, "little") for short_id, value in mine)):
        return
    different = _different(comm.all_gather(mine))
    objects = {m: s.data for s, m in shared if m in different and isinstance(s, ShardedObject)}
    equal = _equal_objects(comm.all_gather(objects))  # the same values may be pickled in two ways
    equal |= _mostly_equal({short_id: sample for short_id, sample in samples.items() if short_id in different}, comm)
    with comm.collective_phase("comparing replicated shards"):
        faults = {
            shard.key: (shard, different[short_id])
            for shard, short_id in shared
            if short_id in different.keys() - equal
        }
        _refuse(faults)


def _samples(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The bits of a few elements of each, as integers on the CPU: those of one dtype and device in one copy."""
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
    """A few elements from all over a tensor, the same places for any way to lie in memory."""
    values = (dequantized(tensor) if is_quantized(tensor) else tensor).detach()
    step = max(1, values.numel() // _SAMPLE) | 1  # an odd one walks through all columns of most shapes
    if values.is_contiguous():
        return movable(values.view(-1))[::step][:_SAMPLE]
    places = torch.arange(0, values.numel(), step, device=values.device)[:_SAMPLE]
    return movable(values[torch.unravel_index(places, values.shape)])


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of elements as integers: of those of 8 bytes the first 63, so that they can be negated."""
    if values.is_complex():
        real, imaginary = (_bits(part) for part in torch.view_as_real(values.resolve_conj()).unbind(-1))
        return (31 * real + imaginary) >> 1
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    bits = values.resolve_neg().contiguous().view(width).to(torch.int64)
    return bits >> 1 if width == torch.int64 else bits


def _mostly_equal(samples: Mapping[_ShortId, torch.Tensor], comm: Comm) -> set[_ShortId]:
    """Of the samples that differ between ranks, those of which at least half is the same; no rank sends its tensors."""
    ids = sorted({short_id for theirs in comm.all_gather(sorted(samples)) for short_id in theirs})
    equal = set()
    for first in range(0, len(ids), _SAMPLES_AT_ONCE):
        batch = ids[first : first + _SAMPLES_AT_ONCE]
        bits = [samples[short_id].tolist() if short_id in samples else [] for short_id in batch]
        padded = [value for values in bits for value in (*values, *[None] * (_SAMPLE - len(values)))]
        numbers = [_NOTHING if value is None else value for value in padded]
        negated = [_NOTHING if value is None else -value for value in padded]
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
    """Of objects whose pickles differ, those that are equal."""
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
        what = "most of the values that check_replicas=False would take from one rank for all are other ones elsewhere"
    else:
        what = "values that should be the same on all ranks that have them differ"
    advice = (
        "Describe what each rank has as a shard of its own: a DTensor; a ShardedTensor with another offset; experts "
        "that are local tensors by their layouts (shardckpt_ep.expert_layouts and expert_sharded_state_dict); among "
        "the states of a CheckpointManager, PerRank. Or give it a key of its own"
    )
    if not any(isinstance(shard, ShardedTensor) and len(shard.global_shape) > 1 for shard in shards):  # no weights
        advice += (
            ". If any copy will do, as of BatchNorm's statistics, pass check_replicas=False (to to_sharded_state_dict, "
            "or in the CheckpointConfig): then the lowest rank's is saved"
        )
    raise ShardingError(f"{what}:\n  " + listed(shown, "\n  ") + f"\n{advice}")


def _groups(ranks: Mapping[int, Collection[int]]) -> str:
    """Which ranks have the same, of so many that all fit in a line."""
    groups = [", ".join(map(str, sorted(set(group))[:4])) + ", ..." * (len(group) > 4) for group in ranks.values()]  # noqa: PLR2004
    return " / ".join(f"one value on rank {group}" for group in groups[:4]) + " / ..." * (len(groups) > 4)  # noqa: PLR2004


def _digest(value: Any, digest: Digest) -> int:
    if not isinstance(value, torch.Tensor):
        return digest(pickle.dumps(value))
    parts = [digest(tensor_bytes(plain_cpu(part))) for part in _parts(value)]
    return parts[0] if len(parts) == 1 else digest(b"".join(part.to_bytes(8, "little") for part in parts))


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensor in parts of which each may be copied; they are cut alike on every kind of device."""
    if tensor.nbytes <= _CHUNK or is_quantized(tensor) or tensor.layout != torch.strided:
        return (tensor,)
    return torch.split(tensor.detach().reshape(-1), math.ceil(_CHUNK / tensor.element_size()))


__all__ = ["Replicas", "choose_main_replicas", "find_replicas"]
