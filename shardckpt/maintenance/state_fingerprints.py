"""Fingerprints of the tensors that a job has, whatever their sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.adapters.state import to_sharded_state_dict
from shardckpt.chunks.items import collect_items
from shardckpt.distributed.comm import Comm
from shardckpt.distributed.routing import find_owner
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import nested_values, split_state_dict, validated_copy
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.storage.sums import add_sums, split_sums, sum_shards
from shardckpt.tensors.memory import synchronize_devices
from shardckpt.validation.replicas import choose_main_replicas
from shardckpt.validation.sharding import validate_shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.nn import Module


def fingerprint(
    state: Module | Sequence[Module] | Mapping[Any, Any], *, process_group: ProcessGroup | None = None
) -> dict[str, str]:
    """Collective: return a fingerprint of each tensor, which says whether two jobs have the same values.

    It is a hash of 128 bits of the tensor's dtype, global shape and bits: equal whatever the sharding and the number
    of ranks. So a trainer and an inference engine, or a job before and after it was resharded, can compare their
    weights by 16 bytes a tensor. It is no cryptographic hash: :mod:`shardckpt.tensors.fingerprint` has the odds that
    two different tensors have the same one, which are below one in 2^80.

    Each rank reads the tensors that it has, one copy of replicated ones; ``benchmarks.fingerprints`` measures how fast.
    Tensors of a device, and those with strides, are copied to the CPU one at a time. Objects and other values have no
    part in it.

    Example::

        before = shardckpt.fingerprint(model)
        ...
        changed = [key for key, value in shardckpt.fingerprint(model).items() if before[key] != value]

    Args:
        state: A module, a list of modules, a state dict of tensors and DTensors, or a sharded state dict; see
            :func:`shardckpt.adapters.to_sharded_state_dict`. Every rank passes its own. It does not change.
        process_group: The ranks that have the state; by default all, or this process alone without torch.distributed.

    Returns:
        32 hex digits by the tensor's key, in the order of the keys; the same on every rank.

    Raises:
        ShardingError: On every rank, if the shards of all ranks do not fill every tensor exactly once.
    """
    comm = Comm(process_group)
    with comm.local_phase("describing the state"):
        nested, _ = split_state_dict(to_sharded_state_dict(state, check_replicas=False), plain_objects=False)
        shards = [validated_copy(shard) for shard in nested_values(nested) if isinstance(shard, ShardedTensor)]
    shards = choose_main_replicas(shards, comm, compare=False)
    validate_shards(shards, comm)
    with comm.local_phase("computing fingerprints"):
        items = collect_items(shards)
        synchronize_devices(items.tensors)
        stored = PackedShards.pack(items.keys, items.dtypes, items.shapes, items.boxes.table(), ())
        sums = sum_shards(stored, items.tensors, {})
        rows = split_sums([sums], lambda key: find_owner(key, comm.world_size))
    found = comm.all_to_all(rows)
    with comm.local_phase("adding up fingerprints"):
        owned = add_sums(found.values())
    return dict(sorted(item for part in comm.all_gather(owned) for item in part.items()))
