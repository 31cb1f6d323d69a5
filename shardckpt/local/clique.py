"""Cliques: sets of ranks that keep copies of each other's parts of a local checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CliqueReplication:
    """Collective: define cliques of ``factor`` ranks ``r, r + jump, ...``; each keeps the parts of all.

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
            check_annotated(CliqueReplication.__init__, locals())
            comm.agree(jump=int(jump), factor=int(factor))
            if jump < 1 or factor < 2:  # noqa: PLR2004 - 1 is no copy
                raise CheckpointingException(
                    f"no cliques of jump {jump!r} and factor {factor!r}: jump is an integer of at least 1, factor of "
                    "at least 2; pass no replication to keep no copies"
                )
            if comm.world_size % (jump * factor):
                raise CheckpointingException(
                    f"{comm.world_size} ranks do not divide into cliques of jump {jump} and factor {factor}: jump "
                    "times factor must divide the number of ranks; " + _describe_fitting(jump, factor, comm.world_size)
                )
        self.jump, self.factor = int(jump), int(factor)
        #: The ranks, by their numbers in the job.
        self.members = comm.members

    def clique_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that keep this rank's part, including itself, ascending."""
        size = self.jump * self.factor  # so many consecutive ranks are divided into ``jump`` cliques
        first = rank // size * size + rank % self.jump
        return tuple(range(first, first + size, self.jump))


def _describe_fitting(jump: int, factor: int, world_size: int) -> str:
    """Return the factors that fit the jump, and the jumps that fit the factor, as advice in an error."""
    if world_size == 1:
        return "a single rank has no other to keep copies: pass no replication"
    factors = [str(n) for n in range(2, world_size // jump + 1) if world_size % (jump * n) == 0]
    jumps = [str(n) for n in range(1, world_size // factor + 1) if world_size % (n * factor) == 0]
    fits = [f"with jump={jump} factor may be {', '.join(factors)}"] if factors else []
    fits += [f"with factor={factor} jump may be {', '.join(jumps)}"] if jumps else []
    return "; ".join(fits) or f"jump=1 with factor={world_size} fits"
