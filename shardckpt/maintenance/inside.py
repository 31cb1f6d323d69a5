"""Find possible checkpoints below a folder, at any depth, by the names of files alone: nothing is opened."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import StorageError
from shardckpt.manifest.hub import HUB_CONFIG, HUB_FILES, HUB_WEIGHTS, find_trainer_parts, is_of_training, lacks_weights
from shardckpt.manifest.names import MARKER_NAME, RECORD_NAME
from shardckpt.storage.directory import real_path
from shardckpt.storage.filesystem import wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

#: Suffixes of files that may be a checkpoint of their own; their content decides.
FILE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".gguf")
#: A model of the Hub as a pickle.
_BIN = "pytorch_model.bin"
#: Any of these says that the folder that has it is one checkpoint, or was to be.
_MARKS = frozenset(
    {
        *(MARKER_NAME, RECORD_NAME, ".metadata", "_CHECKPOINT_METADATA", "manifest.ocdbt", "saved_model.pb"),
        *(*HUB_FILES, _BIN, f"{_BIN}.index.json", "metadata.pkl"),
    }
)
#: Data files of DCP, Megatron and (safetensors, 1), DeepSpeed's, the Hub's, of several, and the folders of ranks of
#: Megatron's legacy format.
_PARTS = re.compile(r".*\.distcp|(rank_\d+_\d+|model-\d+-of-\d+)\.safetensors|.*_model_states\.pt|mp_rank_\d+(_\d+)*")


class Names(NamedTuple):
    """The direct content of a folder."""

    folders: list[str]
    files: list[str]


def list_inside(list_names: Callable[[str], Names], is_step: Callable[[str], bool] = lambda _: False) -> Iterator[str]:
    """Yield in order the paths of possible checkpoints in a folder and in its folders.

    They are folders, and files by their suffix. Hidden entries are left out, and the contents of a checkpoint or an
    unfinished save. A folder that cannot be listed is yielded, too. ``list_names`` lists a folder, given its path;
    ``""`` is the folder itself. ``is_step`` says whether a name is a step's, so that a folder of that name with nothing
    known in it is a save that did not end.
    """
    names = list_names("")
    return iter(()) if is_marked([*names.folders, *names.files]) else _list_inside("", names, list_names, is_step)


def _list_inside(
    folder: str, names: Names, list_names: Callable[[str], Names], is_step: Callable[[str], bool]
) -> Iterator[str]:
    for name in sorted(name for name in names.folders if not name.startswith(".")):
        path = f"{folder}/{name}".lstrip("/")
        try:
            inner = list_names(path)
        except StorageError:  # a caller that opens the folder gets this error again, and reports it
            yield path
            continue
        if is_marked([*inner.folders, *inner.files]):
            yield path
            continue
        found = list(_list_inside(path, inner, list_names, is_step))
        yield from found or ([path] if is_step(name) and any(inner) else [])
    for name in sorted(names.files):
        if name.endswith(FILE_SUFFIXES) and not name.startswith("."):
            yield f"{folder}/{name}".lstrip("/")


def is_marked(names: Iterable[str]) -> bool:
    """Return whether the names in a folder show that the folder is one checkpoint, or an unfinished one.

    ``model.safetensors`` or ``pytorch_model.bin`` is not enough if there are other files of weights and no
    ``config.json``: each of these files may then be a checkpoint of its own.
    """
    names = [*names]
    marks = {name for name in names if _is_mark(name)}
    if not marks:
        return lacks_weights(names) or bool(find_trainer_parts(names))
    if len(marks) > 1 or not marks <= {HUB_WEIGHTS, _BIN} or HUB_CONFIG in names:
        return True
    return not any(name.endswith(FILE_SUFFIXES) and not is_of_training(name) for name in {*names} - marks)


def _is_mark(name: str) -> bool:
    return name in _MARKS or bool(_PARTS.fullmatch(name))


def _says_something(name: str) -> bool:
    """Return whether the name of a file is a reason to list it, or its folder."""
    return name.endswith(FILE_SUFFIXES) or _is_mark(name)


def is_visible_in(path: str, top: str) -> bool:
    """Return whether a real path is below another, and not hidden there."""
    inner = path.removeprefix(f"{top}/")
    return inner != path and not any(part.startswith(".") for part in inner.split("/"))


def list_local_names(place: Path, top: str = "") -> Callable[[str], Names]:
    """Return the listing of the folders in a directory of this machine; links are followed directly in it alone.

    A link to a sibling, such as ``latest``, or into ``top``, is left out: the target is listed by its own name. One
    that is hidden is not, nor a file whose name says nothing, as in the cache of the Hub: a link to it counts.
    """
    place = real_path(place)

    def list_names(folder: str) -> Names:
        names, own = Names([], []), os.path.realpath(place / folder)
        with wrap_os_errors("list", place / folder), os.scandir(place / folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # a link to itself is neither
                    if entry.is_symlink():
                        real = os.path.realpath(entry.path)
                        is_sibling = os.path.dirname(real) == own and is_visible_in(real, own)  # noqa: PTH120 - a text
                        is_near = is_sibling or (top and is_visible_in(real, top))
                        if is_near and (entry.is_dir() or _says_something(os.path.basename(real))):  # noqa: PTH119
                            continue
                    if entry.is_dir(follow_symlinks=not folder):
                        names.folders.append(entry.name)
                    elif entry.is_file():
                        names.files.append(entry.name)
        return names

    return list_names


def list_stored_names(paths: Iterable[str]) -> Callable[[str], Names]:
    """Return the lister of a store's folders, from the paths of all its objects."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        found.setdefault(folder, ({}, {}))[1][name] = None
        while folder:
            above, _, name = folder.rpartition("/")
            found.setdefault(above, ({}, {}))[0][name] = None
            folder = above
    return lambda folder: Names(*map(list, found.get(folder, ({}, {}))))
