"""Export a checkpoint of any strategy as a Hugging Face folder: atomically, in bounded memory."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, Operation, clear_leftovers, locate, locate_local, open_checkpoint
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.blocks import BlockWriter
from shardckpt.huggingface.dtypes import parse_dtype
from shardckpt.huggingface.folder import read_folder
from shardckpt.huggingface.models import find_mapping
from shardckpt.huggingface.names import SAFETENSORS, check_format, index_name, is_asset, is_weights, parse_size
from shardckpt.huggingface.planning import ExportOptions, ExportPlan, plan_export
from shardckpt.huggingface.safetensors_file import SafetensorsFile
from shardckpt.huggingface.small_file import copy_new, write_new, write_pickled
from shardckpt.planning import assign_holders
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import (
    check_target,
    commit_staging,
    is_there,
    naming,
    replaced_error,
    retry_if_replaced,
    staging_directory,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.engine import OpenCheckpoint
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.mapping import ShardedBase, ShardedTensor
    from shardckpt.plugins import KeyMapping

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
        assets: A folder of the model's other files (config, tokenizer), which are copied.
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
        extra = [] if assets is None else _assets(Path(assets))
    comm.agree(checkpoint_dir=str(source), target=str(folder))

    def attempt() -> ExportPlan:
        operation = Operation("export", folder, comm, get_plugin_manager())
        with operation.collective_span(), ExitStack() as stack:
            with operation.local_phase("opening the checkpoint"):
                checkpoint = stack.enter_context(
                    open_checkpoint(source, Comm(alone=True), get_plugin_manager(), LoadOptions())
                )
                mine = _save_of(checkpoint)
            with operation.local_phase("planning the export"):
                plan, save = comm.main_runs(
                    "planning the export", lambda: (plan_export(checkpoint.index(), options, str(source)), mine)
                )
                if save != mine:
                    raise replaced_error(source, "this rank has opened another save than the main rank")
            _Export(operation, folder, plan, checkpoint, overwrite=overwrite).run(extra)
        return plan

    plan = retry_if_replaced(attempt, source)
    files = ((name, len(tensors), sum(tensor.nbytes for tensor in tensors)) for name, tensors in plan.files)
    return Exported(tuple(files), plan.total_size)


class _Export:
    """An export between its plan and its commit."""

    def __init__(
        self, operation: Operation, target: Path, plan: ExportPlan, checkpoint: OpenCheckpoint, *, overwrite: bool
    ) -> None:
        self._operation = operation
        self._comm = operation.comm
        self._target = target
        self._plan = plan
        self._checkpoint = checkpoint
        self._overwrite = overwrite

    def run(self, extra: Sequence[Path]) -> None:
        """Stage, write and commit; ``extra`` are files to copy."""
        staging = Path()
        with ExitStack() as stack:
            with self._operation.local_phase("staging"):
                if self._comm.is_main:
                    check_target(self._target, overwrite=self._overwrite)
                    clear_leftovers(self._target, _is_superseded, restore=self._overwrite)
                    staging = stack.enter_context(staging_directory(self._target))
            staging = self._comm.broadcast(staging)
            with self._operation.local_phase("writing"):
                self._write(staging)
                self._checkpoint.context.reader.check_unchanged()  # before the commit: after it there is no way back
            self._comm.sync_errors()  # all have written
            with self._operation.local_phase("committing"):
                if self._comm.is_main:
                    self._finish(staging, extra)

    def _write(self, staging: Path) -> None:
        """Write this rank's files."""
        everyone = tuple(range(self._comm.world_size))
        sizes = [sum(tensor.nbytes for tensor in tensors) for _, tensors in self._plan.files]
        writers = assign_holders([everyone] * len(sizes), sizes)
        mine = [file for file, rank in zip(self._plan.files, writers, strict=True) if rank == self._comm.rank]
        if self._plan.file_format != SAFETENSORS:
            for name, tensors in mine:
                write_pickled(staging / name, self._load_tensors(tensors))
        elif mine:
            with BlockWriter() as writer:
                for name, tensors in mine:
                    file = SafetensorsFile(tensors, self._load)
                    writer.write(staging / name, file.size, file.fill)
        self._operation.wrote(sum(size for size, rank in zip(sizes, writers, strict=True) if rank == self._comm.rank))

    def _load_tensors(self, tensors: Sequence[HubTensor]) -> dict[str, torch.Tensor]:
        """Load the tensors of a file into memory."""
        values = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors}
        self._load([shard for tensor in tensors for shard in tensor.shards_for(tensor.full_box, values[tensor.name])])
        return values

    def _load(self, wanted: Sequence[ShardedTensor]) -> None:
        if wanted:
            shards: list[ShardedBase] = list(wanted)
            self._checkpoint.values(shards)

    def _finish(self, staging: Path, extra: Sequence[Path]) -> None:
        """On the main rank, when all have written: the index, the other files, and the commit."""
        if len(self._plan.files) > 1:
            write_new(staging / index_name(self._plan.file_format), _index_json(self._plan))
        for path in extra:
            copy_new(path, staging / path.name)
        commit_staging(staging, self._target, lambda: _list_weights(self._target), overwrite=self._overwrite)


def _list_weights(folder: Path) -> set[str]:
    """Names of the files that an export replaces."""
    with naming("list", folder):
        return {path.name for path in folder.iterdir() if is_weights(path.name)}


def _save_of(checkpoint: OpenCheckpoint) -> str:
    """Return the id of the save that wrote the checkpoint; ``""`` for another library's."""
    record = checkpoint.context.reader.manifest.record
    return "" if record is None else record.self_digest


def _index_json(plan: ExportPlan) -> bytes:
    """Return the index, which maps tensors to files, as transformers reads it."""
    weight_map = {tensor.name: name for name, tensors in plan.files for tensor in tensors}
    content = {"metadata": {"total_size": plan.total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _is_superseded(aside: Path, target: Path) -> bool:
    """Return whether a folder is complete, and has all files, except weights, of one that an export has moved aside."""
    try:
        read_folder(target)
        others = [path.name for path in aside.iterdir() if not is_weights(path.name)]
    except (CheckpointingException, OSError):
        return False
    return all(is_there(target / name) for name in others)


def _assets(folder: Path) -> list[Path]:
    """Return the files of a model's folder that are not weights."""
    with naming("list", folder):
        found = [path for path in sorted(folder.iterdir()) if path.is_file() and is_asset(path.name)]
    if not found:
        raise CheckpointingException(f"assets={folder}: it has no files other than weights")
    return found


__all__ = ["Exported", "export_to_huggingface"]
