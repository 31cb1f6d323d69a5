"""A rank: holds a state, and does with it what the runner asks."""

from __future__ import annotations

import ctypes
import datetime as dt
import gc
import importlib
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.adapters import create
from benchmarks.adapters.base import Adapter, UnsupportedError
from benchmarks.messages import Sample
from benchmarks.state import State, shards, slices
from benchmarks.workloads import specs

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks.messages import Layout

#: Seconds that a rank waits in a collective.
_COLLECTIVE_TIMEOUT = 600.0


class WrongBytesError(Exception):
    """A load did not bring back what was saved."""


class Rank:
    """Its public methods are what the runner calls, on all ranks of a world at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._adapters: dict[str, Adapter] = {}
        self._whole: State | None = None
        self._slices: State | None = None

    def setup(self, layout: Layout, store: str) -> None:
        """Join a group, and fill memory."""
        self.leave()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // layout.world))
        timeout = dt.timedelta(seconds=_COLLECTIVE_TIMEOUT)
        dist.init_process_group("gloo", init_method=store, rank=self._rank, world_size=layout.world, timeout=timeout)
        tensors = specs(layout.workload, layout.scale)
        self._whole = State(shards(tensors, layout.axis, self._rank, layout.world))
        self._whole.fill()
        parts = slices(tensors, self._rank)
        self._slices = State(parts) if parts else None
        if self._slices is not None:
            self._slices.fill()

    def leave(self) -> None:
        """Leave the group, and free the memory."""
        for adapter in self._adapters.values():
            adapter.release()
        self._whole = self._slices = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def about(self, name: str) -> dict[str, Any]:
        """What the adapter says of itself."""
        adapter = self._adapter(name)
        return {"syncs": adapter.syncs, "version": adapter.version(), "maps_files": adapter.maps_files}

    def can(self, name: str, operation: str, world: int) -> bool:
        """Whether the adapter does an operation."""
        return self._adapter(name).can(operation, world)

    def save(self, name: str, path: str) -> Sample:
        """Time a save."""
        adapter, described = self._adapter(name), self._adapter(name).describe(self._state())
        return _timed(lambda: adapter.save(described, Path(path)))

    def load(self, name: str, path: str, *, sliced: bool = False) -> Sample:
        """Time a load into the memory that there is."""
        adapter, described = self._adapter(name), self._adapter(name).describe(self._state(sliced=sliced))
        return _timed(lambda: adapter.load(described, Path(path)))

    def check(self, name: str, path: str, *, sliced: bool = False) -> None:
        """Load into blanked memory, and compare every bit."""
        state = self._state(sliced=sliced)
        state.blank()
        try:
            self.load(name, path, sliced=sliced)
            faults = state.faults()
        finally:
            state.fill()
        if faults:
            shown = ", ".join(faults[:5])
            raise WrongBytesError(f"{name}: {len(faults)} tensors are not as they were saved: {shown}")

    def save_behind(self, name: str, path: str) -> Sample:
        """Time a background save: until the state may change, and until it is complete."""
        adapter, described = self._adapter(name), self._adapter(name).describe(self._state())
        return _timed(lambda: adapter.start(described, Path(path)), adapter.finish)

    def release(self, name: str) -> None:
        """Free what the adapter keeps."""
        self._adapter(name).release()
        gc.collect()

    def peak(self, name: str, operation: str, path: str) -> int:
        """Bytes by which this process is larger at the peak of a save or load than before it."""
        adapter, described = self._adapter(name), self._adapter(name).describe(self._state())
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
        before = _memory("VmRSS")
        getattr(adapter, operation)(described, Path(path))
        return _memory("VmHWM") - before

    def call(self, function: str, *args: Any) -> Any:
        """Call ``module:function`` here."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(*args)

    def _adapter(self, name: str) -> Adapter:
        if name not in self._adapters:
            self._adapters[name] = create(name)
        return self._adapters[name]

    def _state(self, *, sliced: bool = False) -> State:
        state = self._slices if sliced else self._whole
        if state is None:
            raise UnsupportedError("there is nothing of that kind in the workload")
        return state


def _timed(operation: Callable[[], None], ending: Callable[[], None] | None = None) -> Sample:
    dist.barrier()
    read = _bytes_read()
    start = time.monotonic()
    operation()
    blocked = time.monotonic()
    if ending is not None:
        ending()
    return Sample(start, blocked, time.monotonic(), _bytes_read() - read)


def _bytes_read() -> int:
    """What this process has had from read calls."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _memory(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def serve(number: int, pipe: Connection) -> None:
    """Answer jobs until the runner closes the pipe."""
    rank = Rank(number)
    pipe.send(os.getpid())
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(rank, method, args, kwargs))


def _answer(rank: Rank, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "done", getattr(rank, method)(*args, **kwargs)
    except UnsupportedError as exc:
        return "unsupported", str(exc)
    except BaseException:  # noqa: BLE001 - torch's CheckpointException is one; the runner tells
        return "failed", traceback.format_exc()


__all__ = ["Rank", "serve"]
