"""Open a folder or file of safetensors as a checkpoint of which everything is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.huggingface.folder import read_file_as_folder, read_folder
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import Identity

if TYPE_CHECKING:
    from shardckpt.huggingface.folder import Folder


def read_all_of_folder(place: Path, file: str = "") -> tuple[HuggingFaceLoadStrategy, Path]:
    """Return a strategy that reads every tensor of a folder under its own name, in its own dtype.

    Args:
        place: The folder.
        file: The only file to read, of any name; by default those of the folder's model.

    Returns:
        The strategy, and the directory that has the files.

    Raises:
        NotACheckpointError: ``place`` is not a Hugging Face folder of safetensors.
        CorruptCheckpointError: A file is missing or damaged, or has a dtype that this torch lacks.
    """
    found = read_file_as_folder(place, file) if file else read_folder(place)
    wanted = [_describe(name, found) for name in found.tensors]
    strategy = HuggingFaceLoadStrategy(found, Identity(), "", wanted)
    return strategy, Path(found.directory) if found.directory else place


def _describe(name: str, folder: Folder) -> ShardedTensor:
    file, tensor = folder.tensors[name]
    if tensor.dtype is None:
        raise CorruptCheckpointError(
            f"{name!r} in {file} has the dtype {tensor.kind}, which this release of torch lacks"
        )
    return ShardedTensor.from_global_shape(name, tensor.dtype, tensor.shape)
