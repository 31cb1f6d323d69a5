"""Writes the steps' checkpoints, in the foreground or behind the training, and has old ones removed afterwards."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.distributed import Comm
from shardckpt.engine import locate
from shardckpt.manager.config import AsyncMode
from shardckpt.manifest import MARKER_NAME
from shardckpt.plugins import host
from shardckpt.storage import RemotePath, delete_checkpoint, on_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.mapping import ShardedStateDict

logger = logging.getLogger(__name__)


class StepWriter:
    """Saves, at most one of them behind the training at a time.

    Args:
        config: Which strategy, and who writes.
        process_group: The ranks.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save`.
        committed: Called on every rank when a checkpoint is durable.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
        committed: Callable[[], None],
    ) -> None:
        self._strategy = config.strategy
        self._group = process_group
        self._allow_globals = tuple(allow_globals)
        self._committed = committed
        self._queue: AsyncCallsQueue | None = None
        if config.async_mode is not AsyncMode.DISABLED:
            persistent = config.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM
            self._queue = AsyncCallsQueue(persistent, process_group)
            if persistent:
                AsyncCallsQueue.warmup_persistent_caller()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is on its way; the same on every rank."""
        return self._queue is not None and bool(self._queue.get_num_unfinalized_calls())

    def write(self, state: ShardedStateDict, target: str, content: dict[str, Any], *, background: bool) -> None:
        """Save; in the background, if that is wanted and there is one.

        Args:
            state: Described; its tensors may change when this returns.
            target: The checkpoint, which is replaced if it is there: a directory in one step, what is at a URL is
                removed before.
            content: Its ``content_metadata``: the main rank's is stored, the others' may differ (their metrics).
            background: Whether to return when the tensors are copied.

        Raises:
            CheckpointingException: the same on every rank; nothing has changed at ``target``.
        """
        comm = Comm(self._group)
        with comm.local_phase("looking at the target"):
            place = locate(target, host())
        if (remote := on_store(place)) is not None:
            comm.main_runs("making room on the store", functools.partial(_make_room, remote))
        queue = self._queue if background else None
        request = dist_checkpointing.save(
            state,
            target,
            self._strategy,
            async_sharded_save=queue is not None,
            content_metadata=content,
            overwrite=True,
            preprocess_common_before_consistency_check=_without_content,
            allow_globals=self._allow_globals,
            process_group=self._group,
        )
        if queue is None or request is None:
            self._committed()
            return
        request.add_finalize_fn(self._committed)
        queue.schedule_async_request(request)

    def advance(self, *, blocking: bool = False) -> None:
        """Commit what all ranks have written; ``blocking`` waits for that.

        Raises:
            CheckpointingException: the same on every rank: it could not be written, and is absent.
        """
        if self._queue is not None and self.busy:
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self) -> None:
        """Commit what is on its way, and end the background."""
        if self._queue is not None:
            self._queue.close()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the background after an error of the training: what ranks would have to agree upon is given up."""
        if self._queue is not None:
            self._queue.__exit__(kind, error, trace)


def _without_content(common: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in common.items() if key != "content_metadata"}


def _make_room(place: RemotePath) -> None:
    """Remove a checkpoint that a run has left which was given up: no step changes several objects at once."""
    if (place / MARKER_NAME).is_file():
        logger.warning("%s is saved anew: what is there is removed first", place)
        delete_checkpoint(place.folder)


__all__ = ["StepWriter"]
