"""Export a checkpoint of any strategy as a Hugging Face folder: atomically, in bounded memory."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.commit import check_target, commit_staging, discard_staging
from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, Operation, locate, locate_local, open_checkpoint, open_staging
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.assets import list_assets
from shardckpt.huggingface.block_writer import BlockWriter
from shardckpt.huggingface.config import encode_config
from shardckpt.huggingface.dtypes import parse_dtype
from shardckpt.huggingface.folder import CONFIG, read_folder
from shardckpt.huggingface.header import lay_out
from shardckpt.huggingface.models import find_mapping
from shardckpt.huggingface.names import SAFETENSORS, check_format, index_name, is_weights, parse_size
from shardckpt.huggingface.planning import ExportOptions, ExportPlan, plan_export
from shardckpt.huggingface.small_file import copy_new, write_pickled
from shardckpt.planning import assign_holders
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import CheckpointWriter, is_there, replaced_error, retry_if_replaced, wrap_os_errors

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.engine import OpenCheckpoint
    from shardckpt.mapping import ShardedBase, ShardedTensor
    from shardckpt.plugins import KeyMapping
    from shardckpt.storage import Journal

    PathLike = str | os.PathLike[str]


class Exported(NamedTuple):
    """The weights that an export has written.

    Attributes:
        files: Name, number of tensors and bytes of tensors of each file.
        total_size: Bytes of all tensors.
    """

    files: tuple[tuple[str, int, int], ...]
    total_size: int


def export_to_huggingface(
    checkpoint_dir: PathLike,
    target: PathLike,
    *,
    prefix: str | None = None,
    mapping: str | KeyMapping | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    format: str = SAFETENSORS,  # noqa: A002 - what the user calls it
    assets: PathLike | None = None,
    leave_out: Collection[str] = (),
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
) -> Exported:
    """Collective: write a checkpoint's tensors as a Hugging Face folder; its bytes do not depend on the sharding.

    The folder has ``model.safetensors``, or ``model-00001-of-0000n.safetensors`` and ``model.safetensors.index.json``.
    Tensors are read and written in blocks: about 64 MiB of memory a rank at any size of tensors (``bin``: the largest
    file). Every rank writes full files, balanced by bytes, so more ranks than files do not help. The folder
    is complete at ``target`` when this returns; after an error, ``target`` has not changed.

    Objects, and tensors that the mapping leaves out, are not written; a warning names them.

    Example::

        export_to_huggingface("checkpoints/step-100", "Qwen3-30B-A3B", mapping="qwen3_moe", dtype="bfloat16")

    Args:
        checkpoint_dir: A checkpoint: a directory or a URL.
        target: The folder: a directory that all ranks see, absent or empty unless ``overwrite``.
        prefix: Prefix of the keys to export, which is removed; by default ``"model."`` if the checkpoint is of a model
            with its optimizers (``model.*`` and ``optimizer.*``), else none.
        mapping: How names and shapes change: the ``model_type`` of a model (``"qwen3_moe"``, ``"mixtral"``, or one that
            a plugin's ``shardckpt_key_mapping`` knows), a KeyMapping, or None for the same names.
        dtype: The dtype that floating-point tensors of 16 bits or more are cast to, except scales of 8-bit weights.
        max_shard_size: Bytes of tensors in a file, ``"5GB"`` (10^9) or ``"5GiB"``; a larger tensor gets its own file.
        format: ``safetensors`` or ``bin`` (for ``torch.load``).
        assets: A folder of the model's other files (config, tokenizer), which are copied. With ``dtype``, the folder's
            ``config.json`` has that dtype, in which transformers loads the weights.
        leave_out: Names in the folder that are not written: a ``lm_head.weight`` that is tied to the embedding.
        overwrite: Replace the weights of a folder in one step; its other files stay.
        process_group: The ranks that write; by default all, or this process alone without torch.distributed.

    Returns:
        The files that all ranks have written.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.local_phase("reading the arguments"):
        source, folder = locate(checkpoint_dir, get_plugin_manager()), locate_local(target, "export to")
        options = ExportOptions(
            prefix,
            find_mapping(mapping),
            parse_dtype(dtype),
            parse_size(max_shard_size),
            check_format(format),
            frozenset(leave_out),
        )
        copied = [] if assets is None else list_assets(assets)
    comm.agree(checkpoint_dir=str(source), target=str(folder))

    def attempt() -> ExportPlan:
        operation = Operation("export", folder, comm, get_plugin_manager())
        with operation.collective_span(), ExitStack() as stack:
            with operation.local_phase("opening the checkpoint"):
                checkpoint = stack.enter_context(
                    # alone: ranks read different tensors, and only the plan is common
                    open_checkpoint(source, Comm(alone=True), get_plugin_manager(), LoadOptions())
                )
                record = checkpoint.context.reader.manifest.record
                save_id = "" if record is None else record.self_digest  # another library's checkpoint has none
            with operation.local_phase("planning the export"):
                plan, planned_id = comm.main_runs(
                    "planning the export", lambda: (plan_export(checkpoint.index(), options, str(source)), save_id)
                )
                if planned_id != save_id:
                    raise replaced_error(source, "this rank has opened another save than the main rank")
            operation.start_progress(lambda: sum(t.nbytes for _, tensors in plan.files for t in tensors))
            operation.share_progress(checkpoint.operation)
            FolderExport(operation, folder, plan, checkpoint, copied, options.dtype, overwrite).run()
        return plan

    plan = retry_if_replaced(attempt, source)
    files = ((name, len(tensors), sum(tensor.nbytes for tensor in tensors)) for name, tensors in plan.files)
    return Exported(tuple(files), plan.total_size)


@dataclass(frozen=True)
class FolderExport:
    """An export between its plan and its commit; ``assets`` are files to copy, ``dtype`` is that of a cast.

    With a journal, one process writes, and another can go on after a kill. ``check`` gets the staging directory on the
    main rank before the commit; if it raises, nothing is committed.
    """

    operation: Operation
    target: Path
    plan: ExportPlan
    checkpoint: OpenCheckpoint
    assets: Sequence[Path]
    dtype: torch.dtype | None
    overwrite: bool
    journal: Journal | None = None
    check: Callable[[Path], None] | None = None

    def run(self) -> None:
        """Stage, write and commit."""
        comm, staging, config = self.operation.comm, Path(), None
        with ExitStack() as stack:
            with self.operation.local_phase("staging"):
                if comm.is_main:
                    check_target(self.target, overwrite=self.overwrite)
                    config = self._encode_config()
                    staging, _ = open_staging(self.target, _is_superseded, restore=self.overwrite, journal=self.journal)
                    stack.callback(_discard, staging, self.journal)
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

    def _write(self, staging: Path) -> None:
        """Write this rank's files."""
        comm = self.operation.comm
        everyone = tuple(range(comm.world_size))
        sizes = [sum(tensor.nbytes for tensor in tensors) for _, tensors in self.plan.files]
        writers = assign_holders([everyone] * len(sizes), sizes)
        mine = [file for file, rank in zip(self.plan.files, writers, strict=True) if rank == comm.rank]
        if self.plan.file_format != SAFETENSORS:
            for name, tensors in mine:
                values = {t.name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors}
                self._load([shard for t in tensors for shard in t.shards_for(t.full_box, values[t.name])])
                write_pickled(staging / name, values)
        elif mine:
            with BlockWriter(self._load, self.journal) as writer:
                for name, tensors in mine:
                    writer.write(staging / name, lay_out(tensors, {}))
        self.operation.set_nbytes(sum(size for size, rank in zip(sizes, writers, strict=True) if rank == comm.rank))

    def _load(self, wanted: Sequence[ShardedTensor]) -> None:
        if wanted:
            shards: list[ShardedBase] = list(wanted)
            self.checkpoint.values(shards)

    def _encode_config(self) -> bytes | None:
        """Return the text of ``config.json``; None if none is there, or weights keep their dtype."""
        # of a folder that exists, the file stays and the weights' dtype may change
        places = [*self.assets, self.target / CONFIG]
        source = next((path for path in places if path.name == CONFIG and is_there(path)), None)
        return None if source is None or self.dtype is None else encode_config(source, self.dtype)

    def _commit(self, staging: Path, config: bytes | None) -> None:
        """On the main rank, when all have written: add the index and the other files, and commit."""

        def list_replaced() -> set[str]:
            with wrap_os_errors("list", self.target):
                return {path.name for path in self.target.iterdir() if is_weights(path.name)}

        written = {} if config is None else {CONFIG: config}
        if len(self.plan.files) > 1:
            weight_map = {tensor.name: name for name, tensors in self.plan.files for tensor in tensors}
            # as transformers reads it
            index = {"metadata": {"total_size": self.plan.total_size}, "weight_map": dict(sorted(weight_map.items()))}
            text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
            written[index_name(self.plan.file_format)] = text.encode()
        with CheckpointWriter(staging, 0) as writer:
            for name, content in written.items():
                writer.write(name, content)
        for path in self.assets:
            if path.name not in written:
                copy_new(path, staging / path.name)
        if self.check is not None:  # before the journal's end: after a kill in the check another process goes on
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
        others = [path.name for path in aside.iterdir() if not is_weights(path.name)]
    except (CheckpointingException, OSError):
        return False
    return all(is_there(target / name) for name in others)
