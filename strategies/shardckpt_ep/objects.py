"""Objects of single experts: router statistics, quantization state, anything that is not a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.mapping import ShardedObject

if TYPE_CHECKING:
    from shardckpt.mapping import ReplicaId


class ExpertObject(ShardedObject):
    """An object of one expert; its grid counts experts."""


def expert_object(key: str, obj: object, expert: int, num_experts: int, replica_id: ReplicaId = 0) -> ExpertObject:
    """Describe an object of one expert: whichever rank has the expert at a load gets it.

    Args:
        key: Name of the objects of all experts.
        obj: The object, or None where it is to be loaded.
        expert: Which expert's, counted over all ranks.
        num_experts: How many experts there are.
        replica_id: 0, or a tuple of zeros, on the rank that writes it, anything else on ranks with copies.

    Raises:
        ShardingError: there is no such expert.
    """
    return ExpertObject(key, obj, (num_experts,), (expert,), replica_id)


__all__ = ["ExpertObject", "expert_object"]
