"""Find faults that an engine would meet in a folder whose files are sound: configuration, tied pairs, other files."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.huggingface.adapters import review_adapter
from shardckpt.huggingface.architecture import try_class
from shardckpt.huggingface.config import ModelConfig, describe_contradiction, describe_dtype, find_tied
from shardckpt.huggingface.folder import CONFIG
from shardckpt.huggingface.hub_tensor import describe_stored, have_equal_values
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.names import ADAPTER, ADAPTER_WEIGHTS, SAFETENSORS, file_names, index_name
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.filesystem import wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint

#: Mistral's own layout, which vLLM takes instead of the Hub's where such a file is there.
_MISTRAL = "consolidated*.safetensors"


class Review(NamedTuple):
    """The findings.

    ``fault`` says why the configuration and the weights are not of one model; None if they are. ``note`` has remarks
    that are no fault and may surprise. ``file`` is the configuration's name; ``""`` if there is none.
    """

    fault: CorruptCheckpointError | None
    note: str
    file: str


def review_others(place: Path, weights: Collection[str]) -> dict[str, str]:
    """Return, by file, how engines treat files that they would load with a folder's weights."""
    with wrap_os_errors("list", place):
        names = {path.name for path in place.iterdir()}
    if ADAPTER_WEIGHTS in weights:
        return {}
    index, only = index_name(SAFETENSORS), file_names(1, SAFETENSORS)[0]
    indexed = set(weights) if index in names else set()
    # ``modeling_utils._get_resolved_checkpoint_files`` of transformers: ``model.safetensors`` goes before the index
    model = {only} if only in names else indexed
    # ``DefaultModelLoader._prepare_weights`` and ``filter_duplicate_safetensors_files`` of SGLang, and of vLLM unless
    # Mistral's are there: all that an index, if any, names
    tensors = {name for name in names if name.endswith(".safetensors")}
    notes = {}
    for name in sorted(names - model):
        if fnmatchcase(name, _MISTRAL):
            notes[name] = "vLLM loads this, Mistral's layout, in the place of the Hub's weights"
        elif name in (tensors & indexed if indexed else tensors):
            notes[name] = "vLLM and SGLang load it, too; transformers does not"
        elif name == ADAPTER:
            notes[name] = "transformers (with peft) adds this adapter to the weights"
        elif name in tensors and not name.startswith("adapter_model"):
            notes[name] = f"no engine loads it: {index} does not name it"
    if only in names and indexed and only not in indexed:
        notes[index] = "transformers loads model.safetensors, vLLM and SGLang the files that this index names"
    return notes


def review_folder(place: Path, checkpoint: OpenCheckpoint) -> Review:
    """Compare a folder's configuration with its weights; of tied pairs values are read, by ``checkpoint``."""
    strategy = checkpoint.strategy
    if not isinstance(strategy, HuggingFaceLoadStrategy):
        raise TypeError(f"{place} was opened by {type(strategy).__name__}")
    folder = strategy.folder
    if folder.adapter is not None:
        found, note = review_adapter(folder.adapter, folder.tensors)
        return Review(CorruptCheckpointError(found) if found else None, note, ADAPTER)
    if not folder.config:
        return Review(None, "", "")
    config = ModelConfig(place / CONFIG, folder.config)
    tensors = [describe_stored(n, t.dtype, t.shape) for n, t in folder.tensors.items() if t.dtype is not None]
    faults = [describe_contradiction(config, tensors)]
    pair = find_tied(config, tensors)
    if pair is not None and not have_equal_values(*pair, checkpoint):
        faults.append(
            f"it says that {pair[0].name!r} and {pair[1].name!r} are one (tie_word_embeddings), and their values "
            "differ: engines take either"
        )
    said = [describe_dtype(config, tensors)]
    if has_local_files(place):
        fit = try_class(place, folder.config, {name: tensor.shape for name, tensor in folder.tensors.items()})
        faults.append(fit.fault)
        said.append(fit.said)
    found = "; ".join(filter(None, faults))
    return Review(CorruptCheckpointError(found) if found else None, "; ".join(filter(None, said)), CONFIG)
