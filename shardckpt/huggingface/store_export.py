"""The export of a checkpoint to a folder on a store: weights are streamed, and their index comes last."""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from shardckpt.commit.holds import hold_place
from shardckpt.commit.leftovers import create_spool
from shardckpt.commit.staging_names import new_save_id
from shardckpt.commit.upload import Upload, is_under_way
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.huggingface.blocks import open_writer, write_blocks
from shardckpt.huggingface.folder import CONFIG
from shardckpt.huggingface.folder_export import FolderExport
from shardckpt.huggingface.names import SAFETENSORS, is_weights
from shardckpt.manifest.names import MARKER_NAME
from shardckpt.plugins.stores import open_folder
from shardckpt.storage.abilities import find_ability, has_local_files
from shardckpt.storage.memory_budget import LEAST_WRITING, limit_uploads
from shardckpt.storage.remote import list_objects
from shardckpt.storage.store_abilities import StreamsWrites

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.storage.remote import RemoteFolder, RemotePath

logger = logging.getLogger(__name__)


class StoreExport(FolderExport):
    """An export to a URL; see the base.

    A store cannot exchange folders. So weights that are there are deleted first, and the index, or the only file, comes
    last: after a crash no folder is left that loads. ``check`` reads the complete folder; a folder that it refuses is
    deleted. A URL without files is taken as by a save: no other export begins there, and a prune finds the remains of a
    kill.
    """

    def run(self) -> None:
        """Make the place ready, write, and complete."""
        comm = self.operation.comm
        upload = Upload(self._store.folder, self._open_folder)
        written: list[str] = []
        try:
            with self.operation.local_phase("staging"):
                limit_uploads(self._store.folder, self.writing)
                if comm.is_main:
                    self._make_ready(upload)
            comm.sync_errors()
            with self.operation.local_phase("writing"):
                for name, tensors in self._choose_files():
                    written.append(name)
                    self._write_file(name, tensors)
                self.checkpoint.context.reader.check_unchanged()
            comm.sync_errors()
            with self.operation.local_phase("committing"):
                if comm.is_main:
                    written = [name for name, _ in self.plan.files]  # the other ranks have ended, and delete nothing
                    for name, content in self._encode_index().items():
                        written.append(name)
                        (self._store / name).write(content)
                    if self.check is not None:
                        self.check(self.target)
                    upload.release()
        except BaseException:
            if not upload.save_id:  # else the upload deletes all at the URL, unless another save has taken it
                self._delete(written)
            upload.abort(main=comm.is_main)
            raise

    @property
    def _store(self) -> RemotePath:
        return cast("RemotePath", self.target)  # find_export has seen that it is one

    def _make_ready(self, upload: Upload) -> None:
        """Take the URL, or delete the weights there that are to be replaced, and write the other files.

        Only the main rank does it. A URL with files of others is not taken: a prune would remove them with the rest.
        """
        found = list_objects(self._store.folder)
        is_shared = bool(found) and (MARKER_NAME in found or not is_under_way(self._store.refresh()))
        if is_shared and not self.overwrite:
            raise StorageError(
                f"{self.target} is not empty: give another URL, or pass overwrite=True (--overwrite) to replace weights"
            )
        config = self._adapt_config()
        if is_shared:
            with hold_place(self._store, self._open_folder):
                self._refuse_checkpoint()
                gone = self._choose_replaced(name for name in found if "/" not in name)
                gone -= {path.name for path in self.options.assets}
                # the index first: without it the other files are no folder
                for name in sorted(gone, key=lambda name: not (is_weights(name) and name.endswith(".json"))):
                    (self._store / name).delete()
        else:
            upload.begin(new_save_id(), overwrite=self.overwrite, journal=self.journal)
        if config is not None:
            (self._store / CONFIG).write(config)
        for path in self.options.assets:
            if path.name != CONFIG or config is None:
                (self._store / path.name).copy_from(path)

    def _write_file(self, name: str, tensors: Sequence[HubTensor]) -> None:
        """Send a file: tensors while they are read, if the store takes streams."""
        with _spool() as spool:
            if self.options.file_format == SAFETENSORS:
                store = find_ability(self._store, StreamsWrites)
                budget = self.writing if store is not None else LEAST_WRITING
                with open_writer(spool, self.journal, store, budget) as writer:
                    write_blocks(writer, name, self._lay_out(tensors), self.checkpoint)
                if store is not None:
                    return
            else:
                self._pickle(spool / name, tensors)
            (self._store / name).upload(spool / name)

    def _open_folder(self, url: str) -> RemoteFolder:
        return open_folder(url, self.operation.plugins)

    def _delete(self, names: Sequence[str]) -> None:
        """Delete files of an export that failed; raise nothing."""
        try:
            self._store.delete_all(names)
        except CheckpointingException as exc:
            logger.warning("files of a failed export may remain at %s: %s", self.target, exc)


def find_export(target: Path) -> type[FolderExport]:
    """Return the class of exports to a directory, or to a URL."""
    return FolderExport if has_local_files(target) else StoreExport


@contextmanager
def _spool() -> Iterator[Path]:
    """Return a context manager that gives a local directory for files to be uploaded."""
    spool = create_spool()
    try:
        yield spool
    finally:
        shutil.rmtree(spool, ignore_errors=True)
