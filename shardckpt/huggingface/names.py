"""File names of a Hugging Face folder: which tensors go into which file, and which files are weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Mapping

SAFETENSORS = "safetensors"
BIN = "bin"

#: Stem and suffix of each format's files.
_STEMS = {SAFETENSORS: ("model", ".safetensors"), BIN: ("pytorch_model", ".bin")}
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
#: Suffixes of weights in any format.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def check_format(name: str) -> str:
    """Return the name of a format if it is known.

    Raises:
        CheckpointingException: it is neither ``safetensors`` nor ``bin``.
    """
    if name not in _STEMS:
        raise CheckpointingException(f"format={name!r}: expected {SAFETENSORS!r} or {BIN!r}")
    return name


def assign_files(sizes: Mapping[str, int], limit: int, file_format: str = SAFETENSORS) -> dict[str, list[str]]:
    """Assign tensors to files in their order; a tensor above the limit gets its own file.

    Args:
        sizes: Bytes of every tensor by name, in order.
        limit: Bytes of tensors in a file.
        file_format: ``safetensors`` or ``bin``.

    Returns:
        The names of the tensors in each file, by the file's name.
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


def is_weights(name: str) -> bool:
    """Return whether an export, of any format, may have written a file of this name."""
    return _WEIGHTS.fullmatch(name) is not None


def is_asset(name: str) -> bool:
    """Return whether a file of this name belongs to a model but is not weights: its config, its tokenizer."""
    return not name.startswith(".") and not name.endswith(_WEIGHT_SUFFIXES)


def parse_size(size: int | str, argument: str = "max_shard_size") -> int:
    """Parse a size such as ``5GB`` (10^9) or ``5GiB`` (2^30).

    Args:
        size: The text, or a number of bytes.
        argument: The name of the caller's argument, for the error.

    Returns:
        The size in bytes.

    Raises:
        CheckpointingException: it is not a size, or not above 0.
    """
    found = _SIZE.fullmatch(str(size))
    factor = _UNITS.get(found[2].upper()) if found else None
    nbytes = int(float(found[1]) * factor) if found and factor else 0
    if nbytes < 1:
        raise CheckpointingException(
            f"{argument}={size!r}: expected a number of bytes above 0, or text such as '5GB', '500MB' or '2GiB'"
        )
    return nbytes
