"""What an engine would trip over in a folder whose files are sound: configuration, tied pairs, other files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.huggingface.adapters import review_adapter
from shardckpt.huggingface.architecture import try_class
from shardckpt.huggingface.config import ModelConfig, describe_contradiction, describe_dtype, find_tied
from shardckpt.huggingface.engines import review_files
from shardckpt.huggingface.folder import CONFIG
from shardckpt.huggingface.hub_tensor import have_equal_values, take_whole
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.names import ADAPTER, ADAPTER_WEIGHTS, SAFETENSORS, index_name
from shardckpt.storage import has_local_files, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardckpt.engine import OpenCheckpoint


class Review(NamedTuple):
    """What was found.

    Attributes:
        fault: Why the configuration and the weights are not of one model; None if they are.
        note: What is no fault and may surprise.
        file: The file of the configuration; ``""`` if there is none.
    """

    fault: CorruptCheckpointError | None
    note: str
    file: str


def review_others(place: Path, weights: Collection[str]) -> dict[str, str]:
    """Return, by file, what engines make of files that they would load beside a folder's weights."""
    with wrap_os_errors("list", place):
        names = {path.name for path in place.iterdir()}
    return (
        {} if ADAPTER_WEIGHTS in weights else review_files(names, weights if index_name(SAFETENSORS) in names else ())
    )


def review_folder(place: Path, checkpoint: OpenCheckpoint) -> Review:
    """Compare a folder's configuration with its weights.

    Args:
        place: The folder.
        checkpoint: The same, opened: of tied pairs values are read.

    Raises:
        CheckpointingException: It cannot be read.
    """
    strategy = checkpoint.strategy
    if not isinstance(strategy, HuggingFaceLoadStrategy):
        raise TypeError(f"{place} was opened by {type(strategy).__name__}")
    folder = strategy.folder
    if folder.adapter is not None:
        found, note = review_adapter(folder.adapter, {name: tensor for name, (_, tensor) in folder.tensors.items()})
        return Review(CorruptCheckpointError(found) if found else None, note, ADAPTER)
    if not folder.config:
        return Review(None, "", "")
    config = ModelConfig(place / CONFIG, folder.config)
    tensors = [take_whole(n, t.dtype, t.shape) for n, (_, t) in folder.tensors.items() if t.dtype is not None]
    faults = [describe_contradiction(config, tensors)]
    pair = find_tied(config, tensors)
    if pair is not None and not have_equal_values(*pair, checkpoint):
        faults.append(
            f"it says that {pair[0].name!r} and {pair[1].name!r} are one (tie_word_embeddings), and their values "
            "differ: engines take either"
        )
    said = [describe_dtype(config, tensors)]
    if has_local_files(place):
        fit = try_class(place, folder.config, {name: t.shape for name, (_, t) in folder.tensors.items()})
        faults.append(fit.fault)
        said.append(fit.said)
    found = "; ".join(filter(None, faults))
    return Review(CorruptCheckpointError(found) if found else None, "; ".join(filter(None, said)), CONFIG)
