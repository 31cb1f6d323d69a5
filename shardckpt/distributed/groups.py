"""Process groups: the caller's, a gloo group of the same ranks for CPU tensors, and which devices a group serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardckpt.errors import CheckpointingException, CommunicationError
from shardckpt.tensors.torch_private import group_timeout

if TYPE_CHECKING:
    from weakref import ref

#: Backends that copy tensors through CPU memory; None: no backend.
_CPU_BACKENDS = (None, "gloo", "mpi", "undefined")
#: The gloo group of each group whose backend cannot move CPU tensors. Weak: an entry ends with its group.
_gloo_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def get_live_group(group: ref[Any]) -> Any:
    """Return the group of a weak reference; CommunicationError if it was destroyed."""
    found = group()
    if found is None:
        raise CommunicationError("the process group was destroyed: save, load and finalize before that")
    return found


def resolve_group(group: Any) -> Any:
    """Return the group, or the default group for None; an error if this rank does not belong to it."""
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise CheckpointingException(
            f"rank {dist.get_rank()} does not belong to the process group that it passed: on every rank pass a group "
            "that contains this rank"
        )
    return group


def get_cpu_group(group: Any) -> Any:
    """Collective: return the group if it moves CPU tensors, else a gloo group of the same ranks, which is made once."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    if group not in _gloo_groups:
        ranks = dist.get_process_group_ranks(group)
        timeout = group_timeout(group)  # a deadline that the user has set holds for this group, too
        # local synchronization: ranks outside of the group need not call, and do not
        _gloo_groups[group] = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[group]


def moves_between(group: Any, device_type: str) -> bool:
    """Return whether the group moves tensors between such devices directly; False without a group."""
    if group is None:
        return False
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type) not in _CPU_BACKENDS
