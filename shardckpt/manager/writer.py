"""Writes the steps' checkpoints, in the foreground or in the background."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from shardckpt.async_save import AsyncCallsQueue
from shardckpt.background.saving import request_save
from shardckpt.commit.commit import check_target
from shardckpt.commit.holds import hold_place
from shardckpt.commit.removal import remove_checkpoint
from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate
from shardckpt.engine.saving import SaveOptions, save_checkpoint
from shardckpt.engine.space import UNLIMITED
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, StorageError
from shardckpt.manager.config import AsyncMode
from shardckpt.manager.part import ManagerPart
from shardckpt.manifest.names import MARKER_NAME
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.plugins.stores import open_folder
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.memory_budget import parse_memory_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.engine.operation import Operation
    from shardckpt.engine.space import Room
    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.steps import StepFolder
    from shardckpt.manifest.names import Lineage
    from shardckpt.mapping.base import ShardedStateDict
    from shardckpt.strategy import SaveStrategy

logger = logging.getLogger(__name__)


class StepWriter(ManagerPart):
    """Saves checkpoints by a strategy, at most one at a time in the background."""

    def __init__(
        self,
        config: CheckpointConfig,
        process_group: ProcessGroup | None,
        allow_globals: Iterable[Any],
        strategy: SaveStrategy | str | tuple[str, int] | None,
    ) -> None:
        self._strategy = strategy
        self._group = process_group
        self._allow_globals = tuple(allow_globals)
        self._fingerprints = config.fingerprints
        self._memory_budget = parse_memory_budget(config.memory_budget)
        self._queue: AsyncCallsQueue | None = None
        if config.async_mode is not AsyncMode.DISABLED:
            persistent = config.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM
            self._queue = AsyncCallsQueue(persistent, process_group)
            if persistent:
                AsyncCallsQueue.warmup_persistent_caller()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written or not yet committed; the same on every rank."""
        return self._queue is not None and bool(self._queue.get_num_unfinalized_calls())

    def write(
        self,
        state: ShardedStateDict,
        target: str,
        content: dict[str, Any],
        lineage: Lineage,
        on_commit: Callable[[], None],
        *,
        background: bool,
        before: Callable[[Operation], None] = lambda _: None,
        room: Room = UNLIMITED,
    ) -> None:
        """Collective: save, in the background if ``background`` is True and the configuration has an async mode.

        The caller may change the tensors as soon as this returns. An existing checkpoint at ``target``, a directory or
        URL, is replaced in one step; if this fails, also because a lease or a pin holds the step, it is unchanged, and
        the error is the same on every rank. The main rank's ``content`` is stored as ``content_metadata``; others may
        differ (in their metrics). ``lineage`` names the checkpoint from which the training was resumed, and the step.
        ``before`` is a function that each rank calls first, in phases of the operation that it gets; ``room`` has the
        limits of the space of the save. ``on_commit`` is called on every rank when the checkpoint is durable.
        """
        comm = Comm(self._group)
        with comm.local_phase("finding the target"):
            path = locate(target, plugins := get_plugin_manager())
        options = SaveOptions(
            overwrite=True,
            content_metadata=content,
            preprocess_common=_without_content,
            allow_globals=self._allow_globals,
            lineage=lineage,
            fingerprints=self._fingerprints,
            memory_budget=self._memory_budget,
            before=before,
            room=room,
        )
        if self._queue is None or not background:
            save_checkpoint(state, path, self._strategy, comm, plugins, options)
            on_commit()
            return
        request = request_save(state, path, self._strategy, comm, plugins, options)
        request.add_finalize_fn(on_commit)
        self._queue.schedule_async_request(request)

    def advance(self, *, blocking: bool = False) -> None:
        """Collective: commit a checkpoint that all ranks have written; if ``blocking``, wait until they have.

        An error says that the checkpoint could not be written, and does not exist.
        """
        if self._queue is not None and self.busy:
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self, error: BaseException | None = None) -> None:
        """Collective: commit the checkpoint that is being written, and end the background thread or process.

        After an error that ended the training, a commit that needs other ranks is given up.
        """
        if self._queue is not None:
            self._queue.__exit__(None if error is None else type(error), error, None)


def _without_content(common: dict[str, Any]) -> dict[str, Any]:
    # Metrics differ from rank to rank: a comparison of the common state across ranks must not fail because of them.
    return {key: value for key, value in common.items() if key != "content_metadata"}


def free_step(folder: StepFolder, step: int) -> None:
    """Prepare an existing step for its replacement by a save: raise if a lease or a pin holds it; warn of damage.

    At a URL, a step without a sound record is deleted: no save replaces it, since nothing says which files it has.
    """
    path, is_local = folder.path(step), has_local_files(folder.place)
    if is_local:
        check_target(folder.place / folder.names.name(step), overwrite=True)  # a link's folder has the holds
    elif not (path / MARKER_NAME).is_file():
        return
    if fault := folder.find_fault(step):
        logger.warning("step %d is %s, and is replaced by this save", step, fault)
    if not is_local and not _has_record(path):
        _delete_unrecorded(path)


def _has_record(path: Path) -> bool:
    """Return whether a step at a URL has a sound record of its files."""
    try:
        return read_manifest(path, get_plugin_manager()).record is not None
    except (CheckpointReplacedError, StorageError):  # it is being written, or the store does not answer
        raise
    except CheckpointingException:  # it is damaged; the caller has warned of that
        return False


def _delete_unrecorded(path: Path) -> None:
    with hold_place(path, functools.partial(open_folder, plugins=get_plugin_manager())):
        logger.warning("%s is saved a second time: the checkpoint without a record there is deleted first", path)
        remove_checkpoint(path)
