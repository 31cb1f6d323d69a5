"""The work of ranks in the tests of the contract: functions that other processes import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.distributed.comm import rank_and_size
from shardckpt.errors import CheckpointingException
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.parallel.save import FullyParallelSaveStrategyWrapper
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract.shards import blank, check_shards, make_shards, make_tensor, whole_shard
from shardckpt.testing.memory import garbage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardckpt.testing.contract.subject import Subject

COMMON = {"step": 7, "nested": {"rates": [0.5, 2, None], "name": "run", "flag": True}}


def synchronize() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def save_layouts(
    subject: Subject, path: str, layouts: Sequence[str], dtypes: Sequence[torch.dtype], parallel: bool = False
) -> None:
    """Save a tensor in every layout and dtype, and common state."""
    rank, world = rank_and_size()
    saver = subject.make_saver()
    dist_checkpointing.save(
        {"tensors": make_shards(layouts, dtypes, rank, world), **COMMON},
        path,
        FullyParallelSaveStrategyWrapper(saver) if parallel else saver,
    )


def load_layouts(
    subject: Subject,
    path: str,
    layouts: Sequence[str],
    dtypes: Sequence[torch.dtype],
    shift: int,
    parallel: bool = False,
) -> None:
    """Load every tensor in another layout than it was saved in, and compare."""
    rank, world = rank_and_size()
    loader = subject.make_loader()
    wanted = blank(make_shards(layouts, dtypes, rank, world, shift))
    loaded = dist_checkpointing.load(
        {"tensors": wanted}, path, FullyParallelLoadStrategyWrapper(loader) if parallel else loader
    )
    check_shards(loaded["tensors"], make_shards(layouts, dtypes, rank, world, shift))
    check({key: loaded.get(key) for key in COMMON} == COMMON, f"rank {rank} loaded the common state {loaded!r:.300}")


def make_version(value: int, *, with_objects: bool) -> dict[str, Any]:
    """Return a rank's state dict whose values show a number: rows, a replica, a scalar, an object, common state."""
    rank, world = rank_and_size()
    rows = torch.full((4, 6), float(value)) + rank
    state = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world)),
        "replica": whole_shard("replica", torch.arange(50, dtype=torch.int32) + value, rank),
        "scalar": whole_shard("scalar", torch.tensor(float(value)), rank),
        "step": value,
    }
    if with_objects:
        state["object"] = ShardedObject("object", {"value": value, "rank": rank}, (world,), (rank,))
    return state


def load_version(subject: Subject, path: str) -> dict[str, Any]:
    """Load the state that :func:`make_version` describes into memory with other values."""
    state = make_version(-1, with_objects=False)
    if subject.with_objects:
        rank, world = rank_and_size()
        state["object"] = ShardedObject("object", None, (world,), (rank,))
    del state["step"]
    return subject.load(state, path)  # type: ignore[no-any-return]


def check_version(loaded: dict[str, Any], value: int) -> None:
    """Check that a loaded state dict has the values that :func:`make_version` makes for a number."""
    for key, expected in make_version(value, with_objects="object" in loaded).items():
        if isinstance(expected, ShardedTensor):
            check_same(loaded[key], expected.data, repr(key))  # type: ignore[arg-type]
        else:
            saved = expected.data if isinstance(expected, ShardedObject) else expected
            check(loaded.get(key) == saved, f"{key!r}: {loaded.get(key)!r} was loaded instead of {saved!r}")


def save_version(subject: Subject, path: str, value: int, **options: Any) -> None:
    """Save the state dict that :func:`make_version` makes for a number."""
    subject.save(make_version(value, with_objects=subject.with_objects), path, **options)


def load_and_check(subject: Subject, path: str, value: int) -> None:
    """Load and check the state that :func:`save_version` saved with as many ranks."""
    check_version(load_version(subject, path), value)


def spoil(state: dict[str, Any]) -> None:
    """Change tensors and objects, as a training does that goes on."""
    for shard in state.values():
        if isinstance(shard, ShardedTensor) and shard.data is not None:
            shard.data.copy_(garbage(shard.data.numel(), shard.dtype).view(shard.data.shape))
        elif isinstance(shard, ShardedObject) and isinstance(shard.data, dict):
            shard.data.clear()


def save_in_background(subject: Subject, paths: Sequence[str], persistent: bool, one_strategy: bool = True) -> None:
    """Save versions 1, 2, ... in the background, change each state right after the call, and check the saved values."""
    saver = subject.make_saver()
    with AsyncCallsQueue(persistent) as queue:
        for value, path in enumerate(paths, 1):
            state = make_version(value, with_objects=subject.with_objects)
            strategy = saver if one_strategy else subject.make_saver()
            queue.schedule_async_request(dist_checkpointing.save(state, path, strategy, async_sharded_save=True))
            spoil(state)
            if one_strategy:  # a plan of a finished save may be used again
                queue.maybe_finalize_async_calls(blocking=True)
    for value, path in enumerate(paths, 1):
        load_and_check(subject, path, value)


def save_replicas(subject: Subject, path: str) -> None:
    """Save a replica on each rank; only the main one, on a rank in the middle, has the values to store."""
    rank, world = rank_and_size()
    tensor = make_tensor("replica", torch.float32)
    main = rank == world // 2
    shard = whole_shard("replica", tensor if main else torch.full_like(tensor, -5.0), 0 if main else rank + 1)
    pair = whole_shard("pair", tensor if main else torch.full_like(tensor, -5.0))
    pair.replica_id = (0, 0) if main else (0, rank + 1)
    subject.save({"replica": shard, "pair": pair}, path)


def save_one_object(subject: Subject, path: str) -> None:
    """Save an object that all ranks have, and one of each rank."""
    rank, world = rank_and_size()
    everywhere = ShardedObject("everywhere", {"of": "all"}, (1,), (0,), replica_id=rank)
    own = ShardedObject("own", {"of": rank}, (world,), (rank,))
    subject.save({"everywhere": everywhere, "own": own}, path)


def load_one_object(subject: Subject, path: str, saved_by: int) -> None:
    """Load the objects of all ranks that saved, on every rank."""
    rank, _ = rank_and_size()
    state = {
        "everywhere": ShardedObject("everywhere", None, (1,), (0,), replica_id=rank),
        "own": [ShardedObject("own", None, (saved_by,), (n,), replica_id=rank) for n in range(saved_by)],
    }
    loaded = subject.load(state, path)
    check(loaded["everywhere"] == {"of": "all"}, f"the object of all ranks is {loaded['everywhere']!r}")
    check(loaded["own"] == [{"of": n} for n in range(saved_by)], f"the ranks' objects are {loaded['own']!r}")


def save_different_common(subject: Subject, path: str) -> None:
    """Save common state that differs between ranks."""
    rank, _ = rank_and_size()
    subject.save({"w": whole_shard("w", torch.ones(3), rank), "step": 100 + rank}, path)


def load_index(subject: Subject, path: str) -> list[tuple[Any, ...]]:
    """Return the index that this rank's load strategy reads."""
    with subject.registered():
        found = dist_checkpointing.load_sharded_metadata(path, subject.make_loader())
    return sorted((key, tuple(shard.global_shape), str(getattr(shard, "dtype", ""))) for key, shard in found.items())  # type: ignore[attr-defined]


def error_of(action: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str]:
    """Return class and text of the library's error that a call raises; ("", "") if there is none."""
    try:
        action(*args, **options)
    except CheckpointingException as exc:
        return type(exc).__name__, str(exc)
    return "", ""


def fail_at_fsync(subject: Subject, path: str, failing_rank: int) -> tuple[tuple[str, str], list[str]]:
    """Save while a disk of one rank fails; return the error, and the names next to the target."""
    rank, _ = rank_and_size()
    real = os.fsync
    synchronize()
    if rank == failing_rank:

        def broken(_fd: int) -> None:
            raise OSError(5, "Input/output error")

        os.fsync = broken  # type: ignore[assignment]
    try:
        found = error_of(save_version, subject, path, 2, overwrite=True)
    finally:
        os.fsync = real
    synchronize()
    left = sorted(entry.name for entry in Path(path).parent.iterdir())
    synchronize()
    save_version(subject, path, 3, overwrite=True)
    load_and_check(subject, path, 3)
    return found, left


def fail_to_load(subject: Subject, path: str, broken: str) -> tuple[str, str]:
    """Load from another directory on the last rank; return the error, which is the same on all ranks."""
    rank, world = rank_and_size()
    found = error_of(load_version, subject, broken if rank == world - 1 else path)
    load_and_check(subject, path, 1)  # the next load works: no rank was left in a collective
    return found


def save_with_slow_rank(subject: Subject, path: str, slow_rank: int) -> None:
    """Save while one rank takes long to write, and load at once."""
    rank, _ = rank_and_size()
    real = os.fsync
    if rank == slow_rank:

        def slow(fd: int) -> None:
            time.sleep(0.15)
            real(fd)

        os.fsync = slow  # type: ignore[assignment]
    try:
        save_version(subject, path, 4)
    finally:
        os.fsync = real
    load_and_check(subject, path, 4)


def save_in_subgroup(subject: Subject, path: str, ranks: list[int]) -> None:
    """Save and load with some of the ranks, while the others do something else."""
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        number = ranks.index(dist.get_rank())
        tensor = make_tensor("rows", torch.float32)
        shard = ShardedTensor.from_rank_offsets(
            "rows", tensor.chunk(len(ranks))[number].clone(), (0, number, len(ranks))
        )
        subject.save({"rows": shard, "step": 3}, path, process_group=group)
        wanted = whole_shard("rows", torch.zeros_like(tensor), number)
        loaded = subject.load({"rows": wanted}, path, process_group=group)
        check_same(loaded["rows"], tensor, "'rows'")
    dist.barrier()


def count_bytes_read(subject: Subject, path: str, tensor_bytes: int) -> int:
    """Load this rank's rows of a large tensor; return the bytes that the process has read for it."""
    rank, world = rank_and_size()
    rows = tensor_bytes // 1024 // world

    def load() -> None:
        shard = ShardedTensor.from_rank_offsets("large", torch.zeros(rows, 256), (0, rank, world))
        subject.load({"large": shard}, path)
        expected = make_tensor("large", torch.float32, (tensor_bytes // 1024, 256)).chunk(world)[rank]
        check_same(shard.data, expected, "'large'")  # type: ignore[arg-type]

    load()  # modules that are imported at the first load are not counted
    synchronize()
    before = bytes_read()
    load()
    return bytes_read() - before


def save_large(subject: Subject, path: str, tensor_bytes: int) -> None:
    """Save rows of a large tensor."""
    rank, world = rank_and_size()
    tensor = make_tensor("large", torch.float32, (tensor_bytes // 1024, 256))
    shard = ShardedTensor.from_rank_offsets("large", tensor.chunk(world)[rank].clone(), (0, rank, world))
    subject.save({"large": shard}, path)


def save_large_replicas(subject: Subject, path: str, tensor_bytes: int) -> None:
    """Save a large tensor that every rank has."""
    rank, _ = rank_and_size()
    subject.save(
        {"large": whole_shard("large", make_tensor("large", torch.float32, (tensor_bytes // 1024, 256)), rank)}, path
    )


def bytes_read() -> int:
    """Return how many bytes this process has read from files so far, from the page cache too; Linux only."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
