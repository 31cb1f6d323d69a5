"""A save that is planned and waits to be written: Megatron's AsyncRequest."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


class AsyncRequest(NamedTuple):
    """What is to be done before, behind and after the training: stage, write, finalize.

    Args:
        async_fn: Runs in a background thread or process; None for nothing to do there.
        async_fn_args: Its arguments; where there is a ``preload_fn``, its result takes the place of the second.
        finalize_fns: Run in the training process, in order, when ``async_fn`` has ended on all ranks.
        async_fn_kwargs: More arguments of ``async_fn``.
        preload_fn: Runs in the training process when the request is scheduled: copies what must not change.
        is_frozen: Whether finalize functions can no longer be added: set when it is scheduled.
        call_idx: Its number in the queue.
        written_fn: Gets the finished Future of ``async_fn``, in any thread, before the request counts as written.
        failed_fn: Runs in the training process in the place of the finalize functions, if any rank failed; gets the
            error.
        name: What it saves, for messages: the checkpoint's path.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - Megatron's field; nothing here changes it
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    written_fn: Callable[[Future[Any]], None] | None = None
    failed_fn: Callable[[BaseException], None] | None = None
    name: str = "a request"

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Run ``fn`` after the finalize functions that there are; ranks may add different ones."""
        if self.is_frozen:
            raise CheckpointingException("the request is scheduled already: add finalize functions before that")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same request, to which no finalize function can be added."""
        return self._replace(is_frozen=True)

    def staged(self) -> AsyncRequest:
        """The same request with its ``preload_fn`` run."""
        if self.preload_fn is None:
            return self
        if len(self.async_fn_args) < 2:  # noqa: PLR2004 - Megatron's convention: the second
            raise CheckpointingException("a request with a preload_fn needs a second argument, for its result")
        first, _, *rest = self.async_fn_args
        return self._replace(async_fn_args=(first, self.preload_fn(), *rest), preload_fn=None)

    def run(self) -> Any:
        """Call ``async_fn``, here and now."""
        return None if self.async_fn is None else self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_sync(self, process_group: ProcessGroup | None = None) -> None:
        """Stage, write and finalize without any background; all ranks call it.

        Args:
            process_group: The ranks; by default all, or this process alone without torch.distributed.

        Raises:
            CheckpointingException: the same on every rank.
        """
        future: Future[Any] = Future()
        try:
            request = self.staged()
            future.set_result(request.run())
        except BaseException as exc:  # noqa: BLE001 - raised on all ranks by finalize
            future.set_exception(exc)
        if self.written_fn is not None:
            self.written_fn(future)
        self.finalize(future, Comm(process_group))

    def finalize(self, future: Future[Any], comm: Comm) -> None:
        """Run the finalize functions, once ``async_fn`` has ended on all ranks.

        Ranks may have added different numbers of them, as Megatron's do: the first of all ranks run together, then the
        second of those that have one, and so on.

        Args:
            future: What this rank's ``async_fn`` came to.
            comm: The ranks.

        Raises:
            CheckpointingException: the same on every rank: some rank failed.
        """
        try:
            with comm.collective_phase("saving in the background"):
                if future.done():  # else another rank has failed, and this one's writing is in vain
                    future.result()
            (most,) = comm.largest(len(self.finalize_fns))
            for number in range(most):
                with comm.collective_phase("finalizing a background save"):
                    for fn in self.finalize_fns[number : number + 1]:
                        fn()
        except BaseException as exc:
            if self.failed_fn is not None:
                self.failed_fn(exc)
            raise


__all__ = ["AsyncRequest"]
