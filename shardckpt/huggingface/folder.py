"""Read the content of a Hugging Face folder of safetensors files from the headers alone."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.engine.integrity import is_damage
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, NotACheckpointError, listed, name_call
from shardckpt.huggingface.header import FileTensor, parse_head
from shardckpt.huggingface.names import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    ORIGIN,
    SAFETENSORS,
    file_names,
    has_numbered_files,
    index_name,
    list_numbered_files,
)
from shardckpt.manifest.hub import HUB_CONFIG, lacks_weights
from shardckpt.manifest.names import Rescue
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.directory import detect_replacement, real_path, replaced_error, was_replaced
from shardckpt.storage.filesystem import check_file_name, is_there, wrap_os_errors
from shardckpt.storage.input_file import open_existing, read_file
from shardckpt.storage.places import list_entries
from shardckpt.storage.safetensors_header import HEADER_LIMIT, LENGTH_BYTES, header_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG = HUB_CONFIG
CONFIG_LIMIT = 16 << 20
#: In the Hugging Face cache, ``<repository>/snapshots/<revision>`` has links into ``<repository>/blobs``, whose files
#: may be links into ``blobs`` of the whole cache: huggingface_hub 1.32, which stores equal files of repositories once.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class Head(NamedTuple):
    """The tensors of a file, its statements about its source, and the ends of truncated tensors, by name."""

    tensors: dict[str, FileTensor]
    origin: dict[str, str]
    cut: dict[str, int]


@dataclass(frozen=True)
class Folder:
    """The content of a folder.

    Attributes:
        directory: The directory above the targets of its links; ``""`` if its files are not links.
        names: The path of every file from that directory, by its name in the folder.
        tensors: The tensors by name.
        config: The content of ``config.json``; empty without one.
        stamp: Inode number, size in bytes and modification time in ns of the first file of weights; None on an object
            store. An export writes new files, so the stamp tells two exports apart.
        origin: An export's statements about its source, some or all of: ``version`` of shardckpt, ``source``,
            ``fingerprint``, and of a rescue ``rescued`` and ``rescued_keys``, as JSON: how many keys are left out as
            damaged, and the first of them.
        adapter: The content of ``adapter_config.json``, if the folder has an adapter of PEFT and no model; else None.
    """

    directory: str
    names: dict[str, str]
    tensors: dict[str, FileTensor]
    config: dict[str, Any]
    stamp: tuple[int, int, int] | None = None
    origin: dict[str, str] = field(default_factory=dict)
    adapter: dict[str, Any] | None = None
    #: The tensors that are missing, or cut, in a folder whose rest is read: the file of each, and the bytes that it
    #: needs, if its header says so.
    lost: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    #: The faults of files, by name, that have no such header.
    faults: Mapping[str, str] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """The writer's name; ``""`` if unknown."""
        ours = f"shardckpt {self.origin['version']}" if "version" in self.origin else ""
        return ours if self.adapter is None else f"{ours or 'PEFT'} (a PEFT adapter)"

    @property
    def rescue(self) -> Rescue:
        """The keys that the rescue that has written it left out, as it says."""
        try:
            return Rescue.parse(json.loads(self.origin["rescued"]), json.loads(self.origin.get("rescued_keys", "[]")))
        except (KeyError, ValueError, RecursionError):
            return Rescue()


def read_folder(folder: Path, *, skip_damaged: bool = False) -> Folder:
    """Read the headers of ``model.safetensors``, or of the files that ``model.safetensors.index.json`` names.

    The folder is local or on a store. It may be a snapshot in the Hugging Face cache, or a folder in one: links into
    the cache's ``blobs`` are followed, other links are not. With ``skip_damaged`` tensors that are missing or cut are
    listed as ``lost``, and no error. An export that replaces the folder meanwhile is a CheckpointReplacedError.
    """
    with detect_replacement(folder):
        found = _read_folder(folder, skip_damaged=skip_damaged)
    # an exchange may have happened between two files: an absent config.json, say, may belong to the other folder
    if was_replaced(folder):
        raise replaced_error(folder, "some files may have been read from the new one")
    return found


def read_file_as_folder(folder: Path, file: str, *, skip_damaged: bool = False) -> Folder:
    """Read the header of one safetensors file, of any name, as if it were all that its folder has.

    With ``skip_damaged`` a file that is cut short is no error, but a damaged header is.
    """
    head = read_head(folder / file, skip_damaged=skip_damaged)
    tensors = {name: tensor._replace(file=file) for name, tensor in head.tensors.items()}
    lost = {name: (file, end) for name, end in head.cut.items()}
    return Folder("", {file: file}, tensors, {}, _read_stamp(folder, file), head.origin, lost=lost)


def check_same_folder(folder: Path, found: Folder) -> None:
    """Raise CheckpointReplacedError if an export has replaced the folder since another rank has read ``found``."""
    if found.stamp is None or found.directory:  # the cache's files are named by their content
        return
    with detect_replacement(folder):
        stamp = _read_stamp(folder, min(found.names))
    # on a shared file system, nodes may see different inode numbers or modification times of one file, but not both
    if stamp is not None and (
        stamp[1] != found.stamp[1] or (stamp[0] != found.stamp[0] and stamp[2] != found.stamp[2])
    ):
        raise replaced_error(folder, "this rank finds another folder there than the main rank")


def _read_stamp(folder: Path, file: str) -> tuple[int, int, int] | None:
    if not has_local_files(folder):
        return None
    path = folder / file
    with wrap_os_errors("access", path):
        found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_folder(folder: Path, *, skip_damaged: bool) -> Folder:
    weight_map, origin = read_index(folder)
    files = sorted(set(weight_map.values())) or find_files(folder, is_rescue=skip_damaged)
    heads, faults = _read_heads(folder, files, skip_damaged=skip_damaged)
    lost: dict[str, tuple[str, int | None]] = {n: (f, end) for f, head in heads.items() for n, end in head.cut.items()}
    for name, file in weight_map.items() if skip_damaged else ():
        if file not in heads or name not in heads[file].tensors:
            lost.setdefault(name, (file, None))
            faults.setdefault(file, f"does not have {name!r}, which the index says is in it")
    real = {file: resolve_link(folder, file) for file in heads}
    directory = _link_directory(folder, real)
    names = {file: str(path.relative_to(directory)) if directory else path.name for file, path in real.items()}
    first = next(iter(heads))
    return Folder(
        directory,
        names,
        _locate_tensors(heads, {name: file for name, file in weight_map.items() if name not in lost}, folder),
        read_folder_config(folder),
        _read_stamp(folder, first),
        origin if weight_map else heads[first].origin,
        _read_adapter(folder) if [*heads] == [ADAPTER_WEIGHTS] else None,
        lost,
        faults,
    )


def read_folder_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder; empty without one."""
    path = resolve_link(folder, CONFIG)
    return read_json(path, CONFIG_LIMIT) if is_there(path) else {}


def _read_heads(folder: Path, files: Sequence[str], *, skip_damaged: bool) -> tuple[dict[str, Head], dict[str, str]]:
    """Return the heads of the files that have one, and the faults of the others; raise the fault if none has one."""
    heads: dict[str, Head] = {}
    faults: dict[str, str] = {}
    damage = None
    for file in files:
        try:
            heads[file] = read_head(resolve_link(folder, file), skip_damaged=skip_damaged)
        except CheckpointingException as exc:  # noqa: PERF203 - the other files may be sound
            if not skip_damaged or not is_damage(exc):
                raise
            damage, faults[file] = exc, f"cannot be read: {exc}"
    if damage is not None and not heads:
        raise damage
    return heads, faults


def _read_adapter(folder: Path) -> dict[str, Any]:
    if not is_there(folder / ADAPTER):
        raise CorruptCheckpointError(
            f"{folder} has lost {ADAPTER}, without which PEFT does not load the adapter in {ADAPTER_WEIGHTS}: copy it "
            "from where the folder came from"
        )
    return read_json(resolve_link(folder, ADAPTER), CONFIG_LIMIT)


def read_index(folder: Path, file_format: str = SAFETENSORS) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file of every tensor, and the index's statements about its source; both empty without an index."""
    path = folder / index_name(file_format)
    if not is_there(path):
        return {}, {}
    content = read_json(resolve_link(folder, path.name), HEADER_LIMIT)
    found = content.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CorruptCheckpointError(f"{path} has no weight_map from names of tensors to names of files")
    for file in found.values():
        # the index is not trusted: its names must not lead out of the folder
        if "/" in check_file_name(file):
            raise CorruptCheckpointError(f"{path} names the file {file!r}: it must be in the folder itself")
    return found, _find_origin(content.get("metadata"))


def find_files(folder: Path, *, is_rescue: bool = False) -> list[str]:
    """Return the names of the files of weights where there is no index: the one file, or an adapter's.

    Several, whose index has been lost, are a CorruptCheckpointError; of a rescue these, if none of them is lost.
    """
    (name,) = file_names(1, SAFETENSORS)
    if not is_there(folder / name):
        names = sorted(list_entries(folder)) if folder.is_dir() else []
        numbered = list_numbered_files(names)
        if is_rescue and numbered:
            return numbered
        if ADAPTER_WEIGHTS in names:
            return [ADAPTER_WEIGHTS]
        if has_numbered_files(names):
            rest = "nothing says whether a file is missing: copy it from where the folder came from, or export again"
            if numbered:
                call = name_call("convert", folder, "NEW", "--to", "hf", "--skip-damaged")
                rest = f"no file is missing, as their names count them: {call} writes the folder with a new one"
            raise CorruptCheckpointError(
                f"{folder} has lost {index_name(SAFETENSORS)}, without which transformers does not load it, and {rest}"
            )
        if lacks_weights(names):
            raise CorruptCheckpointError(
                f"{folder} has lost its weights: it has {listed(names, limit=3)}, and no weights of any format: copy "
                f"{name} from where the folder came from"
            )
        found = listed(names, limit=3) if folder.is_dir() else "no directory"
        raise NotACheckpointError(
            f"{folder} has neither {name} nor {index_name(SAFETENSORS)}: it is not a Hugging Face folder of "
            f"safetensors (found {found or 'nothing'})"
        )
    return [name]


def _link_directory(folder: Path, real: Mapping[str, Path]) -> str:
    """Return the directory that the links lead to; ``""`` without links. All files must be links, or none."""
    outside = {file for file, path in real.items() if path.name != file}
    if not outside:
        return ""
    if len(outside) < len(real):
        raise CorruptCheckpointError(
            f"{folder}: some of its files are links into the cache's {_BLOBS} and some are not; copy it with `cp -rL`, "
            "and use the copy"
        )
    return os.path.commonpath([path.parent for path in real.values()])


def resolve_link(folder: Path, file: str) -> Path:
    """Return the file, or the file in the cache's ``blobs`` that it links to; opening any other link fails later."""
    path = folder / file
    if not path.is_symlink():
        return path
    # a downloaded folder is not trusted: its links must not lead to other files of this machine
    target, snapshot = (Path(os.path.realpath(real_path(place))) for place in (path, folder))
    repository = next((above.parent for above in snapshot.parents if above.name == _SNAPSHOTS), None)
    if repository is None:
        return path
    blobs = repository / _BLOBS, repository.parent / _BLOBS
    return target if any(map(target.is_relative_to, blobs)) else path


def _find_origin(metadata: object) -> dict[str, str]:
    """Return the folder's source by the metadata of an index or a header."""
    texts = metadata.items() if isinstance(metadata, dict) else ()
    return {k.removeprefix(ORIGIN): v for k, v in texts if k.startswith(ORIGIN) and isinstance(v, str)}


def read_head(path: Path, *, skip_damaged: bool = False) -> Head:
    """Return the header of a file; with ``skip_damaged`` tensors whose bytes are cut off are no error."""
    with open_existing(path) as file:
        size = file.size
        first = bytearray(min(LENGTH_BYTES, size))
        file.read_into(memoryview(first), 0)
        text = bytearray(header_length(bytes(first), size, str(path)))
        file.read_into(memoryview(text), LENGTH_BYTES)
    tensors, metadata = parse_head(bytes(text), sys.maxsize if skip_damaged else size, str(path))
    ends = {name: max(tensor.start, tensor.stop or 0) for name, tensor in tensors.items()} if skip_damaged else {}
    cut = {name: end for name, end in ends.items() if end > size}
    return Head({n: t for n, t in tensors.items() if n not in cut} if cut else tensors, _find_origin(metadata), cut)


def _locate_tensors(heads: Mapping[str, Head], weight_map: Mapping[str, str], folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of all files; if two files have one, the index decides."""
    locations: dict[str, FileTensor] = {}
    for file, head in heads.items():
        for name, tensor in head.tensors.items():
            if weight_map.get(name, file) != file:
                continue
            if name in locations:
                raise CorruptCheckpointError(
                    f"{folder}: {locations[name].file} and {file} both have {name!r}, and the index does not say "
                    "which of them counts"
                )
            locations[name] = tensor._replace(file=file)
    for name, file in weight_map.items():
        if name not in locations:
            raise CorruptCheckpointError(f"{folder}: the index says that {name!r} is in {file}, which does not have it")
    return locations


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Return the object in a JSON file of at most ``limit`` bytes."""
    return parse_object(read_file(path, limit), path)


def parse_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Return the object in the content of a JSON file; raise CorruptCheckpointError if it is not one."""
    found = parse_text(raw, path)
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path} is damaged: it is not a JSON object")
    return found


def parse_text(raw: bytes, path: Path) -> Any:
    """Return the value of a JSON file's content; raise CorruptCheckpointError if it is no JSON."""
    try:
        return json.loads(str(raw, "utf-8").removeprefix("\ufeff"))  # of bytes it would guess the encoding
    except (ValueError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{path} is damaged: {exc}") from exc
