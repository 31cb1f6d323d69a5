"""Process groups: the one that a caller means, its twin for tensors on the CPU, and what moves tensors in it."""

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
#: gloo twins of groups whose backend cannot move CPU tensors, by group, as long as the group lives.
_cpu_twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


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
    """The group itself if it moves CPU tensors, else its gloo twin, made once by all its ranks."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    if group not in _cpu_twins:
        ranks = dist.get_process_group_ranks(group)
        timeout = group_timeout(group)
        _cpu_twins[group] = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    return _cpu_twins[group]


def moves(group: Any, device_type: str) -> bool:
    """Whether the group, if there is one, moves tensors on such accelerators from device to device."""
    if group is None:
        return False
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type) not in _CPU_BACKENDS


__all__ = ["alive", "cpu_group", "joined_group", "moves"]
