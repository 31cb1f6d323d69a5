"""The plan of a fully parallel load: what it asks of a rank among many.

Run ``python -m benchmarks.simulation.reading RANKS SHARDS REPLICAS``.
"""

from __future__ import annotations

import pickle
import sys
import time
from typing import Any

import torch

from shardckpt.distributed import Comm
from shardckpt.parallel.reading_plan import (
    WantedShard,
    describe_shared,
    find_shared,
    list_shareable,
    list_wanted,
    plan_reading,
)
from shardckpt.parallel.transfers import ROUND_BYTES

_SETTINGS = ("broadcast", ROUND_BYTES)


class _MainRank(Comm):
    """Rank 0 of many: what the others send is there already, as pickles, and counted when it is received."""

    def __init__(self, sent: list[list[bytes]]) -> None:
        super().__init__()
        self._sent = sent
        self.received = 0

    def all_gather(self, value: Any) -> list[Any]:
        """What all ranks send in this call."""
        others = self._sent.pop(0)
        self.received += sum(map(len, others))
        return [value, *(pickle.loads(data) for data in others)]  # noqa: S301 - its own


def simulate(ranks: int, shards: int, replicas: int) -> tuple[float, int, int]:
    """Plan the reading of rank 0.

    Args:
        ranks: How many.
        shards: Of each.
        replicas: Ranks that want the same shards, one after the other.

    Returns:
        Seconds, bytes received, and shards that are sent.
    """
    torch.set_num_threads(1)
    wants = [_want(rank // replicas, shards) for rank in range(0, ranks, replicas)]
    listed = [list_wanted(list_shareable(mine), _SETTINGS) for mine in wants]
    everyone = [listed[rank // replicas] for rank in range(ranks)]
    shared = find_shared(everyone)
    nbytes = sum(want.nbytes for want in wants[0])
    sent = [[pickle.dumps(value) for value in everyone[1:]]]
    if shared.holders:
        firsts = {holders[0] for holders in shared.holders}
        empty = pickle.dumps(describe_shared([], find_shared([]), 0, 0))
        described = [
            pickle.dumps(describe_shared(wants[rank // replicas], shared, nbytes, rank)) if rank in firsts else empty
            for rank in range(1, ranks)
        ]
        sent.append(described)
    mine = wants[0]
    del listed, everyone, shared, wants
    comm = _MainRank(sent)
    start = time.process_time()
    plan = plan_reading(mine, _SETTINGS, comm)
    return time.process_time() - start, comm.received, len(plan.transfers)


def _want(part: int, count: int) -> list[WantedShard]:
    shape = (8, 64)
    return [
        WantedShard(
            (("tensor", f"layers.{n}.weight", (part * 8, 0), shape, None), torch.bfloat16),
            shape,
            torch.bfloat16,
            1024,
            "cpu",
        )
        for n in range(count)
    ]


if __name__ == "__main__":
    seconds, received, transfers = simulate(*map(int, sys.argv[1:]))
    sys.stdout.write(f"{seconds:.2f} s, {received / (1 << 20):.1f} MiB received, {transfers:,} shards sent\n")
