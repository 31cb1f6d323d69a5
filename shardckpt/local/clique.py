"""Cliques: sets of ranks that keep copies of each other's parts of a local checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CliqueReplication:
    """Collective: define cliques of ``factor`` ranks ``r, r + jump, ...``, of which each keeps the parts of all.

    If ``jump`` is the number of ranks per node, the ranks of a clique are on different nodes, and of these nodes any
    ``factor - 1`` may be lost.

    Example:
        Nodes of 8 ranks; each part is on the disks of two nodes::

            manager = LocalCheckpointManager("/local/checkpoints", CliqueReplication(jump=8, factor=2))

    Args:
        jump: Distance from one rank of a clique to the next: the number of ranks per node.
        factor: Number of disks that each part is on; at least 2.
        process_group: The ranks, by default all; the same as the manager's.

    Raises:
        CheckpointingException: the ranks do not divide into such cliques, or ranks give different arguments.
    """

    def __init__(self, jump: int, factor: int, process_group: ProcessGroup | None = None) -> None:
        comm = Comm(process_group)
        with comm.collective_phase("forming cliques"):
            comm.agree(jump=jump, factor=factor)
            _check(jump, factor, comm.world_size)
        self.jump = jump
        self.factor = factor
        #: The ranks, by their numbers in the job.
        self.members = comm.members

    def clique_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that keep this rank's part, including itself, ascending."""
        span = self.jump * self.factor
        first = rank // span * span + rank % self.jump
        return tuple(range(first, first + span, self.jump))


def _check(jump: int, factor: int, world_size: int) -> None:
    if type(jump) is not int or type(factor) is not int or jump < 1 or factor < 2:  # noqa: PLR2004 - one copy is none
        raise CheckpointingException(
            f"no cliques of jump {jump!r} and factor {factor!r}: jump is an integer of at least 1, factor of at "
            "least 2; pass no replication to keep no copies"
        )
    if world_size % (jump * factor):
        raise CheckpointingException(
            f"{world_size} ranks do not divide into cliques of jump {jump} and factor {factor}: jump times factor must "
            f"divide the number of ranks; {_describe_fitting(jump, factor, world_size)}"
        )


def _describe_fitting(jump: int, factor: int, world_size: int) -> str:
    """Return which values are possible, as text."""
    factors = [n for n in range(2, world_size // jump + 1) if world_size % (jump * n) == 0]
    jumps = [n for n in range(1, world_size // factor + 1) if world_size % (n * factor) == 0]
    fits = [f"with jump={jump} factor may be {_join(factors)}"] if factors else []
    fits += [f"with factor={factor} jump may be {_join(jumps)}"] if jumps else []
    fits += [f"jump=1 with factor={world_size} fits"] if world_size > 1 and not fits else []
    return "; ".join(fits) or "a single rank has no other to keep copies: pass no replication"


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


__all__ = ["CliqueReplication"]
