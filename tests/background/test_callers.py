from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from shardckpt.background import callers
from shardckpt.background.callers import PersistentAsyncCaller, TemporalAsyncCaller
from shardckpt.background.request import AsyncRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def test_two_callers_do_not_get_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one takes the process of warmup(), another one that needs a process at that moment gets its own."""

    class Process:
        """Another caller has a request when it is first looked at."""

        meanwhile: ClassVar[list[Callable[[], object]]] = []

        def __init__(self) -> None:
            self.requests = 0

        @property
        def alive(self) -> bool:
            while self.meanwhile:
                self.meanwhile.pop()()
            return True

        def submit(self, _: Any) -> Future[Any]:
            self.requests += 1
            return Future()

    monkeypatch.setattr(callers, "WorkerProcess", Process)
    monkeypatch.setattr(PersistentAsyncCaller, "_warm", None)
    first, second = PersistentAsyncCaller(), PersistentAsyncCaller()
    request = AsyncRequest(None, (), [])
    PersistentAsyncCaller.warmup()
    Process.meanwhile = [lambda: second.schedule_async_call(request)]
    first.schedule_async_call(request)
    workers = [cast("Process", caller._worker) for caller in (first, second)]
    assert [worker.requests for worker in workers] == [1, 1]
    assert workers[0] is not workers[1]


def _fail(_: torch.Tensor) -> None:
    raise OSError("the disk is on fire")


def test_a_failed_request_frees_its_tensors_with_its_error() -> None:
    """Who drops the error of a request that failed in a thread drops its tensors, too, without a garbage collection."""
    staged = torch.ones(3)
    watched = weakref.ref(staged)
    caller = TemporalAsyncCaller()
    gc.disable()
    try:
        future = caller.schedule_async_call(AsyncRequest(_fail, (staged,), []))
        del staged
        assert isinstance(future.exception(), OSError)
        caller.close()
        del future
        assert watched() is None
    finally:
        gc.enable()
