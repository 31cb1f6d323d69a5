"""The export of a checkpoint to a folder on a store: its weights are streamed, and what makes them a folder is last."""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

from shardckpt.commit import create_spool, hold_place
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.huggingface.blocks import open_writer, write_blocks
from shardckpt.huggingface.folder import CONFIG
from shardckpt.huggingface.folder_export import FolderExport
from shardckpt.huggingface.names import SAFETENSORS, is_weights
from shardckpt.plugins import open_folder
from shardckpt.storage import (
    CheckpointWriter,
    StreamsWrites,
    has_local_files,
    limit_uploads,
    list_objects,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.storage import RemotePath

logger = logging.getLogger(__name__)


class StoreExport(FolderExport):
    """An export to a URL; see the base.

    A store cannot exchange folders. So weights that are there are deleted first, and the index, or the only file, comes
    last: what a crash leaves is no folder that loads. ``check`` reads the complete folder; what it refuses is deleted.
    """

    def run(self) -> None:
        """Make the place ready, write, and complete."""
        comm = self.operation.comm
        with self.operation.local_phase("staging"):
            limit_uploads(self._store.folder, self.writing)
            if comm.is_main:
                self._make_ready()
        comm.sync_errors()
        written: list[str] = []
        try:
            with self.operation.local_phase("writing"):
                for name, tensors in self._choose_files():
                    written.append(name)
                    self._write_file(name, tensors)
                self.checkpoint.context.reader.check_unchanged()
            comm.sync_errors()
            with self.operation.local_phase("committing"):
                if comm.is_main:
                    for name, content in self._encode_index().items():
                        written.append(name)
                        (self._store / name).write(content)
                    if self.check is not None:
                        self.check(self.target)
        except BaseException:
            self._delete(written)
            raise

    @property
    def _store(self) -> RemotePath:
        return cast("RemotePath", self.target)  # find_export has seen that it is one

    def _make_ready(self) -> None:
        """Delete the weights that are to be replaced, and write the other files; on the main rank."""
        found = list_objects(self._store.folder)
        if found and not self.overwrite:
            raise StorageError(
                f"{self.target} is not empty: give another URL, or pass overwrite=True (--overwrite) to replace weights"
            )
        config = self._adapt_config()
        with hold_place(self._store, partial(open_folder, plugins=self.operation.plugins)) if found else nullcontext():
            self._refuse_checkpoint()
            gone = self._choose_replaced(name for name in found if "/" not in name)
            gone -= {path.name for path in self.options.assets}
            # the index first: without it the other files are no folder
            for name in sorted(gone, key=lambda name: not (is_weights(name) and name.endswith(".json"))):
                (self._store / name).delete()
        if config is not None:
            (self._store / CONFIG).write(config)
        for path in self.options.assets:
            if path.name != CONFIG or config is None:
                (self._store / path.name).copy_from(path)

    def _write_file(self, name: str, tensors: Sequence[HubTensor]) -> None:
        """Send a file: tensors while they are read, if the store takes streams."""
        folder = self._store.folder
        if self.plan.file_format == SAFETENSORS and isinstance(folder, StreamsWrites):
            with CheckpointWriter(self.target, 0, store=folder, memory_budget=self.writing) as writer:
                write_blocks(writer, name, self._lay_out(tensors), self.checkpoint)
            return
        with _spool() as spool:
            if self.plan.file_format == SAFETENSORS:
                with open_writer(spool) as writer:
                    write_blocks(writer, name, self._lay_out(tensors), self.checkpoint)
            else:
                self._pickle(spool / name, tensors)
            (self._store / name).upload(spool / name)

    def _delete(self, names: Sequence[str]) -> None:
        """Delete what this rank has written of an export that failed; raise nothing."""
        try:
            self._store.delete_all(names)
        except CheckpointingException as exc:
            logger.warning("files of a failed export may remain at %s: %s", self.target, exc)


def find_export(target: Path) -> type[FolderExport]:
    """Return the class of exports to a directory, or to a URL."""
    return FolderExport if has_local_files(target) else StoreExport


@contextmanager
def _spool() -> Iterator[Path]:
    """Return a context manager that gives a local directory for a file that is uploaded when it is complete."""
    spool = create_spool()
    try:
        yield spool
    finally:
        shutil.rmtree(spool, ignore_errors=True)
