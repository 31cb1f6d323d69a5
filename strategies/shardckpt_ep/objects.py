"""Objects of single experts: router statistics, quantization state, whatever is not a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.mapping import ShardedObject

if TYPE_CHECKING:
    from shardckpt.mapping import ReplicaId


class ExpertObject(ShardedObject):
    """An object of one expert. Its global shape is the number of experts, its offset the number of this one."""


def expert_object(key: str, obj: object, expert: int, num_experts: int, replica_id: ReplicaId = 0) -> ExpertObject:
    """Describe an object of one expert. At a load, the rank that holds the expert then gets the object.

    Args:
        obj: The object to save, or None in a load template.
        num_experts: Number of experts on all ranks.
        replica_id: 0, or a tuple of zeros, on the rank that writes it; anything else on ranks with copies.

    Returns:
        The object's description, a value for a sharded state dict.

    Raises:
        ShardingError: there is no such expert.

    Example::

        state["stats"] = [expert_object("router.stats", stats[n], first + n, 64) for n in range(len(stats))]
    """
    return ExpertObject(key, obj, (num_experts,), (expert,), replica_id)
