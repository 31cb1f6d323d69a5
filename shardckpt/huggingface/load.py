"""Loading weights from a Hugging Face folder into shards of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.engine import LoadTemplate, OpenCheckpoint, Operation, load_checkpoint, locate
from shardckpt.errors import KeyMismatchError, listed
from shardckpt.huggingface.folder import Folder, check_same, read_folder
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.models import find_mapping
from shardckpt.manifest import Manifest
from shardckpt.plugins import host
from shardckpt.storage import CheckpointReader, open_directory, retry_if_replaced
from shardckpt.strategy import LoadContext
from shardckpt.validation import StrictHandling

if TYPE_CHECKING:
    import os

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict
    from shardckpt.plugins import KeyMapping

_MODES = {True: StrictHandling.RAISE_UNEXPECTED, False: StrictHandling.LOG_UNEXPECTED}


def load_from_huggingface(
    sharded_state_dict: ShardedStateDict,
    folder: str | os.PathLike[str],
    *,
    mapping: str | KeyMapping | None = None,
    prefix: str = "",
    strict: bool = True,
    validate_access_integrity: bool = True,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Fill shards of any layout from a Hugging Face folder; only the bytes that are wanted are read.

    Floating-point values are cast to the dtype that is wanted. 8-bit weights with block scales
    (``weight_scale_inv``) become what they stand for, unless they are wanted in 8 bits.

    Args:
        sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.load`, of tensors: describe a model by
            ``shardckpt.adapters.to_sharded_state_dict(model)``.
        folder: The folder (``model.safetensors``, or several files and ``model.safetensors.index.json``), a snapshot
            in the Hugging Face cache, or a URL of such.
        mapping: How the folder's names and shapes become the keys: as for :func:`export_to_huggingface`.
        prefix: What the keys begin with and the folder's names do not.
        strict: Whether the folder must have all that is wanted; else what it lacks stays as it is, and is not in the
            result, with a log entry that names it. (A weight that shares its memory with one that is there is not
            lacking: it is tied.)
        validate_access_integrity: Check that the shards of all ranks cover every tensor exactly once.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.

    Returns:
        The state dict, its tensors filled; tensors of the folder that no shard wants are left out.

    Raises:
        NotACheckpointError: it is no such folder.
        CheckpointReplacedError: exports replaced it in every attempt.
        KeyMismatchError: a wanted tensor is not in it.
        ShapeMismatchError: it has another shape there.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.local_phase("reading the arguments"):
        names = find_mapping(mapping)

    def attempt() -> Any:
        with comm.local_phase("reading the arguments"):
            path = locate(folder, host())
        operation = Operation("load", path, comm, host())
        with operation.collective_span():
            with operation.local_phase("opening the folder"):
                place = open_directory(path)
            with operation.local_phase("reading the headers"):
                found = comm.main_runs("reading the headers", lambda: read_folder(place))
            with operation.local_phase("preparing the state dict"):
                check_same(place, found)
                strategy = HuggingFaceLoadStrategy(found, names, prefix, LoadTemplate(sharded_state_dict).shards)
                if strict:
                    _refuse_missing(strategy, path)
            with _reader(place, found) as reader:
                checkpoint = OpenCheckpoint(strategy, LoadContext(reader, comm), operation)
                loaded, _ = load_checkpoint(
                    sharded_state_dict, checkpoint, validate=validate_access_integrity, strict=_MODES[strict]
                )
                reader.check_unchanged()
        return loaded

    return retry_if_replaced(attempt, folder)


def huggingface_index(folder: str | os.PathLike[str]) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
    """Dtype and shape of every tensor in a Hugging Face folder, by name; only headers are read.

    Args:
        folder: As for :func:`load_from_huggingface`. The dtype is None where this torch has none such.

    Raises:
        CheckpointingException: as for :func:`load_from_huggingface`.
    """
    found = retry_if_replaced(lambda: read_folder(open_directory(locate(folder, host()))), folder)
    tensors = found.tensors
    return {name: (place.tensor.dtype, place.tensor.shape) for name, place in tensors.items()}


def _refuse_missing(strategy: HuggingFaceLoadStrategy, path: Path) -> None:
    """Name what is missing as the folder would call it."""
    missing = strategy.missing()
    if missing:
        raise KeyMismatchError(
            f"{path} lacks {listed([*map(repr, missing)])}, which the wanted tensors need; see "
            "huggingface_index(folder) for what it has, and mapping= and prefix= for names that differ"
        )


def _reader(path: Path, found: Folder) -> CheckpointReader:
    """Reads the folder's files; there are no digests to check."""
    manifest = Manifest(backend=HuggingFaceLoadStrategy.backend, version=HuggingFaceLoadStrategy.version)
    return CheckpointReader(Path(found.directory) if found.directory else path, manifest)


__all__ = ["huggingface_index", "load_from_huggingface"]
