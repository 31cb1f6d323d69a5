"""Check the files of a Hugging Face folder without digests: headers, lengths, and the index against the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, listed
from shardckpt.huggingface.folder import (
    find_files,
    parse_object,
    parse_text,
    read_head,
    read_index,
    resolve_link,
)
from shardckpt.huggingface.names import SAFETENSORS, index_name, is_configuration
from shardckpt.storage.filesystem import file_size, wrap_os_errors
from shardckpt.storage.input_file import read_file
from shardckpt.strategy import find_error

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path


#: Most bytes of a JSON file: the largest tokenizers have some 30 MB.
_JSON_LIMIT = 256 << 20


def check_folder(folder: Path) -> dict[str, CheckpointingException | None]:
    """Check every weight file of a folder, and that each has the tensors that the index promises; no value is read.

    Return each file's fault by its name, or None; JSON files next to the index are listed only if they have a fault. If
    the index itself is damaged, so that there is no list of files, its error is raised.
    """
    weight_map, _ = read_index(folder)
    promised: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        promised.setdefault(file, []).append(name)
    files = promised or {file: [] for file in find_files(folder)}
    found = {
        file: find_error(check_weights, resolve_link(folder, file), names) for file, names in sorted(files.items())
    }
    index = {index_name(SAFETENSORS): None} if weight_map else {}
    return {**index, **found, **_find_wrong_texts(folder)}


def _find_wrong_texts(folder: Path) -> dict[str, CheckpointingException]:
    """Return the faults of JSON files: configurations and tokenizers are objects, others may be anything."""
    with wrap_os_errors("list", folder):
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".json" and path.name[0] != ".")
    found = {name: find_error(_check_text, folder, name) for name in names}
    return {name: error for name, error in found.items() if error is not None}


def _check_text(folder: Path, name: str) -> None:
    parse = parse_object if is_configuration(name) else parse_text
    # by the name in the folder: a link of the cache leads to one that says nothing
    parse(read_file(resolve_link(folder, name), _JSON_LIMIT), folder / name)


def check_weights(path: Path, promised: Collection[str] = ()) -> None:
    """Check one file of safetensors: its header, its length, and that it has the tensors that the index promises."""
    tensors = read_head(path).tensors
    absent = sorted(set(promised) - tensors.keys())
    if absent:
        raise CorruptCheckpointError(f"{path} lacks tensors that the index says are in it: {listed(absent)}")
    ends = [tensor.stop for tensor in tensors.values()]
    if not ends or None in ends:  # the bytes of a dtype that this torch lacks are not known
        return
    last = max(end for end in ends if end is not None)
    with wrap_os_errors("access", path):
        size = file_size(path)
    if last < size:
        raise CorruptCheckpointError(
            f"{path} has {size - last:,} bytes behind its last tensor, which the format forbids"
        )
