"""Describe a file or folder that no installed reader recognises, by its content, and say what to do with it."""

from __future__ import annotations

import json
import os
import re
import zipfile
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, format_many, name_call
from shardckpt.maintenance.inside import list_inside, list_local_names
from shardckpt.manifest.hub import find_trainer_parts
from shardckpt.plugins.legacy_megatron import describe_legacy_megatron
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.directory import real_path
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.storage.input_file import read_file

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

#: The first bytes of files, and the description of these files.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras): write its weights as safetensors with the library that made it"),
    (b"GGUF", "a GGUF file (llama.cpp), whose weights are packed for inference: start from the weights it was made of"),
    (b"ggml", "a GGML file (llama.cpp), whose weights are packed for inference: start from the weights it was made of"),
    (b"\x93NUMPY", "a numpy array (.npy): torch.save it in a dict, and convert that file"),
    (b"\x1f\x8b", "compressed with gzip: decompress it, and convert its content"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: decompress it, and convert its content"),
    (b"BZh", "compressed with bzip2: decompress it, and convert its content"),
    (b"\xfd7zXZ\x00", "compressed with xz: decompress it, and convert its content"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it, and convert its content"),
    (b"version https://git-lfs", "a pointer of git-lfs, without the file that it stands for: run git lfs pull"),
    (b"<!DOCTYPE", "a web page: the download has failed"),
    (b"<html", "a web page: the download has failed"),
    (b"{", "a JSON file"),
    (b"[", "a JSON file"),
)
_TAR, _TAR_AT = b"ustar", 257
#: Bytes of a file that are examined.
_GLANCE = 1024
_DEEPSPEED = re.compile(r"mp_rank_\d+_model_states\.pt|layer_\d+-model_.*states\.pt")


def describe_file(path: Path) -> str:
    """Describe a file that is not safetensors, with advice.

    It is ``""`` for an archive of ``torch.save``, and for a zip archive without a directory, which may have been one.
    """
    with wrap_os_errors("open", path), path.open("rb") as file:
        first = file.read(_GLANCE)
    if first.startswith(b"PK"):
        return _describe_zip(path)
    known = [what for magic, what in _MAGIC if first.startswith(magic)]
    if first[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        known = ["a tar archive: unpack it, and convert its content"]
    if not any(first):
        zeros = f"a file that begins with {len(first)} zeros: it is damaged, or was never written"
        known = [zeros if first else "an empty file"]
    return known[0] if known else f"of no format that is known here: it begins with {first[:8]!r}"


def describe_folder(folder: Path, names: Collection[str]) -> str:
    """Describe a folder that no installed reader recognises, with advice; ``""`` if its format is unknown."""
    what = describe_foreign(folder, names)
    if what:
        return what
    if parts := find_trainer_parts(names):
        return f"a step of accelerate or transformers' Trainer, whose parts are read by their paths: {', '.join(parts)}"
    latest = _read_latest(folder) if "latest" in names else ""
    if latest in names:
        return f"a folder of checkpoints: give one, such as the latest, {json.dumps(latest)}"
    return _name_inner(folder)


def describe_foreign(folder: Path, names: Collection[str]) -> str:
    """Describe a folder that is one checkpoint of a kind that is not read here; ``""`` if it is none."""
    legacy = describe_legacy_megatron(folder, names)
    orbax = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}
    known = (
        (
            any(map(_DEEPSPEED.fullmatch, names)),
            "a checkpoint of DeepSpeed without ZeRO partitions: convert each of its files by its path",
        ),
        (bool(legacy), legacy),
        (
            bool(orbax & set(names)),
            "a checkpoint of Orbax (JAX), which is not read here: write its arrays as safetensors",
        ),
        (
            # the folder of a run of torchtitan has a folder of that name
            "saved_model.pb" in names or ("checkpoint" in names and (folder / "checkpoint").is_file()),
            "a checkpoint of TensorFlow, which is not read here: write its variables as safetensors",
        ),
    )
    return next((what for is_it, what in known if is_it), "")


def _describe_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as found:
            inner = [name.partition("/")[2] or name for name in found.namelist()]
    except (zipfile.BadZipFile, ValueError):
        return ""
    if "constants.pkl" in inner:
        return "a TorchScript archive: a program with weights. Save the module's state_dict() instead"
    if "data.pkl" in inner:
        return ""
    if any(name.endswith(".npy") for name in inner):
        return "an archive of numpy arrays (.npz): torch.save them in a dict, and convert that file"
    return f"a zip archive that torch.save has not made (it has {', '.join(inner[:4]) or 'nothing'})"


def _read_latest(folder: Path) -> str:
    """Return the name in a file ``latest``, of DeepSpeed or a CheckpointManager, or that such a link leads to."""
    path = folder / "latest"
    try:
        if path.is_symlink():
            return os.path.basename(os.path.realpath(real_path(path)))  # noqa: PTH119 - of a text
        return read_file(path, _GLANCE).decode().strip()
    except (ValueError, OSError, CheckpointingException):
        return ""


def _name_inner(folder: Path) -> str:
    """Return the checkpoints in a folder of checkpoints; ``""`` if there are none, or it is on a store."""
    found = [] if takes_requests(folder) else list(list_inside(list_local_names(folder)))
    if not found:
        return ""
    many = format_many(len(found), "checkpoint")
    return (
        f"a folder of {many}: give one, such as {json.dumps(found[-1])}; {name_call('ls', '-r', folder)} lists them, "
        f"and {name_call('verify', '-r', folder)} verifies them"
    )
