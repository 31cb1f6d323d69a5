"""The export of a checkpoint to a folder of this machine: staged, written in blocks, and committed in one step."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt import __version__
from shardckpt.commit.commit import check_target, commit_staging, discard_staging
from shardckpt.engine.opening import OpenCheckpoint
from shardckpt.engine.pruning import open_staging
from shardckpt.engine.space import refuse_full
from shardckpt.errors import CheckpointingException, KeyMismatchError, listed
from shardckpt.huggingface.architecture import try_class
from shardckpt.huggingface.blocks import open_writer, write_blocks
from shardckpt.huggingface.config import adapt_config, find_config, find_tied
from shardckpt.huggingface.folder import CONFIG, CONFIG_LIMIT, read_folder, read_json
from shardckpt.huggingface.header import lay_out
from shardckpt.huggingface.hub_tensor import have_equal_values, read_hub_boxes
from shardckpt.huggingface.names import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    ORIGIN,
    SAFETENSORS,
    encode_weights_index,
    index_name,
    is_asset,
    is_replaced,
    is_weights,
)
from shardckpt.huggingface.small_file import copy_new, write_pickled
from shardckpt.manifest.names import MARKERS
from shardckpt.planning.boxes import Box
from shardckpt.planning.shard_copies import assign_holders
from shardckpt.storage.filesystem import is_there, wrap_os_errors
from shardckpt.storage.fingerprint_file import combine_fingerprints
from shardckpt.storage.sums import read_fingerprints
from shardckpt.storage.writer import CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardckpt.engine.operation import Operation
    from shardckpt.huggingface.header import FileLayout
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.huggingface.options import ExportOptions
    from shardckpt.huggingface.planning import ExportPlan
    from shardckpt.storage.journal import Journal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FolderExport:
    """An export between its plan and its commit.

    ``source`` is the checkpoint's place; None for a merge, which is at no place. With a journal, one process writes,
    and another can continue after a kill. ``check`` gets the staging directory on the main rank before the commit; if
    it raises, nothing is committed. ``writing`` is the most bytes that a block, and the parts of an object on its way
    to a store, may take; None: as the settings say.
    """

    operation: Operation
    source: Path | None
    target: Path
    plan: ExportPlan
    options: ExportOptions
    checkpoint: OpenCheckpoint
    overwrite: bool
    journal: Journal | None = None
    check: Callable[[Path], None] | None = None
    writing: int | None = None

    def run(self) -> None:
        """Stage, write and commit."""
        comm, staging, config = self.operation.comm, Path(), None
        with ExitStack() as stack:
            with self.operation.local_phase("staging"):
                if comm.is_main:
                    check_target(self.target, overwrite=self.overwrite)
                    self._refuse_checkpoint()
                    config = self._adapt_config()
                    staging, _ = open_staging(self.target, _is_superseded, restore=self.overwrite, journal=self.journal)
                    stack.callback(_discard, staging, self.journal)
                    written = 0 if self.journal is None else self.journal.nbytes
                    refuse_full(self.target, self.plan.total_size - written, f"{self.operation.kind} to")
            staging = comm.broadcast(staging)
            with self.operation.local_phase("writing"):
                self._write(staging)
                # before the commit: after it there is no way back
                self.checkpoint.context.reader.check_unchanged()
            # the commit needs the files of all ranks
            comm.sync_errors()
            with self.operation.local_phase("committing"):
                if comm.is_main:
                    self._commit(staging, config)

    def _choose_files(self) -> list[tuple[str, list[HubTensor]]]:
        """Return the files that this rank writes: all of them are balanced by bytes."""
        comm = self.operation.comm
        everyone = tuple(range(comm.world_size))
        sizes = [sum(tensor.nbytes for tensor in tensors) for _, tensors in self.plan.files]
        writers = assign_holders([everyone] * len(sizes), sizes)
        mine = [file for file, rank in zip(self.plan.files, writers, strict=True) if rank == comm.rank]
        self.operation.set_nbytes(sum(tensor.nbytes for _, tensors in mine for tensor in tensors))
        return mine

    def _write(self, staging: Path) -> None:
        """Write this rank's files."""
        mine = self._choose_files()
        if self.options.file_format != SAFETENSORS:
            for name, tensors in mine:
                self._pickle(staging / name, tensors)
        elif mine:
            with open_writer(staging, self.journal) as writer:
                for name, tensors in mine:
                    write_blocks(writer, name, self._lay_out(tensors), self.checkpoint)

    def _lay_out(self, tensors: Sequence[HubTensor]) -> FileLayout:
        """Return the layout of a file of weights; if it is the only one, its header has the index's metadata."""
        return lay_out(tensors, self._find_origin() if len(self.plan.files) == 1 else {})

    def _find_origin(self) -> dict[str, str]:
        """Return the metadata that identifies the checkpoint, with its fingerprint if its tensors have stored ones.

        Nothing of it depends on how the checkpoint was sharded.
        """
        fingerprint = source = ""
        if self.source is not None:
            fingerprint = combine_fingerprints(read_fingerprints(self.checkpoint.context.reader))
            source = self.source.name.encode(errors="replace").decode()  # a name in a file system may be no UTF-8
        rescue = self.checkpoint.rescue.add(self.checkpoint.damaged)
        origin = {"version": __version__, "source": source, "fingerprint": fingerprint}
        if rescue.total:
            origin |= {"rescued": str(rescue.total), "rescued_keys": json.dumps(rescue.keys)}
        return {f"{ORIGIN}{key}": value for key, value in origin.items() if value}

    def _pickle(self, path: Path, tensors: Sequence[HubTensor]) -> None:
        """Write a file for ``torch.load``, whose tensors are in memory as a whole."""
        values = read_hub_boxes([(tensor, Box.from_shape(tensor.shape)) for tensor in tensors], self.checkpoint)
        write_pickled(path, {tensor.name: value for tensor, value in zip(tensors, values, strict=True)})

    def _refuse_checkpoint(self) -> None:
        """Raise if the target is a checkpoint, some of whose files an export would replace."""
        for name in MARKERS:
            if is_there(self.target / name):
                raise CheckpointingException(
                    f"{self.target} is a checkpoint ({name} is there), which an export does not replace: give another "
                    "folder, or remove the checkpoint first (shardckpt remove)"
                )

    def _adapt_config(self) -> bytes | None:
        """Return the text of ``config.json``; None if there is none, or it describes the tensors already.

        It is an error if it has another vocabulary, or ties tensors that differ; so is an adapter without its own.
        """
        if ADAPTER_WEIGHTS in dict(self.plan.files):
            config_path = next((path for path in self.options.assets if path.name == ADAPTER), None)
            if config_path is None:
                raise CheckpointingException(
                    f"PEFT loads no adapter without {ADAPTER}: give the folder that has it (assets=, --assets); "
                    "peft_config['default'].save_pretrained(FOLDER) of the model writes it"
                )
            if (bias := read_json(config_path.resolve(), CONFIG_LIMIT).get("bias", "none")) != "none":
                logger.warning(
                    "%s gets no biases of the base model, which were trained, too (bias: %s): the checkpoint has them",
                    self.target,
                    bias,
                )
            return None
        config = find_config(self.options.assets, None if self.options.assets else self.target)
        if config is None:
            logger.warning(
                "%s gets no config.json, without which from_pretrained does not load it: give the folder of the model "
                "that has one (assets=, --assets)",
                self.target,
            )
            return None
        tied = find_tied(config, self.plan.tensors)
        if tied is not None:
            self._check_tied(*tied, config.source)
        return adapt_config(config, self.plan.tensors, add_dtype=bool(self.plan.planned.cast))

    def _check_tied(self, one: HubTensor, other: HubTensor, config: Path) -> None:
        """Raise if two tensors that the config says are one have other values."""
        # as stored, and not as read for the folder: a conversion counts each of these reads as written
        stored = OpenCheckpoint(self.checkpoint.strategy, self.checkpoint.context, self.checkpoint.operation)
        if not have_equal_values(one, other, stored):
            raise CheckpointingException(
                f"{config} says that the embedding and the output layer are one (tie_word_embeddings), and the "
                f"checkpoint has other values in {other.name!r} than in {one.name!r}: tools would take either. Leave "
                f"one out (leave_out=[{other.name!r}], --leave-out {other.name}), or give a config.json that does not "
                "tie them (assets=, --assets)"
            )

    def _report_misfits(self, staging: Path) -> None:
        """Warn of tensors that the class in ``config.json`` misses or does not know, if transformers can say.

        If it misses some, or has them in another shape, and the export is strict, that is a KeyMismatchError.
        """
        config = find_config([], staging) if self.options.file_format == SAFETENSORS else None
        if config is None:
            return
        fit = try_class(staging, config.content, {tensor.name: tensor.shape for tensor in self.plan.tensors})
        fault = fit.fault or fit.has_unknown * fit.said
        if fit.fault and self.options.strict:
            raise KeyMismatchError(
                f"{self.target} is not written: {fault}. Give the config.json of this model (assets)"
            )
        if fault:
            logger.warning("%s: %s (shardckpt verify says it, too)", self.target, fault)

    def _encode_index(self) -> dict[str, bytes]:
        """Return the index by its name; nothing if there is one file."""
        if len(self.plan.files) <= 1:
            return {}
        weight_map = {tensor.name: name for name, tensors in self.plan.files for tensor in tensors}
        index = encode_weights_index(weight_map, self.plan.total_size, self._find_origin())
        return {index_name(self.options.file_format): index}

    def _choose_replaced(self, names: Iterable[str]) -> set[str]:
        """Return the files that an overwrite of a folder removes, after a warning about foreign ones."""
        gone = {name for name in names if is_replaced(name, has_assets=bool(self.options.assets))}
        renewed = {path.name for path in self.options.assets}
        foreign = sorted(name for name in gone - renewed if not is_weights(name))
        if foreign:
            logger.warning("the export over %s removes files that no export wrote: %s", self.target, listed(foreign))
        return gone

    def _commit(self, staging: Path, config: bytes | None) -> None:
        """On the main rank, when all have written: add the index and the other files, and commit."""

        def list_replaced() -> set[str]:
            with wrap_os_errors("list", self.target):
                return self._choose_replaced(path.name for path in self.target.iterdir() if not path.is_dir())

        written = {} if config is None else {CONFIG: config}
        written |= self._encode_index()
        with CheckpointWriter(staging, 0) as writer:
            for name, content in written.items():
                writer.write(name, content)
        for path in self.options.assets:
            if path.name not in written:
                copy_new(path, staging / path.name)
        self._report_misfits(staging)
        if self.check is not None:  # before the journal's end: after a kill in the check another process continues
            self.check(staging)
        if self.journal is not None:
            self.journal.end()
        commit_staging(staging, self.target, list_replaced, overwrite=self.overwrite)


def _discard(staging: Path, journal: Journal | None) -> None:
    """Remove a staging directory unless it was committed."""
    if journal is not None:
        journal.close()
    if staging.exists():
        discard_staging(staging)


def _is_superseded(aside: Path, target: Path) -> bool:
    """Return whether a folder is complete, and has all files, except weights, of one that an export has moved aside."""
    try:
        read_folder(target)
        return all(is_there(target / path.name) for path in aside.iterdir() if is_asset(path.name))
    except (CheckpointingException, OSError):
        return False
