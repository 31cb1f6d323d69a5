"""What a memory budget leaves for reading and writing, and what is refused because it is too small."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pytest
import torch
from obstore.store import MemoryStore

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.background.staging_buffer import StagingBufferPool
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.manager import CheckpointConfig
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import CheckpointWriter
from shardckpt.storage.memory_budget import (
    REQUEST_BYTES,
    find_least_upload,
    fit_parts,
    parse_size,
    plan_reading,
    plan_upload,
    plan_write_threads,
)
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

_MIB = 1 << 20


@table("budget", [8, 9, 16, 33, 64, 200, 1000, 10_000])
def test_what_reads_and_sends_fits(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads together, and all parts together, have no more than the budget; a large one has the usual speed."""
    monkeypatch.setenv(settings.IO_THREADS, "4")
    requests = plan_reading(budget * _MIB, by_requests=True)
    assert requests.threads * (3 * requests.request_bytes + 2 * _MIB) <= budget * _MIB
    assert plan_reading(budget * _MIB, by_requests=False).threads * 8 * _MIB <= budget * _MIB
    assert plan_write_threads(budget * _MIB) * 4 * _MIB <= budget * _MIB
    if budget >= 23:
        upload = plan_upload((budget - 8) * _MIB)
        assert upload.nbytes <= (budget - 8) * _MIB
        assert fit_parts((budget - 8) * _MIB, upload.part_bytes) == upload.parts
    if budget == 10_000:
        assert requests == (settings.remote_threads(), REQUEST_BYTES)
        assert upload == plan_upload(None)


def test_an_object_of_many_parts_needs_a_larger_budget() -> None:
    """Stores take 10,000 parts: of 100 GiB each is larger, and so is the least budget, which then fits."""
    least = find_least_upload(100 << 30)
    assert least > find_least_upload() == 23 * _MIB
    upload = plan_upload(least - 8 * _MIB, 100 << 30)
    assert upload.part_bytes * 9_000 >= 100 << 30
    assert upload.nbytes == least - 8 * _MIB


def _state(elements: int = 3) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(elements))}


def test_the_error_says_the_smallest_budget_that_works(tmp_path: Path) -> None:
    """Each door refuses a budget that is too small, or no size; the one that the error names works."""
    dc.save(_state(), tmp_path / "step", memory_budget="8MiB")
    export_to_huggingface(tmp_path / "step", tmp_path / "hf")
    doors: list[tuple[Any, str, str]] = [
        (
            lambda budget: dc.load(_state(), tmp_path / "step", memory_budget=budget),
            "8MiB",
            "to read a checkpoint takes",
        ),
        (
            lambda budget: dc.load(_state(), tmp_path / "step", fully_parallel=True, memory_budget=budget),
            "16MiB",
            "a fully parallel load takes",
        ),
        (
            lambda budget: load_from_huggingface(_state(), tmp_path / "hf", memory_budget=budget),
            "8MiB",
            "to read a checkpoint takes",
        ),
        (lambda budget: dc.save(_state(), tmp_path / "new", memory_budget=budget, overwrite=True), "8MiB", "a save to"),
        (
            lambda budget: dc.save(_state(), "memory://budget/new", memory_budget=budget, overwrite=True),
            "23MiB",
            "a save to memory://budget/new takes",
        ),
    ]
    for door, least, text in doors:
        with pytest.raises(CheckpointingException, match=rf"memory_budget of .* is too small.*{text}.* {least}"):
            door(int(least.removesuffix("MiB")) * _MIB - 1)
        with pytest.raises(CheckpointingException, match="memory_budget='much': expected a number of bytes"):
            door("much")
        door(least)
    with pytest.raises(CheckpointingException, match="memory_budget='much'"):
        CheckpointConfig(memory_budget="much")


def test_a_background_save_needs_room_for_the_copy(tmp_path: Path) -> None:
    """A budget without room for the copies is refused with what would do, and nothing is left; with room it saves."""
    with pytest.raises(CheckpointingException, match=r"at least 30MiB; or save in the foreground.*async_mode"):
        dc.save(_state(5 << 20), tmp_path / "step", async_sharded_save=True, memory_budget="29MiB")
    assert not [*tmp_path.iterdir()]
    request = dc.save(_state(5 << 20), tmp_path / "step", async_sharded_save=True, memory_budget="30MiB")
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    assert dc.load_plain_tensors(tmp_path / "step")["w"].numel() == 5 << 20


def test_no_more_copies_than_fit() -> None:
    """A save waits for the one before it where the budget has room for one copy, though the setting says two."""
    pool = StagingBufferPool()
    first = pool.acquire(1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.acquire, 1, 1)
        done, _ = wait([waiting], 0.1)
        assert not done
        pool.release(pool.acquire(1, 2))  # where there is room for two, nobody waits
        pool.release(first)
        pool.release(waiting.result(20))
    pool.clear()


def test_a_second_large_object_at_a_time_is_refused(tmp_path: Path) -> None:
    """The budget is for the parts of one object at a time; one that is finished makes room for the next."""
    store = ObstoreFolder("objects://bucket", MemoryStore(), "c")
    data = memoryview(bytes(17 * _MIB))
    with CheckpointWriter(tmp_path, 0, store=store, memory_budget=32 * _MIB) as writer:
        first = writer.create("a", data.nbytes)
        writer.write("small", b"beside it")
        with pytest.raises(CheckpointingException, match=r"'b' is sent together with 'a'.*thread_count=1"):
            writer.create("b", data.nbytes)
        first.append(data.nbytes, lambda: [data])
        writer.finish(first)
        third = writer.create("c", data.nbytes)
        third.append(data.nbytes, lambda: [data])
        writer.finish(third)


def test_sizes_that_no_machine_has_are_refused() -> None:
    """2^63 bytes and more, in digits or by a unit, are an error that names the argument."""
    for size in (2**63, 2**70, "2" + "0" * 400, "9" * 400 + "TiB", "8388608TiB"):
        with pytest.raises(CheckpointingException, match=r"budget=.* above 0 and below 2\^63"):
            parse_size(size, "budget")
    assert parse_size("4096 TiB") == 4096 << 40
