"""File names of a Hugging Face folder: which tensors go into which file, and which files are weights."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from shardckpt.manifest.hub import HUB_ADAPTER, HUB_ADAPTER_CONFIG, HUB_FILES, HUB_WEIGHTS, TRAINER_STATE, lacks_weights
from shardckpt.manifest.names import FINGERPRINTS_NAME, INTEGRITY_NAME, MARKERS, RECORD_NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SAFETENSORS = "safetensors"
BIN = "bin"

#: Stem and suffix of each format's files.
_STEMS = {SAFETENSORS: (HUB_WEIGHTS.removesuffix(".safetensors"), ".safetensors"), BIN: ("pytorch_model", ".bin")}
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
#: Of several files of safetensors, which an index lists.
_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")
#: The file that makes transformers put old adapters onto the new weights.
ADAPTER = HUB_ADAPTER_CONFIG
#: The weights that it describes; with these alone a folder is PEFT's, of an adapter and no model.
ADAPTER_WEIGHTS = HUB_ADAPTER
#: Weights that transformers, vLLM or SGLang load of a folder: all ``*.safetensors``, Mistral's, PyTorch's, Keras' and
#: Flax's; and adapters.
_LOADED = re.compile(
    r"[^.].*\.safetensors|[^.].*\.index\.json|(pytorch_model|consolidated).*|(tf_model|flax_model)\..*|adapter_(config|model)\..*"
)
#: The files that they read in addition to weights: configurations, and the tokenizer.
_CONFIGURING = re.compile(
    r"([^.].*_)?config\.json|(tokenizer|chat_template|vocab|special_tokens|added_tokens|merges|params|tekken)[^/]*|[^.].*\.(model|tiktoken)"
)
#: Suffixes of weights in any format.
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".index.json", ".pt", ".pth", ".ckpt", ".distcp"),
    *(".h5", ".msgpack", ".gguf", ".onnx"),
)
#: Files of checkpoints: a Hub folder with them would be read as a checkpoint, whose other files are missing.
_OF_CHECKPOINTS = frozenset({*MARKERS, RECORD_NAME, INTEGRITY_NAME, FINGERPRINTS_NAME})
#: The prefix of metadata keys that say which checkpoint a folder has.
ORIGIN = "shardckpt_"


def is_hub_folder(names: Collection[str]) -> bool:
    """Return whether names are of a folder of the Hub's layout; it may have lost its index, or its weights."""
    return not HUB_FILES.isdisjoint(names) or has_numbered_files(names) or lacks_weights(names)


def has_numbered_files(names: Collection[str]) -> bool:
    """Return whether some of the files are of several, which an index lists."""
    return any(map(_NUMBERED.fullmatch, names))


def list_numbered_files(names: Collection[str]) -> list[str]:
    """Return the numbered files, in order, if all that their names count exist; else none."""
    numbered = sorted(filter(_NUMBERED.fullmatch, names))
    return numbered if numbered == list(file_names(len(numbered), SAFETENSORS)) else []


def assign_files(sizes: Mapping[str, int], limit: int, file_format: str = SAFETENSORS) -> dict[str, list[str]]:
    """Assign tensors to files in their order; return the names of the tensors in each file, by the file's name.

    ``sizes`` are bytes of every tensor by name, ``limit`` the bytes of the tensors in a file; a tensor above it gets
    its own.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes.items():
        if nbytes > limit:
            files.append([name])
            continue
        if current and filled + nbytes > limit:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    if current:
        files.append(current)
    return dict(zip(file_names(len(files), file_format), files, strict=True))


def file_names(count: int, file_format: str) -> list[str]:
    """Return the names of ``count`` files of weights: one has a plain name, several are numbered from 1."""
    stem, suffix = _STEMS[file_format]
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_name(file_format: str) -> str:
    """Return the name of the index, which maps tensors to files if there are several."""
    stem, suffix = _STEMS[file_format]
    return f"{stem}{suffix}.index.json"


def encode_weights_index(weight_map: Mapping[str, str], total: int, origin: Mapping[str, str] | None = None) -> bytes:
    """Return the content of the index, as transformers reads it.

    ``origin`` is the metadata about the checkpoint in the folder.
    """
    index = {"metadata": {"total_size": total, **(origin or {})}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def parse_leave_out(names: Collection[str]) -> frozenset[str]:
    """Return the names that a caller leaves out; one with a dot at its end is the name without it."""
    return frozenset(name.removesuffix(".") for name in names)


def is_weights(name: str) -> bool:
    """Return whether an export, of any format, may have written a file of this name."""
    return _WEIGHTS.fullmatch(name) is not None


def is_configuration(name: str) -> bool:
    """Return whether a file of this name configures a model or its tokenizer: if it is of JSON, it is one object."""
    return _CONFIGURING.fullmatch(name) is not None


def is_asset(name: str) -> bool:
    """Return whether a file of this name belongs to a model but is not weights: its config, its tokenizer.

    ``trainer_state.json`` belongs to a training, whose metrics were measured of other weights, or with its optimizer.
    """
    return is_copied(name) and name not in (TRAINER_STATE, ADAPTER) and not name.startswith(".")


def is_copied(name: str) -> bool:
    """Return whether a file of this name may be copied next to weights: it is neither weights nor of a checkpoint."""
    return not name.lower().endswith(_WEIGHT_SUFFIXES) and name not in _OF_CHECKPOINTS


def is_replaced(name: str, *, has_assets: bool) -> bool:
    """Return whether an export over a folder removes a file of this name: a loader might prefer it, or add it.

    ``has_assets`` says whether the export brings the model's other files. Else the folder's own files stay.
    """
    return _LOADED.fullmatch(name) is not None or (has_assets and is_configuration(name))
