"""Choose the main replica of shards that say ``replicated``, and check that their copies have the same values.

If all ranks have the same replicated shards, one sum of a few bytes says so; only otherwise they send the ids of their
shards to owners. Values are not sent, but digests of the shards that several ranks have.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from shardckpt.distributed.pickling import pickle_to_compare
from shardckpt.errors import ShardingError, listed
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.shard_copies import shard_id
from shardckpt.state_dict import build_copy, diff
from shardckpt.storage.digest import digest_function, digest_vote, negotiate_digest
from shardckpt.tensors.memory import ORDINARY, plain_cpu, tensor_bytes
from shardckpt.tensors.wrappers import dequantize, is_quantized, movable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import Replicated, ShardedBase
    from shardckpt.storage.digest import Digest

#: A digest of a shard's id, of 16 bytes for any key.
_ShortId: TypeAlias = bytes
#: The digests of each shard's copies, with the ranks that have each.
_Seen: TypeAlias = "Mapping[_ShortId, Mapping[int, Collection[int]]]"

#: A shard and its short id.
_Shared: TypeAlias = "tuple[Any, _ShortId]"

_ID_BYTES = 16
_WIDTH = struct.Struct("<I")
_HOLDERS = struct.Struct("<II")
#: Bytes that are copied from an accelerator at a time.
_CHUNK = 16 << 20
#: A part of the keys of a rank's own experts, in the names of all frameworks.
_EXPERT = "expert"
#: A part of the keys of an optimizer's state.
_OPTIMIZER = "optimizer.state."
#: Elements of a ``"sampled"`` tensor that are compared: few bytes, and enough to say whether most of them differ.
_SAMPLE = 32
#: Where a rank has no element: smaller than the bits of any, so that a maximum over ranks ignores it.
_NOTHING = -(1 << 63) + 1
#: Dtypes of numbers that are compared together.
_NUMBERS = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
#: Samples that are exchanged in one message.
_SAMPLES_AT_ONCE = 256


class Holders(NamedTuple):
    """The ranks that have a replicated shard: the lowest of them, and how many they are."""

    first: int
    number: int


class Replicas(NamedTuple):
    """The replicated shards of a rank, and the ranks that have each; found without looking at values.

    ``is_main`` says whether this rank is the lowest that has each replicated shard, by the shard's number in the list
    that was given; None if no rank has any. ``shared`` has the shards that other ranks have, too, by number, and their
    short ids; in the order of these.
    """

    is_main: dict[int, bool] | None
    shared: list[tuple[int, _ShortId]]


def find_replicas(shards: Sequence[ShardedBase], comm: Comm) -> Replicas:
    """Collective: find out which ranks have which replicated shards; return this rank's, and their holders."""
    if comm.world_size == 1:
        return Replicas({number: True for number, shard in enumerate(shards) if _get_replicated(shard)} or None, [])
    with comm.local_phase("listing replicated shards"):
        short_ids = {
            number: hashlib.sha256(repr((shard_id(shard), replicated)).encode()).digest()[:16]
            for number, shard in enumerate(shards)
            if (replicated := _get_replicated(shard))
        }
        ordered = sorted(short_ids.values())
    if comm.all_equal(b"".join(ordered)):  # one small message answers for most jobs; ids go to their owners else
        if not ordered:
            return Replicas(None, [])
        holders = dict.fromkeys(ordered, Holders(0, comm.world_size))
    else:
        found = _ask_owners(dict.fromkeys(ordered, b""), lambda rows: _HOLDERS.pack(min(rows), len(rows)), comm)
        holders = {short_id: Holders(*_HOLDERS.unpack(data)) for short_id, data in found.items()}
    shared = [pair for pair in short_ids.items() if holders[pair[1]].number > 1]
    return Replicas(
        {number: holders[short_id].first == comm.rank for number, short_id in short_ids.items()},
        sorted(shared, key=lambda pair: pair[1]),
    )


def _ask_owners(
    rows: Mapping[_ShortId, bytes], decide: Callable[[dict[int, bytes]], bytes], comm: Comm
) -> dict[_ShortId, bytes]:
    """Collective: send a row for each id to the rank that owns the id, and return the owners' answers.

    No rank receives the ids of all: with 1,000 ids on each of 16,384 ranks that would be 262 MB. The rows of all ranks
    have the same number of bytes. ``decide`` returns the answer for an id, by the rows of the ranks that have it.
    """
    with comm.local_phase("sending replicated shards to their owners"):
        width = len(next(iter(rows.values()), b""))
        parts: dict[int, list[bytes]] = defaultdict(list)
        for short_id, row in rows.items():
            parts[int.from_bytes(short_id[:8], "little") % comm.world_size].append(short_id + row)
    arrived = comm.all_to_all({owner: _WIDTH.pack(width) + b"".join(some) for owner, some in parts.items()})
    with comm.local_phase("comparing replicated shards"):
        seen: dict[_ShortId, dict[int, bytes]] = defaultdict(dict)
        asked: dict[int, list[_ShortId]] = {}
        for rank, data in arrived.items():
            step = _ID_BYTES + _WIDTH.unpack_from(data)[0]
            found = [data[place : place + step] for place in range(_WIDTH.size, len(data), step)]
            asked[rank] = [row[:_ID_BYTES] for row in found]
            for row in found:
                seen[row[:_ID_BYTES]][rank] = row[_ID_BYTES:]
        decided = {short_id: decide(found) for short_id, found in seen.items()}
        answers = {rank: b"".join(decided[short_id] for short_id in ids) for rank, ids in asked.items()}
    answered = comm.all_to_all(answers)
    with comm.local_phase("comparing replicated shards"):
        own: dict[_ShortId, bytes] = {}
        for owner, data in answered.items():  # in the order in which they were sent
            step = len(data) // len(parts[owner])
            own |= {
                row[:_ID_BYTES]: data[number * step : (number + 1) * step] for number, row in enumerate(parts[owner])
            }
    return own


def choose_main_replicas(
    shards: Sequence[ShardedBase], comm: Comm, *, compare: bool, replicas: Replicas | None = None
) -> list[ShardedBase]:
    """Collective: make the copy of each replicated shard on the lowest rank that has it the main replica.

    Return the shards in the same order; replicated ones that say otherwise are copies with replica id 0 on that rank,
    and 1 on all others. Factories must be built. With ``compare`` copies must have the same values; of ``"sampled"``
    tensors, at least half of a few elements must be equal; ``"unchecked"`` ones are not compared. The ShardingError, on
    every rank, names the shards whose copies differ, and the ranks that have them. ``replicas``, the result of
    :func:`find_replicas` for these shards, must be given on all ranks or none.
    """
    is_main, shared = replicas or find_replicas(shards, comm)
    if is_main is None:  # on all ranks: no rank has any
        return list(shards)
    if compare:  # collective, also on a rank that has nothing to compare
        pairs: list[_Shared] = [(shards[number], short_id) for number, short_id in shared]
        _compare([pair for pair in pairs if pair[0].replicated is True or _is_sampled(pair[0])], comm)
    renumbered = list(shards)
    for number, is_first in is_main.items():
        shard: Any = shards[number]
        if (shard.replica_id == 0) != is_first or type(shard.replica_id) is not int:
            renumbered[number] = shard = build_copy(shard)
            shard.replica_id = int(not is_first)
    return renumbered


def _get_replicated(shard: ShardedBase) -> Replicated:
    return shard.replicated if isinstance(shard, (ShardedTensor, ShardedObject)) else False


def _is_sampled(shard: Any) -> bool:
    """Return whether a sample of the shard is compared: of a weight. Of vectors and scalars any rank's will do."""
    if _get_replicated(shard) != "sampled" or not isinstance(shard, ShardedTensor) or len(shard.global_shape) < 2:  # noqa: PLR2004
        return False
    return shard.data is not None and shard.data.layout == torch.strided and not shard.data.is_meta


def _compare(shared: list[_Shared], comm: Comm) -> None:
    """Collective: raise on all ranks if copies of shards that several ranks have differ; all order them by short id."""
    vote = comm.largest(digest_vote())[0]  # all ranks must use the same digest
    with comm.local_phase("comparing replicated shards"):
        digest = digest_function(negotiate_digest(vote))
        samples = _take_samples(shared)
        numbers, others = _group_numbers(shared)
        mine = [(short_id, _digest_shard(shard, samples.get(short_id), digest)) for shard, short_id in others]
        rows = [short_id + _pack(value) for short_id, value in mine]
        rows += sorted(_digest_numbers(group, digest) for group in numbers)
    if comm.all_equal(b"".join(rows)):
        return
    with comm.local_phase("comparing replicated shards"):
        mine += [(short_id, _digest(shard.data, digest)) for group in numbers for shard, short_id in group]
    values: dict[_ShortId, set[int]] = defaultdict(set)  # a rank may have a shard twice
    for short_id, value in mine:
        values[short_id].add(value)
    lowest = {short_id: _pack(min(own)) for short_id, own in values.items()}
    differs = _ask_owners(lowest, lambda found: bytes([len(set(found.values())) > 1]), comm)
    suspected = [(short_id, value) for short_id, value in mine if any(differs[short_id]) or len(values[short_id]) > 1]
    if not comm.total(len(suspected))[0]:
        return
    different = _find_different(comm.all_gather(suspected))  # seldom: only to name the ranks
    suspects = [(shard, short_id) for shard, short_id in shared if short_id in different]
    objects = {short_id: shard.data for shard, short_id in suspects if isinstance(shard, ShardedObject)}
    equal = _find_equal_objects(comm.all_gather(objects))  # pickles of equal values may differ
    equal |= _find_mostly_equal({short_id: samples[short_id] for _, short_id in suspects if short_id in samples}, comm)
    with comm.collective_phase("comparing replicated shards"):
        _refuse({shard.key: (shard, different[id_]) for shard, id_ in suspects if id_ not in equal})


def _pack(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _group_numbers(shared: list[_Shared]) -> tuple[list[list[_Shared]], list[_Shared]]:
    """Return the numbers among the shards by dtype and device, and the other shards.

    An optimizer counts the steps of each parameter: one by one, 20,000 digests take longer than a copy of the state.
    """
    numbers: dict[Any, list[_Shared]] = defaultdict(list)
    others: list[_Shared] = []
    for pair in shared:
        shard = pair[0]
        value = shard.data
        # the shard has the tensor's shape and dtype, and answers faster
        is_number = type(value) in ORDINARY and not shard.local_shape and shard.dtype in _NUMBERS
        if is_number and value.layout == torch.strided and not value.is_meta:
            numbers[shard.dtype, "cpu" if value.is_cpu else value.device].append(pair)
        else:
            others.append(pair)
    return list(numbers.values()), others


def _digest_numbers(group: list[_Shared], digest: Digest) -> bytes:
    """Return bytes that are equal on ranks that have the same numbers under the same ids."""
    with torch.no_grad():
        values = torch.stack([shard.data for shard, _ in group])
    return b"".join((str(values.dtype).encode(), *(short_id for _, short_id in group), _pack(_digest(values, digest))))


def _take_samples(shared: list[_Shared]) -> dict[_ShortId, torch.Tensor]:
    """Return the bits of a few elements of each sampled tensor, by its short id, as int64 on the CPU."""
    groups: dict[Any, dict[_ShortId, torch.Tensor]] = defaultdict(dict)
    for shard, short_id in shared:
        if shard.replicated is not True and _is_sampled(shard):
            groups[shard.data.dtype, shard.data.device][short_id] = _sample(shard.data)
    found: dict[_ShortId, torch.Tensor] = {}
    for parts in groups.values():
        bits = _bits(torch.cat(list(parts.values())).cpu())  # one copy from the device, not one per tensor
        found.update(zip(parts, torch.split(bits, [part.numel() for part in parts.values()]), strict=True))
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most _SAMPLE elements from all over a tensor, at indices that depend on its shape alone."""
    values = (dequantize(tensor) if is_quantized(tensor) else tensor).detach()
    step = max(1, values.numel() // _SAMPLE) | 1  # odd: an even step would stay in a few columns of most weights
    if values.is_contiguous():
        return movable(values.view(-1))[::step][:_SAMPLE]
    places = torch.arange(0, values.numel(), step, device=values.device)[:_SAMPLE]
    return movable(values[torch.unravel_index(places, values.shape)])


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements as int64; of 8-byte elements the upper 63, so that they can be negated."""
    if values.is_complex():
        real, imaginary = (_bits(part) for part in torch.view_as_real(values.resolve_conj()).unbind(-1))
        return (31 * real + imaginary) >> 1  # one number that differs if either part does, except by chance
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    bits = values.resolve_neg().contiguous().view(width).to(torch.int64)
    return bits >> 1 if width == torch.int64 else bits


def _find_mostly_equal(samples: Mapping[_ShortId, torch.Tensor], comm: Comm) -> set[_ShortId]:
    """Collective: return the samples with at least half of their elements equal on all ranks."""
    # The largest and the smallest value of an element over all ranks say whether it is equal: the bytes that travel do
    # not depend on the number of ranks.
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


def _find_different(everyone: list[list[tuple[_ShortId, int]]]) -> _Seen:
    seen: dict[_ShortId, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(everyone):
        for short_id, value in digests:
            seen[short_id][value].append(rank)
    return {short_id: ranks for short_id, ranks in seen.items() if len(ranks) > 1}


def _find_equal_objects(everyone: list[dict[_ShortId, Any]]) -> set[_ShortId]:
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
    # of weights, optimizers and anything that may be local experts', one rank's values for all would be a loss
    if not any(_is_weight(shard) or _EXPERT in shard.key or _OPTIMIZER in shard.key for shard in shards):
        advice += (
            ". If any rank's values will do, such as BatchNorm's statistics, pass check_replicas=False (to "
            "to_sharded_state_dict, or in the CheckpointConfig): then those of the lowest rank are saved"
        )
    raise ShardingError(f"{what}:\n  " + listed(shown, "\n  ") + f"\n{advice}")


def _is_weight(shard: Any) -> bool:
    return isinstance(shard, ShardedTensor) and len(shard.global_shape) > 1


def _groups(ranks: Mapping[int, Collection[int]]) -> str:
    """Return which ranks have the same value, as text that fits in a line for any number of ranks."""
    groups = [", ".join(map(str, sorted(set(group))[:4])) + ", ..." * (len(group) > 4) for group in ranks.values()]  # noqa: PLR2004
    return " / ".join(f"one value on rank {group}" for group in groups[:4]) + " / ..." * (len(groups) > 4)  # noqa: PLR2004


def _digest_shard(shard: Any, sample: torch.Tensor | None, digest: Digest) -> int:
    """Return the digest of a shard, or of a sample of it; raise ShardingError with its key if its data has no bits."""
    try:
        return _digest(shard.data if sample is None else sample, digest)
    except ShardingError as exc:
        raise ShardingError(f"tensor {shard.key!r}: {exc}") from exc


def _digest(value: Any, digest: Digest) -> int:
    if not isinstance(value, torch.Tensor):
        return digest(pickle_to_compare(value, _name_values))
    if value.layout != torch.strided or value.nbytes <= _CHUNK or is_quantized(value):
        return digest(tensor_bytes(plain_cpu(value)))
    # in parts, few of them on the CPU at a time; all ranks cut the same ones, on any kind of device
    parts = torch.split(value.detach().reshape(-1), math.ceil(_CHUNK / value.element_size()))
    return digest(b"".join(digest(tensor_bytes(plain_cpu(part))).to_bytes(8, "little") for part in parts))


def _name_values(value: Any) -> tuple[Any, ...] | None:
    """Return a plain tensor's dtype, shape and bits: torch pickles its storage, whose name is another one each time."""
    if type(value) not in ORDINARY or value.layout != torch.strided or value.is_meta:
        return None
    return str(value.dtype), tuple(value.shape), bytes(tensor_bytes(plain_cpu(value)))
