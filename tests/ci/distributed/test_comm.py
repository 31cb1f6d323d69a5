from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed.comm import Comm
from shardckpt.errors import RankFailedError
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def _through_a_gloo_group() -> list[int]:
    accelerators_only = dist.new_group(backend="cuda:gloo")
    first, second = Comm(accelerators_only), Comm(accelerators_only)
    return first.all_gather(first.rank) + second.all_gather(second.rank)


def test_a_group_for_accelerators_gets_a_gloo_group_for_the_cpu(gloo_ranks: RankPool) -> None:
    """Where the caller's group moves no CPU tensors (NCCL), a gloo group of the same ranks carries the messages."""
    assert gloo_ranks.run(2, _through_a_gloo_group) == [[0, 1, 0, 1]] * 2


def _messages(folder: str) -> list[int]:
    comm_calls: list[int] = []
    found: list[int] = []
    call = Comm._call
    Comm._call = lambda self, collective: (comm_calls.append(1), call(self, collective))[1]  # type: ignore[method-assign]
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        for number in range(2):
            tensors = [torch.full((2, 3), float(rank)) for _ in range(1 + 40 * number)]
            shards = {
                f"t{n}": ShardedTensor.from_rank_offsets(f"t{n}", tensor, (0, rank, world))
                for n, tensor in enumerate(tensors)
            }
            for action, place in ((dc.save, "a"), (dc.save, "b"), (dc.load, "b")):
                comm_calls.clear()
                action(shards, f"{folder}/{number}{place}")
                found.append(len(comm_calls))
    finally:
        Comm._call = call  # type: ignore[method-assign]
    return found


def test_messages_do_not_grow_with_the_state(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """A save of one tensor and one of 41 take the same 24 collectives, another of the same 19, a load 17."""
    assert gloo_ranks.run(2, _messages, str(tmp_path)) == [[24, 19, 17, 24, 19, 17]] * 2


def _waits_and_is_interrupted(who: int) -> list[Any]:
    rank, slow = dist.get_rank(), dist.get_world_size() - 1
    comm, before = Comm(), signal.signal(signal.SIGINT, signal.default_int_handler)
    heard: list[Any] = []
    store: Any = dist.distributed_c10d._get_default_store()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        store.set("interrupted", b"1")

    try:
        with comm.local_phase("waiting"):
            if rank == who:
                threading.Timer(0.2, interrupt).start()
            if rank == slow:
                store.wait(["interrupted"])
            comm.sync_errors()
        comm.sync_errors()
    except (KeyboardInterrupt, RankFailedError) as exc:
        heard.append(type(exc).__name__)
    finally:
        signal.signal(signal.SIGINT, before)
    return heard + Comm().all_gather(rank)


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_waits_for_what_the_others_are_in(gloo_ranks: RankPool, who: int) -> None:
    """Ctrl-C on a rank that waits for a slower one is an error on all ranks, which are in step after it."""
    found = gloo_ranks.run(3, _waits_and_is_interrupted, who)
    assert found == [["KeyboardInterrupt" if rank == who else "RankFailedError", 0, 1, 2] for rank in range(3)]
