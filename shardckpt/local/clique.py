"""Cliques: which ranks keep each other's parts of a local checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CliqueReplication:
    """Ranks ``r, r + jump, r + 2 * jump, ...``, ``factor`` of them, are a clique: each keeps the parts of all.

    With as many ranks a node as ``jump``, the ranks of a clique are on different nodes, and any ``factor - 1`` nodes
    of those that a clique spans may be lost. All ranks make one together.

    Args:
        jump: From one rank of a clique to the next: the number of ranks of a node.
        factor: How many disks each part is on; 2 at least.
        process_group: The ranks, by default all; the same as the manager's.

    Raises:
        CheckpointingException: the ranks do not divide into such cliques, or do not all ask for the same.
    """

    def __init__(self, jump: int, factor: int, process_group: ProcessGroup | None = None) -> None:
        comm = Comm(process_group)
        with comm.collective_phase("forming cliques"):
            comm.agree(jump=jump, factor=factor)
            _check(jump, factor, comm.world_size)
        self.jump = jump
        self.factor = factor
        #: The ranks, as the whole job numbers them.
        self.members = comm.members

    def clique_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that keep this rank's part, itself among them."""
        span = self.jump * self.factor
        first = rank // span * span + rank % self.jump
        return tuple(range(first, first + span, self.jump))


def _check(jump: int, factor: int, world_size: int) -> None:
    if type(jump) is not int or type(factor) is not int or jump < 1 or factor < 2:  # noqa: PLR2004 - one copy is none
        raise CheckpointingException(
            f"no cliques of jump {jump!r} and factor {factor!r}: jump is a whole number of at least 1, factor of at "
            "least 2; without copies leave replication out"
        )
    if world_size % (jump * factor):
        raise CheckpointingException(
            f"{world_size} ranks do not divide into cliques of jump {jump} and factor {factor}: jump times factor must "
            f"divide the number of ranks; {_fitting(jump, factor, world_size)}"
        )


def _fitting(jump: int, factor: int, world_size: int) -> str:
    """The values that would do."""
    factors = [n for n in range(2, world_size // jump + 1) if world_size % (jump * n) == 0]
    jumps = [n for n in range(1, world_size // factor + 1) if world_size % (n * factor) == 0]
    fits = [f"with jump={jump} factor may be {_listed(factors)}"] if factors else []
    fits += [f"with factor={factor} jump may be {_listed(jumps)}"] if jumps else []
    fits += [f"jump=1 with factor={world_size} fits"] if world_size > 1 and not fits else []
    return "; ".join(fits) or "there is nobody to keep copies: leave replication out"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


__all__ = ["CliqueReplication"]
