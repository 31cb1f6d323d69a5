"""The bytes that an earlier step takes, by which the next one is forecast."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.engine.space import EarlierSave, count_stored_bytes
from shardckpt.errors import CheckpointingException
from shardckpt.manifest.names import RECORD_NAME
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint
from shardckpt.storage.filesystem import find_size
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import LoadContext

if TYPE_CHECKING:
    from shardckpt.manager.steps import StepFolder


class StepSizes:
    """The size of a step of a folder, and how much of it is tensors; read once. Only the main rank asks."""

    def __init__(self, folder: StepFolder) -> None:
        self._folder = folder
        self._nbytes = 0
        self._known: EarlierSave | None = None

    def find_earlier(self, free: int) -> EarlierSave:
        """Return the sizes of the newest step that can be read; nothing if there is none, or much is free.

        ``free`` are the bytes that the folder may still take.
        """
        if self._known is None and (not self._nbytes or free < 2 * self._nbytes):
            for step in reversed(self._folder.steps()):
                with suppress(CheckpointingException):  # a forecast is no reason to fail
                    self._measure(step, free)
                    break
        return self._known or EarlierSave()

    def _measure(self, step: int, free: int) -> None:
        directory, plugins = self._folder.path(step), self._folder.plugins
        place, manifest = hold_checkpoint(directory, plugins)
        if manifest.record is None:
            return
        self._nbytes = sum(manifest.record.list_files().values()) + find_size(place / RECORD_NAME)
        if free >= 2 * self._nbytes:  # there is space for all that a step has besides its tensors: read no index for it
            return
        with CheckpointReader(place, manifest, verify=False) as reader:
            context = LoadContext(reader, Comm(alone=True))
            index = choose_reader(directory, manifest, plugins).load_index(context)
        self._known = EarlierSave(self._nbytes, count_stored_bytes(index))
