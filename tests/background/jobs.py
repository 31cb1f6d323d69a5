"""What the ranks of a background save do; module-level, so that processes find it by name."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests import backends
from tests.states import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 8


def state(value: float) -> dict[str, Any]:
    """Tensors of several kinds, an object and common state, all of which say ``value``."""
    rank, world = rank_and_size()
    rows = torch.full((ROWS // world, 700), value)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", rows, (0, rank, world)),
        "transposed": ShardedTensor.from_rank_offsets("transposed", torch.full((3, 5), value).t(), replica_id=rank),
        "half": ShardedTensor.from_rank_offsets("half", torch.tensor(value, dtype=torch.bfloat16), replica_id=rank),
        "conj": ShardedTensor.from_rank_offsets(
            "conj", torch.full((4,), complex(value, value)).conj(), replica_id=rank
        ),
        "empty": ShardedTensor.from_rank_offsets("empty", torch.full((0, 3), value), replica_id=rank),
        "object": ShardedObject("object", {"value": value}, (world,), (rank,)),
        "iteration": int(value),
    }


def change(saved: dict[str, Any]) -> None:
    """What a training does next: every tensor and object gets other values."""
    for leaf in saved.values():
        if isinstance(leaf, ShardedTensor):
            leaf.data.zero_()
        if isinstance(leaf, ShardedObject):
            leaf.data["value"] = None


def check(path: str, value: float) -> None:
    """The checkpoint says ``value`` everywhere."""
    wanted = state(-1.0)
    loaded = dc.load(wanted, path)
    for key, expected in state(value).items():
        if isinstance(expected, ShardedTensor):
            assert torch.equal(loaded[key], expected.data.resolve_conj()), key
    assert loaded["object"] == {"value": value}
    assert loaded["iteration"] == int(value)


def one_save(path: str, persistent: bool) -> None:
    """Save, change everything, finalize, check."""
    with AsyncCallsQueue(persistent) as queue:
        saved = state(3.0)
        request = dc.save(saved, path, async_sharded_save=True)
        assert isinstance(request, AsyncRequest)
        assert queue.schedule_async_request(request) == 1
        change(saved)
        assert not Path(path).exists()
        assert queue.get_num_unfinalized_calls() == 1
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        assert queue.get_num_unfinalized_calls() == 0
    check(path, 3.0)


def several_saves(folder: str, persistent: bool) -> None:
    """Schedule five saves without waiting; they are finalized in order, each with its own content."""
    ended: list[int] = []
    with AsyncCallsQueue(persistent) as queue:
        saved = state(0.0)
        for step in range(1, 6):
            for leaf in saved.values():
                if isinstance(leaf, ShardedTensor):
                    leaf.data.fill_(complex(step, -step) if leaf.data.is_complex() else step)
            saved["object"].data = {"value": float(step)}
            saved["iteration"] = step
            request = dc.save(saved, f"{folder}/step-{step}", async_sharded_save=True)
            assert request is not None
            request.add_finalize_fn(lambda step=step: ended.append(step))
            queue.schedule_async_request(request)
    assert ended == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        check(f"{folder}/step-{step}", float(step))


def polled_save(path: str, persistent: bool) -> int:
    """Poll as a training loop does, without blocking; how often it took."""
    with AsyncCallsQueue(persistent) as queue:
        request = dc.save(state(4.0), path, async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        polls = 1
        while not queue.maybe_finalize_async_calls():
            polls += 1
            time.sleep(0.002)
    check(path, 4.0)
    return polls


def _error_of(action: Callable[..., Any], **options: Any) -> str:
    """The text of an error of the family, or nothing."""
    try:
        action(**options)
    except dc.CheckpointingException as exc:
        return str(exc)
    return ""


def _get_out_of_step() -> AsyncCallsQueue:
    """A queue that has had one request more on rank 1 than on the others."""
    queue = AsyncCallsQueue()
    if rank_and_size()[0] == 1:
        queue.schedule_async_request(AsyncRequest(None, (), []))
        wait([queue._calls[0].future])
        queue._calls.clear()
    return queue


def worker_dies(path: str, victim: int) -> str:
    """The process of one rank is killed while it should write; the error of all, and the next save works."""
    rank, _ = rank_and_size()
    queue = AsyncCallsQueue(persistent=True)
    queue.warmup_persistent_caller(rank)
    request = dc.save(state(1.0), path, async_sharded_save=True)
    assert request is not None
    if rank == victim:
        request = request._replace(async_fn=die, async_fn_args=("ignored", None))
    queue.schedule_async_request(request)
    message = _error_of(queue.maybe_finalize_async_calls, blocking=True)
    dist.barrier()
    assert not list(Path(path).parent.iterdir())
    request = dc.save(state(2.0), path, async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.close()
    check(path, 2.0)
    return message


def die(*_: Any) -> None:
    """Stands for a worker that the kernel ends: out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fails_on_one_rank(path: str, persistent: bool, victim: int) -> str:
    """One rank cannot write; the error of all."""
    rank, _ = rank_and_size()
    with AsyncCallsQueue(persistent) as queue:
        request = dc.save(state(1.0), path, async_sharded_save=True)
        assert request is not None
        if rank == victim:
            job, _ = request.async_fn_args
            in_the_way = job.staging / backends.data_file(rank)
            in_the_way.write_bytes(b"in the way")
        queue.schedule_async_request(request)
        return _error_of(queue.maybe_finalize_async_calls, blocking=True)


def out_of_step(path: str) -> str:
    """One rank has scheduled a request that the others have not."""
    queue = _get_out_of_step()
    request = dc.save(state(1.0), path, async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    message = _error_of(queue.maybe_finalize_async_calls, blocking=True)
    queue.close(abort=True)
    return message


def sleeping(seconds: float, _: Any = None) -> float:
    """A slow writer."""
    time.sleep(seconds)
    return seconds


def waits_at_most() -> None:
    """A slow rank: others wait with it, and no longer than they are told to."""
    rank, _ = rank_and_size()
    done: list[int] = []
    written = threading.Event()
    queue = AsyncCallsQueue()
    write = (lambda: written.wait(30)) if rank == 1 else None
    queue.schedule_async_request(AsyncRequest(write, (), [lambda: done.append(1)]))
    assert queue.maybe_finalize_async_calls() == []
    assert queue.maybe_finalize_async_calls(blocking=True, timeout=0.3) == []
    assert not done
    written.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert done == [1]
    queue.close()


def slower_than_the_group(persistent: bool) -> list[int]:
    """A writer that takes longer than the process group's timeout."""
    rank, _ = rank_and_size()
    _set_pg_timeout(dt.timedelta(seconds=4), dist.group.WORLD)  # less to wait for than the pool's groups have
    with AsyncCallsQueue(persistent) as queue:
        queue.schedule_async_request(AsyncRequest(sleeping, (6.0 if rank else 0.0, None), []))
        return queue.maybe_finalize_async_calls(blocking=True)


def finalized_as_megatron_does(path: str) -> list[str]:
    """Rank 0 adds a function that tells of the checkpoint, the last rank two that log it; which ones have run."""
    rank, world = rank_and_size()
    ran: list[str] = []
    request = dc.save(state(1.0), path, async_sharded_save=True)
    assert request is not None
    if rank == 0:
        request.add_finalize_fn(lambda: ran.append("tracker"))
    if rank == world - 1:
        request.add_finalize_fn(lambda: ran.append("one logger"))
        request.add_finalize_fn(lambda: ran.append("other logger"))
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(request)
    assert Path(path).exists()
    return ran


def closed_out_of_step() -> str:
    """Ranks that are at different requests close their queues."""
    queue = _get_out_of_step()
    for _ in range(2):
        queue.schedule_async_request(AsyncRequest(None, (), []))
    message = _error_of(queue.close)
    assert queue.get_num_unfinalized_calls() == 0
    return message


def left_by_an_error(path: str) -> None:
    """The training fails on one rank, which leaves its queue; the others learn of it when they finalize."""
    rank, _ = rank_and_size()
    group = dist.new_group(timeout=dt.timedelta(seconds=3))  # less to wait for than the pool's groups have
    try:
        with AsyncCallsQueue(process_group=group) as queue:
            request = dc.save(state(1.0), path, async_sharded_save=True, process_group=group)
            assert request is not None
            queue.schedule_async_request(request)
            if rank == 0:
                raise KeyError("training")
    except KeyError:
        return
    except dc.CheckpointingException:
        return


def in_another_order(folder: str) -> str:
    """One rank schedules two saves in the other order; the error of all, and no checkpoint."""
    rank, _ = rank_and_size()
    requests = [dc.save(state(value), f"{folder}/{value}", async_sharded_save=True) for value in (1.0, 2.0)]
    queue = AsyncCallsQueue()
    for request in requests if rank == 0 else reversed(requests):
        assert request is not None
        queue.schedule_async_request(request)
    return _error_of(queue.close)


def one_rank_fails_while_another_writes() -> tuple[str, bool]:
    """A rank's request fails at once, another's writes until it hears: the error, and whether it had written."""
    rank, _ = rank_and_size()
    heard = threading.Event()
    action = failing if rank == 0 else lambda *_: heard.wait(30)
    queue = AsyncCallsQueue()
    written: list[Any] = []
    queue.schedule_async_request(AsyncRequest(action, (None, None), [], written_fn=written.append))
    message = _error_of(queue.maybe_finalize_async_calls, blocking=True)
    had_written = bool(written)
    heard.set()
    queue.close()
    return message, had_written


def failing(*_: Any) -> None:
    """A writer that fails at once."""
    raise OSError("no space")
