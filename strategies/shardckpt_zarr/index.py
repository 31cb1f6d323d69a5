"""The content of a checkpoint, found by its folders: zarr has no list of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.manifest import list_parents
from shardckpt.mapping import ShardedObject
from shardckpt.storage import list_tree
from shardckpt_zarr.arrays import ARRAY_FILE, ChunkedArray, read_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from shardckpt.storage import CheckpointReader

COMMON_FILE = "common.pt"
_OBJECT_PREFIX, _OBJECT_SUFFIX = "shard_", ".pt"
#: Ending of the folders of lock files that remain of saves of flattened shards.
_LOCKS = ".sync"


@dataclass(frozen=True)
class Index:
    """The stored tensors by key, and the file of each object by its unique key."""

    arrays: dict[str, ChunkedArray]
    objects: dict[str, str]


def read_index(reader: CheckpointReader) -> Index:
    """Return the index of a checkpoint; once read, it is kept with the reader."""
    return reader.parsed("zarr index", lambda: _read_index(reader))


class Folder(NamedTuple):
    """A folder of a tensor or of objects, by its path in the checkpoint.

    ``objects`` are the names of its files that are objects; none of a tensor's.
    """

    name: str
    is_array: bool
    objects: list[str]


def find_folders(directory: Path) -> Iterator[Folder]:
    """Yield the folders of tensors and objects in a directory, or in a URL's folder.

    A directory that cannot be listed is an OSError; a store that cannot list folders is a StorageError.
    """
    sizes = list_tree(directory)
    return _walk(directory) if sizes is None else _group(sizes)


def count_files(directory: Path, name: str) -> int:
    """Return how many files are in a tensor's folder."""
    return sum(1 for _ in (directory / name).iterdir())


def _walk(directory: Path) -> Iterator[Folder]:
    """Yield the folders in a directory.

    A folder that is a link is not entered; if it has a tensor, it is yielded, and the reader refuses to read it.
    """
    folders = [("", directory)]
    while folders:
        name, folder = folders.pop()
        if name and (folder / ARRAY_FILE).is_file():
            if not _has_locks(name, (folder / ARRAY_FILE).stat().st_size):
                yield Folder(name, True, [])
            continue
        if name and folder.is_symlink():
            continue
        inner = sorted((f"{name}/{path.name}" if name else path.name, path) for path in folder.iterdir())
        objects = [path.name for _, path in inner if _is_object(path.name)]
        if name and objects:
            yield Folder(name, False, objects)
        folders += [(child, path) for child, path in reversed(inner) if path.is_dir()]


def _group(sizes: Mapping[str, int]) -> Iterator[Folder]:
    """Yield the folders of a store, which lists the objects in all of them; objects below a tensor belong to it."""
    files: dict[str, list[str]] = {}
    for path in sorted(sizes):
        folder, _, file = path.rpartition("/")
        files.setdefault(folder, []).append(file)
    arrays = {folder for folder, names in files.items() if folder and ARRAY_FILE in names}
    for folder, names in sorted(files.items()):
        if not folder or not arrays.isdisjoint(list_parents(folder)):
            continue
        objects = [name for name in names if _is_object(name)]
        if folder in arrays and not _has_locks(folder, sizes[f"{folder}/{ARRAY_FILE}"]):
            yield Folder(folder, True, [])
        elif folder not in arrays and objects:
            yield Folder(folder, False, objects)


def _read_index(reader: CheckpointReader) -> Index:
    arrays, files = {}, []
    try:
        for folder in find_folders(reader.place):
            if folder.is_array:
                arrays[folder.name] = read_array(folder.name, reader)
            files += [f"{folder.name}/{name}" for name in folder.objects]
    except OSError as exc:
        raise CorruptCheckpointError(f"{reader.directory} cannot be listed: {exc}") from exc
    return Index(arrays, _name_objects(files))


def _has_locks(name: str, array_nbytes: int) -> bool:
    """Return whether a folder has only locks: they have the names of the files that were written, and no bytes."""
    return name.endswith(_LOCKS) and not array_nbytes


def _is_object(name: str) -> bool:
    return name.startswith(_OBJECT_PREFIX) and name.endswith(_OBJECT_SUFFIX)


def _name_objects(files: Iterable[str]) -> dict[str, str]:
    """Return each object's file by its unique key.

    Megatron-Core 0.4 to 0.7 cut the last extent of the grid off the file's name, where the grid has several axes. All
    objects of a grid are stored: so the largest index gives the extent.
    """
    found: dict[str, str] = {}
    cut: list[tuple[ShardedObject, str]] = []
    for file in sorted(files):
        unique_key = file.removesuffix(_OBJECT_SUFFIX)
        try:
            described = ShardedObject.empty_from_unique_key(unique_key)
        except CheckpointingException:
            continue  # not a file of Megatron's
        if described.unique_key == unique_key:
            found[unique_key] = file
        else:
            cut.append((described, file))
    extents: dict[tuple[str, tuple[int, ...]], int] = {}
    for described, _ in cut:
        grid = described.key, described.global_shape[:-1]
        extents[grid] = max(extents.get(grid, 0), described.global_shape[-1])
    for described, file in cut:
        outer = described.global_shape[:-1]
        shape = (*outer, extents[described.key, outer])
        found[ShardedObject(described.key, None, shape, described.global_offset).unique_key] = file
    return found
