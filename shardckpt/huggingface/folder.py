"""A Hugging Face folder of safetensors files: which tensors it has, and where; nothing but headers is read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError, NotACheckpointError
from shardckpt.huggingface.header import HEADER_LIMIT, LENGTH_BYTES, FileTensor, header_length, parse_header
from shardckpt.huggingface.names import SAFETENSORS, file_names, index_name
from shardckpt.storage import (
    check_file_name,
    close_file,
    detect_replacement,
    has_local_files,
    is_there,
    naming,
    open_existing,
    read_file,
    read_into,
    real_path,
    replaced_error,
    was_replaced,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CONFIG = "config.json"
_CONFIG_LIMIT = 16 << 20
#: Where the Hugging Face cache has the files that a snapshot links to.
_BLOBS = Path("..", "..", "blobs")


class Place(NamedTuple):
    """Where a tensor is.

    Attributes:
        file: The file's name in the folder.
        tensor: Its dtype, shape and offset there.
    """

    file: str
    tensor: FileTensor


@dataclass(frozen=True)
class Folder:
    """What a folder has.

    Attributes:
        directory: Where its files are, if that is not itself: what the links in it lead to; else ``""``.
        names: The name of every file there, by its name in the folder.
        tensors: Every tensor by name.
        config: What ``config.json`` says; empty without one.
        stamp: Number, size and time of writing of the first file of weights, which an export writes anew; None on a
            store.
    """

    directory: str
    names: dict[str, str]
    tensors: dict[str, Place]
    config: dict[str, Any]
    stamp: tuple[int, int, int] | None = None


def read_folder(folder: Path) -> Folder:
    """What is in a folder of ``model.safetensors``, or of files that ``model.safetensors.index.json`` names.

    Args:
        folder: The folder, on a store too. A snapshot in the Hugging Face cache is such a one: its links into the
            cache's ``blobs`` are followed, and no others.

    Raises:
        NotACheckpointError: it is no such folder.
        CorruptCheckpointError: a file is missing, cut short, or not what the index says.
        CheckpointReplacedError: it is held open, and an export has replaced it meanwhile.
    """
    with detect_replacement(folder):
        found = _read_folder(folder)
    if was_replaced(folder):  # without config.json, perhaps, which was there
        raise replaced_error(folder, "it is not known whether all its files were there")
    return found


def check_same(folder: Path, found: Folder) -> None:
    """Raise unless the folder is the one that another rank has read.

    (The number of a file, or the time of its writing, may be another on another node: not both.)

    Raises:
        CheckpointReplacedError: an export has replaced it meanwhile.
    """
    if found.stamp is None or found.directory:  # the cache's files are named by their content
        return
    with detect_replacement(folder):
        stamp = _stamp(folder, sorted(found.names))
    if stamp is not None and (
        stamp[1] != found.stamp[1] or (stamp[0] != found.stamp[0] and stamp[2] != found.stamp[2])
    ):
        raise replaced_error(folder, "this rank finds another folder there than the main rank")


def _stamp(folder: Path, files: Sequence[str]) -> tuple[int, int, int] | None:
    if not has_local_files(folder):
        return None
    path = folder / files[0]
    with naming("look at", path):
        found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_folder(folder: Path) -> Folder:
    weight_map = _weight_map(folder)
    files = sorted(set(weight_map.values())) or [_only_file(folder)]
    real = {file: _real(folder, file) for file in files}
    headers = {file: _read_header(path) for file, path in real.items()}
    names = {file: path.name for file, path in real.items()}
    return Folder(
        _directory(folder, real), names, _places(headers, weight_map, folder), _config(folder), _stamp(folder, files)
    )


def _config(folder: Path) -> dict[str, Any]:
    path = _real(folder, _CONFIG)
    return _json(path, _CONFIG_LIMIT) if is_there(path) else {}


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor, as the index says; empty without an index."""
    path = folder / index_name(SAFETENSORS)
    if not is_there(path):
        return {}
    found = _json(_real(folder, path.name), HEADER_LIMIT).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{path} has no weight_map from names of tensors to names of files")
    for file in found.values():
        check_file_name(file)
    return found


def _only_file(folder: Path) -> str:
    (name,) = file_names(1, SAFETENSORS)
    if not is_there(folder / name):
        found = sorted(path.name for path in folder.iterdir())[:6] if folder.is_dir() else "no directory"
        raise NotACheckpointError(
            f"{folder} has neither {name} nor {index_name(SAFETENSORS)}: it is no Hugging Face folder of safetensors "
            f"(found {found}); a .bin file of torch.save is read by torch_save_to_dcp"
        )
    return name


def _directory(folder: Path, real: Mapping[str, Path]) -> str:
    """The directory that links lead to; all files must be there, or none."""
    outside = {file for file, path in real.items() if path.name != file}
    if not outside:
        return ""
    if len(outside) < len(real):
        raise CorruptCheckpointError(
            f"{folder}: some of its files are links into {_BLOBS} and some are not; copy it with `cp -rL`, and use the "
            "copy"
        )
    return str(next(iter(real.values())).parent)


def _real(folder: Path, file: str) -> Path:
    """The file itself, or the one in the cache's ``blobs`` that it is a link to (other links are refused later)."""
    path = folder / file
    if not path.is_symlink():
        return path
    target, blobs = (Path(os.path.realpath(real_path(link))) for link in (path, folder / _BLOBS))
    return target if target.parent == blobs else path


def _read_header(path: Path) -> dict[str, FileTensor]:
    fd, size = open_existing(path)
    try:
        first = bytearray(min(LENGTH_BYTES, size))
        read_into(fd, path, memoryview(first), 0)
        text = bytearray(header_length(bytes(first), size, str(path)))
        read_into(fd, path, memoryview(text), LENGTH_BYTES)
    finally:
        close_file(fd)
    return parse_header(bytes(text), size, str(path))


def _places(headers: dict[str, dict[str, FileTensor]], weight_map: dict[str, str], folder: Path) -> dict[str, Place]:
    """Every tensor; where two files have one, the index decides."""
    places: dict[str, Place] = {}
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            if weight_map.get(name, file) != file:
                continue
            if name in places:
                raise CorruptCheckpointError(
                    f"{folder}: {places[name].file} and {file} both have {name!r}, and the index does not say "
                    "which of them is meant"
                )
            places[name] = Place(file, tensor)
    for name, file in weight_map.items():
        if name not in places:
            raise CorruptCheckpointError(f"{folder}: the index says that {name!r} is in {file}, which does not have it")
    return places


def _json(path: Path, limit: int) -> dict[str, Any]:
    raw = read_file(path, limit)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{path} is damaged: {exc}") from exc
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path} is damaged: it has no names")
    return found


__all__ = ["Folder", "Place", "read_folder"]
