"""Ranks as threads: groups, collectives, messages, and the end of waits that cannot end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardckpt.distributed import Comm
from shardckpt.testing import RankError, RankThreads


@pytest.fixture
def ranks() -> RankThreads:
    """What these tests are about."""
    return RankThreads()


def test_each_rank_gets_what_all_have_brought(ranks: RankThreads) -> None:
    """The function runs on every rank of a group; results are in rank order."""

    def gather(values: list[str]) -> tuple[Any, ...]:
        comm = Comm()
        return comm.all_gather(values[comm.rank]), comm.largest(comm.rank), comm.all_to_all({0: b"to 0"})

    everyone = ["a", "b", "c"]
    assert ranks.run(3, gather, everyone) == [
        (everyone, [2], {0: b"to 0", 1: b"to 0", 2: b"to 0"}),
        (everyone, [2], {}),
        (everyone, [2], {}),
    ]


def test_arguments_are_copied_for_each_rank(ranks: RankThreads) -> None:
    """What a rank does to its arguments neither the others see nor the caller."""
    state = {"w": torch.zeros(1)}

    def fill(state: dict[str, torch.Tensor]) -> float:
        state["w"] += 1 + dist.get_rank()
        dist.barrier()
        return state["w"].item()

    assert ranks.run(2, fill, state) == [1, 2]
    assert state["w"].item() == 0


def test_subgroups_and_messages(ranks: RankThreads) -> None:
    """Subgroups have collectives of their own; messages come in the order in which they were sent."""

    def talk() -> tuple[list[int], list[float]]:
        rank = dist.get_rank()
        group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
        for value in (1.0, 2.0):
            dist.isend(torch.tensor([10 * rank + value]), (rank + 1) % 4)
        received = [torch.zeros(1), torch.zeros(1)]
        for tensor in received:
            dist.recv(tensor, (rank - 1) % 4)
        return Comm(group).all_gather(rank), [tensor.item() for tensor in received]

    assert ranks.run(4, talk) == [
        ([0, 2], [31, 32]),
        ([1, 3], [1, 2]),
        ([0, 2], [11, 12]),
        ([1, 3], [21, 22]),
    ]


def test_a_dtensor_is_sharded_over_ranks(ranks: RankThreads) -> None:
    """Meshes and DTensors work as they do between processes."""

    def shard() -> tuple[list[float], list[float]]:
        tensor = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        return tensor.to_local().tolist(), tensor.full_tensor().tolist()

    assert ranks.run(2, shard) == [([0, 1, 2], [0, 1, 2, 3, 4, 5]), ([3, 4, 5], [0, 1, 2, 3, 4, 5])]


def test_a_thread_of_a_rank_is_of_that_rank(ranks: RankThreads) -> None:
    """A save behind the training talks to the other ranks from a thread."""

    def gather_behind() -> list[Any]:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(Comm().all_gather(dist.get_rank())))
        thread.start()
        thread.join()
        return found

    assert ranks.run(2, gather_behind) == [[0, 1], [0, 1]]


def test_a_rank_that_never_comes_is_named_at_once(ranks: RankThreads) -> None:
    """A rank that has ended, or failed, ends the wait of the others, whatever they wait for."""

    def leave(wait: str) -> None:
        if dist.get_rank() == 1:
            if wait == "barrier":
                raise ValueError("of rank 1")
        elif wait == "message":
            dist.recv(torch.zeros(1), 1)
        else:
            dist.barrier()

    (waited, left), (received, _) = ranks.outcomes(2, leave, "barrier"), ranks.outcomes(2, leave, "message")
    assert (left.kind, left.message) == ("ValueError", "of rank 1")
    assert "rank 1 has raised ValueError, and rank 0 waits in Barrier" in waited.message
    assert "rank 1 has ended, and rank 0 waits for a message of rank 1" in received.message


def test_ranks_that_wait_for_each_other_are_named_at_once(ranks: RankThreads) -> None:
    """A job whose ranks all wait fails; no deadline passes."""

    def cross() -> None:
        dist.barrier() if dist.get_rank() else dist.recv(torch.zeros(1), 1)

    stuck = ranks.outcomes(2, cross)
    text = "no rank can go on; rank 0 waits for a message of rank 1; rank 1 waits in Barrier"
    assert {one.message for one in stuck} == {text}


def test_collectives_that_do_not_match_fail_on_all_ranks(ranks: RankThreads) -> None:
    """Other collectives, roots and operations are named; what comes after them fails, too, on every rank."""
    one = torch.ones(1)
    pairs = {
        "rank 1 calls Barrier, rank 0 Broadcast(src=0)": (lambda: dist.broadcast(one, 0), dist.barrier),
        "rank 1 calls Broadcast(src=1), rank 0 Broadcast(src=0)": (
            lambda: dist.broadcast(one, 0),
            lambda: dist.broadcast(one, 1),
        ),
        "rank 1 calls AllReduce(op=RedOpType.MAX), rank 0 AllReduce(op=RedOpType.SUM)": (
            lambda: dist.all_reduce(one),
            lambda: dist.all_reduce(one, dist.ReduceOp.MAX),
        ),
    }

    def differ(calls: Any) -> list[str]:
        said = []
        for call in (calls[dist.get_rank()], dist.barrier):
            with pytest.raises(RuntimeError) as raised:
                call()
            said.append(str(raised.value))
        return said

    for text, calls in pairs.items():
        assert ranks.run(2, differ, calls) == [[text] * 2] * 2


def test_a_run_that_cannot_end_says_what_ranks_do(ranks: RankThreads) -> None:
    """A rank that waits for another by itself keeps the turn; ranks in ranks and groups of none are refused."""
    came = threading.Event()

    def wait() -> None:
        came.wait() if dist.get_rank() else dist.barrier()

    with pytest.raises(
        RankError, match=r"ranks \[0, 1\] of 2 did not end within 0.2 s: rank 1 runs; rank 0 waits in Barrier"
    ):
        ranks.outcomes(2, wait, timeout=0.2)
    came.set()
    (nested,) = ranks.outcomes(1, RankThreads().run, 1, int)
    assert "cannot run ranks of its own" in nested.message
    with pytest.raises(ValueError, match="at least one rank"):
        ranks.run(0, int)


def test_the_process_has_its_own_groups_again(ranks: RankThreads) -> None:
    """After a run, and after one that failed, this process has no group, as before."""
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*ZeroDivisionError"):
        ranks.run(1, lambda: 1 // 0)
    assert not dist.is_initialized()
    assert threading.Thread.start.__qualname__ == "Thread.start"
