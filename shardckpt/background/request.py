"""A background save that is planned and not written yet: Megatron's AsyncRequest."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import replace_text
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup


@runtime_checkable
class RequestFields(Protocol):
    """The common fields of every library's request: Megatron's, nvidia-resiliency-ext's, ours."""

    @property
    def async_fn(self) -> Callable[..., Any] | None:
        """Writes in the background."""

    @property
    def async_fn_args(self) -> Sequence[Any]:
        """Its arguments."""

    @property
    def finalize_fns(self) -> list[Callable[[], Any]]:
        """Run in the training process afterwards."""


class AsyncRequest(NamedTuple):
    """The three steps of a background save: stage (copy), write, finalize.

    Args:
        async_fn: Writes, in a background thread or process; None if there is nothing to write.
        async_fn_args: Its arguments; if there is a ``preload_fn``, its result replaces the second.
        finalize_fns: Run in the training process, in order, when ``async_fn`` has ended on all ranks.
        async_fn_kwargs: Keyword arguments of ``async_fn``.
        preload_fn: Runs in the training process when the request is scheduled: copies the tensors.
        is_frozen: Whether no finalize function can be added: True once the request is scheduled.
        call_idx: The request's number in its queue, from 1.
        written_fn: Called with the finished Future of ``async_fn``, in any thread, before the request counts as
            written.
        failed_fn: Called with the error, in the training process, instead of the finalize functions, if any rank
            failed; returns the error to raise.
        name: The checkpoint's path, for messages.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - Megatron's field; nothing here changes it
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    written_fn: Callable[[Future[Any]], None] | None = None
    failed_fn: Callable[[BaseException], BaseException] | None = None
    name: str = "a request"

    @classmethod
    def of(cls, request: object) -> AsyncRequest:
        """Return a request of any library as one of ours.

        Args:
            request: An object with the fields ``async_fn``, ``async_fn_args`` and ``finalize_fns``, and perhaps
                ``async_fn_kwargs`` and ``preload_fn``.

        Raises:
            CheckpointingException: it lacks these fields; None, the result of a synchronous save, lacks them.
        """
        if isinstance(request, cls):
            return request
        if not isinstance(request, RequestFields):
            hint = " (a save returns a request only with async_sharded_save=True)" if request is None else ""
            raise CheckpointingException(
                f"{request!r} cannot be scheduled: a request has async_fn, async_fn_args and finalize_fns{hint}"
            )
        return cls(
            request.async_fn,
            tuple(request.async_fn_args),
            request.finalize_fns,
            dict(getattr(request, "async_fn_kwargs", None) or {}),
            getattr(request, "preload_fn", None),
            name=f"a request of {type(request).__module__}.{type(request).__qualname__}",
        )

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a finalize function after the present ones; ranks may add different ones.

        Args:
            fn: Called without arguments in the training process. A function that is collective must be added on all
                ranks, at the same position.

        Raises:
            CheckpointingException: the request is already scheduled.
        """
        if self.is_frozen:
            raise CheckpointingException("the request is already scheduled: add finalize functions before that")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which no finalize function can be added."""
        return self._replace(is_frozen=True)

    def staged(self) -> AsyncRequest:
        """Run the ``preload_fn``, and return the request with its result in ``async_fn_args``."""
        if self.preload_fn is None:
            return self
        if len(self.async_fn_args) < 2:  # noqa: PLR2004 - Megatron's convention: the second
            raise CheckpointingException("a request with a preload_fn needs a second argument, for its result")
        first, _, *rest = self.async_fn_args
        return self._replace(async_fn_args=(first, self.preload_fn(), *rest), preload_fn=None)

    def run(self) -> Any:
        """Call ``async_fn`` in this thread, and return its result."""
        return None if self.async_fn is None else self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_sync(self, process_group: ProcessGroup | None = None) -> None:
        """Collective: stage, write and finalize now, in this thread.

        Args:
            process_group: The ranks; by default all, or this process alone without torch.distributed.

        Raises:
            CheckpointingException: the same on every rank.
        """
        comm = Comm(process_group)  # first: a rank outside the group writes nothing
        written: Future[Any] = Future()
        try:
            written.set_result(self.staged().run())
        except BaseException as exc:  # noqa: BLE001 - finalize raises it on all ranks
            written.set_exception(exc)
        future: Future[Any] = Future()
        self.finish_writing(written, future)
        self.finalize(future, comm)

    def finish_writing(self, written: Future[Any], future: Future[Any]) -> None:
        """Run ``written_fn``, then set the outcome: that of ``async_fn``, or else the error of ``written_fn``.

        Args:
            written: The finished Future of ``async_fn``, which wakes its waiters before it calls callbacks.
            future: Gets the outcome, for :meth:`finalize`.
        """
        try:
            if self.written_fn is not None:
                self.written_fn(written)
            future.set_result(written.result())
        except BaseException as exc:  # noqa: BLE001 - finalize raises it on all ranks
            future.set_exception(written.exception() or exc)  # the first of two

    def finalize(self, future: Future[Any], comm: Comm) -> None:
        """Collective: run the finalize functions, once ``async_fn`` has ended on all ranks.

        Ranks may have different numbers of them, as with Megatron: the first functions of all ranks run together, then
        the second functions of all ranks that have one, and so on.

        Args:
            future: The outcome of this rank's ``async_fn``.
            comm: The ranks.

        Raises:
            CheckpointingException: the same on every rank: some rank failed.
        """
        is_committed = False
        try:
            with comm.collective_phase(_find_phase(future)):
                if future.done():  # not done: another rank has failed, and the files of this one are not needed
                    future.result()
            (most,) = comm.largest(len(self.finalize_fns))
            for number in range(most):
                with comm.collective_phase("finalizing a background save"):
                    if number < len(self.finalize_fns):  # a rank without one waits for the others
                        self.finalize_fns[number]()
                is_committed = self.failed_fn is not None  # the first function of our own requests commits
        except BaseException as exc:
            error = exc if self.failed_fn is None else self.failed_fn(exc)
            if is_committed and isinstance(error, CheckpointingException):
                after = f"the checkpoint {self.name} is committed: a finalize function that came after it failed"
                error = replace_text(error, f"{error}; {after}")
            if error is not exc:
                raise error from exc.__cause__
            raise


def _find_phase(future: Future[Any]) -> str:
    """Return the phase in which this rank's part failed; one name for all phases if that is not known."""
    error = future.exception() if future.done() and not future.cancelled() else None
    return getattr(error, "phase", "") or "saving in the background"
