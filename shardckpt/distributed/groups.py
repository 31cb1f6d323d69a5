"""Process groups: the one that a caller means, a gloo group for its tensors on the CPU, and what moves tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardckpt.errors import CheckpointingException, CommunicationError
from shardckpt.tensors import group_timeout

if TYPE_CHECKING:
    from weakref import ref

#: Backends that take tensors through the memory of the CPU, and no backend.
_CPU_BACKENDS = (None, "gloo", "mpi", "undefined")
#: gloo groups with the ranks of groups whose backend cannot move CPU tensors, by those, as long as they live.
_gloo_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def alive(group: ref[Any]) -> Any:
    """The group that is referred to, unless it was destroyed."""
    found = group()
    if found is None:
        raise CommunicationError("the process group was destroyed: save, load and finalize before that")
    return found


def joined_group(group: Any) -> Any:
    """The group, by default all ranks; this rank must be one of its members."""
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise CheckpointingException(
            f"rank {dist.get_rank()} is no member of the process group that it gave: give on every rank a group that "
            "the rank belongs to"
        )
    return group


def cpu_group(group: Any) -> Any:
    """Collective: return the group if it moves CPU tensors, else a gloo group of its ranks, which they make once."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    if group not in _gloo_groups:
        ranks = dist.get_process_group_ranks(group)
        timeout = group_timeout(group)
        _gloo_groups[group] = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[group]


def moves(group: Any, device_type: str) -> bool:
    """Whether the group, if there is one, moves tensors on such accelerators from device to device."""
    if group is None:
        return False
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type) not in _CPU_BACKENDS


__all__ = ["alive", "cpu_group", "joined_group", "moves"]
