"""Read the files of an item, one a rank: only their structure is read, and tensors are located."""

from __future__ import annotations

import json
import logging
import math
import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.archive import Archive, LazyTensor, StoredPayload, refuse_expanded, row_major_strides
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.huggingface import parse_head
from shardckpt.state_dict import DictKey
from shardckpt.storage import read_header
from shardckpt_torch_checkpointing.metadata import METADATA_FILE, Chunk, Layout, cut_for_rank, parse_placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_checkpointing.metadata import DeclaredItem

logger = logging.getLogger(__name__)

#: A path in a state dict: the item's key, then keys of dicts and indices of lists.
Path = tuple["str | int", ...]

_NAME = re.compile(r"(?P<item>[A-Za-z0-9_-]+?)_(?P<rank>0|[1-9][0-9]{0,6})\.(?P<suffix>[A-Za-z0-9]+)")
_FORMS = {"pt": "torch", "json": "json", "safetensors": "safetensors"}
#: Limit on the values of a file: so many, and more for each byte. A pickle can name one list any number of times.
_FREE_VALUES, _VALUES_PER_BYTE = 1 << 16, 8
#: A safetensors file has no checksum: this many bytes at the end of each quarter tell its saves apart.
_SAMPLE_BYTES, _SAMPLES = 1024, 4


@dataclass(frozen=True)
class LocalTensor:
    """A tensor in a rank's file.

    Attributes:
        payload: Where its values are in the file.
        global_shape: The shape of the DTensor that it is the local tensor of, if any.
        spec: The stub of that DTensor's pickled ``DTensorSpec``.
    """

    file: str
    payload: StoredPayload
    global_shape: Ints | None = None
    spec: Any = None

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.payload.dtype

    @property
    def shape(self) -> Ints:
        """Its shape."""
        return self.payload.shape

    def cut(self, rank: int) -> list[Chunk]:
        """Return the boxes of a DTensor that this is, as its pickled mesh and placements describe them.

        A mesh that is described in a way that is not known here is a CorruptCheckpointError.
        """
        try:
            mesh, layout = self.spec.mesh.state, self.spec.mesh.state["_layout"].state
            axes, coordinates = layout.get("axes"), mesh["_coordinate_on_dim"]
            sizes = layout["shape"] if axes is None else [math.prod(axis.state["shape"]) for axis in axes]
            sizes = [sizes] if isinstance(sizes, int) else list(sizes)
            ways = [
                parse_placement({"type": type(way).__name__.lstrip("_"), **way.state}) for way in self.spec.placements
            ]
            if coordinates is None:  # this rank is outside of the mesh
                return []
            return cut_for_rank(self.global_shape or (), sizes, list(coordinates), ways, rank)
        except (AttributeError, TypeError, ValueError, LookupError) as exc:
            raise CorruptCheckpointError(
                f"{self.file}: a DTensor is of a version of torch that describes its mesh otherwise "
                f"({type(exc).__name__}: {exc}), and no {METADATA_FILE} says how it is cut"
            ) from exc

    def is_same(self, other: LocalTensor, reader: CheckpointReader) -> bool:
        """Return whether another tensor has the same values; it reads the bytes if the files have no CRC of them."""
        one, two = self.payload, other.payload
        if one._replace(offset=0, crc=0) != two._replace(offset=0, crc=0):
            return False
        if one.crc and two.crc:
            return one.crc == two.crc
        crcs = [
            zlib.crc32(reader.read_range(t.file, t.payload.offset, t.payload.nbytes, t.file)) for t in (self, other)
        ]
        return crcs[0] == crcs[1]


@dataclass(frozen=True)
class Content:
    """The content of a file.

    Attributes:
        values: The values by path, which begins with the item's key; each tensor is a :class:`LocalTensor`.
        names: The names of an optimizer's parameters by their numbers, if the file has both.
        crc: Tells the files of two saves apart, as far as little reading can: of an archive, the CRC of its members'
            CRC-32, which few writers leave out; of a safetensors file, that of its header and of 4 KiB.
    """

    values: dict[Path, Any]
    names: dict[Any, str]
    crc: int

    @cached_property
    def by_key(self) -> dict[str, Any]:
        """The values by key: the parts of the path, joined by dots."""
        return {join_path(path): value for path, value in self.values.items()}

    def rename(self, path: Path) -> Path:
        """Return a path with the name of a parameter instead of its number."""
        number = path[2:3]
        if path[1:2] == ("state",) and number and number[0] in self.names:
            return (*path[:2], self.names[number[0]], *path[3:])
        return path


def join_path(path: Path) -> str:
    """Return the key of a path."""
    return ".".join(map(str, path))


def find_files(reader: CheckpointReader, declared: Mapping[str, DeclaredItem]) -> dict[str, dict[int, Layout]]:
    """Return the files of all items by item and rank: those of the metadata, and all others by their names.

    A file ``<item>_<rank>.<suffix>`` is the item's on that rank, if there are files of all ranks from 0 on. Files of
    several ranks, but not of all, are a CorruptCheckpointError. Any other file with a known suffix, such as
    ``<item>.pt``, is an item that one rank has written; a warning names one of an item that has files already.
    """
    found = {key: dict(item.layouts) for key, item in declared.items()}
    named = {METADATA_FILE, *(layout.file for item in declared.values() for layout in item.layouts.values())}
    by_rank: dict[tuple[str, str], dict[int, str]] = {}
    others: list[str] = []
    for name in sorted(entry.name for entry in reader.place.iterdir() if not entry.is_dir()):
        if name in named:
            continue
        match = _NAME.fullmatch(name)
        if match is not None:
            by_rank.setdefault((match["item"], match["suffix"]), {})[int(match["rank"])] = name
        elif name.rpartition(".")[2] in _FORMS:
            others.append(name)
    ranks = max([*(len(files) for files in found.values()), *(len(files) for files in by_rank.values())], default=0)
    for (item, suffix), files in by_rank.items():
        if 1 < len(files) < ranks and set(files) < set(range(ranks)):
            lost = min(set(range(ranks)) - set(files))
            raise CorruptCheckpointError(
                f"{reader.directory / f'{item}_{lost}.{suffix}'} is missing: {ranks} ranks saved, and {len(files)} "
                f"files of {item!r} exist. Copy it from the original checkpoint"
            )
        if set(files) == set(range(len(files))) and item not in found:
            found[item] = {rank: Layout(files[rank], _FORMS.get(suffix, "raw")) for rank in sorted(files)}
        else:
            others += files.values()
    for name in others:
        _add_one_file(name, found, reader)
    return found


def _add_one_file(name: str, found: dict[str, dict[int, Layout]], reader: CheckpointReader) -> None:
    """Add the item of a file that one rank has written; a warning says so if the item has files already."""
    item, _, suffix = name.rpartition(".")
    if suffix not in _FORMS or not item:
        return
    layouts = found.setdefault(item, {0: Layout(name, _FORMS[suffix])})
    first = layouts[min(layouts)].file
    if first != name:
        logger.warning(
            "%s: %s is not read, since the item %r has %s: move one of them to another folder to load both",
            reader.directory,
            name,
            item,
            first,
        )


def read_content(reader: CheckpointReader, item: str, layout: Layout, allow_globals: Iterable[Any]) -> Content:
    """Read the structure of an item's file; return its values; tensors are located, not read.

    Its pickle may name ``allow_globals``, in addition to the plain ones. At another global nothing is run.
    """
    source = f"{reader.directory / layout.file}"
    if layout.form == "safetensors":
        return _read_safetensors(reader, item, layout.file, source)
    if layout.form == "raw":
        data = reader.read(layout.file)
        return Content({(item,): data}, {}, zlib.crc32(data))
    try:
        if layout.form == "json":
            data = reader.read(layout.file)
            crc = zlib.crc32(data)
            loaded = json.loads(str(data, "utf-8"))  # of bytes it would guess the encoding
        else:
            archive = Archive.of_file(reader, layout.file)
            crc = zlib.crc32(repr([member.crc for member in archive.members.values()]).encode())
            loaded = archive.describe(allow_globals)
        names: dict[Any, str] = {}
        values: dict[Path, Any] = {}
        flattener = _Flattener(reader.size(layout.file))
        for path, value in flattener.flatten(_name_parameters(loaded, names), (item,)):
            if path in values:
                raise CorruptCheckpointError(f"two values have the key {join_path(path)!r}")
            values[path] = _locate(value, layout.file) if isinstance(value, LazyTensor) else value
        return Content(values, names, crc)
    except CheckpointingException as exc:
        if str(exc).startswith(source):
            raise
        raise type(exc)(f"{source}: {exc}") from exc
    except (TypeError, ValueError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{source} is damaged: {exc}") from exc


def _read_safetensors(reader: CheckpointReader, item: str, file: str, source: str) -> Content:
    """Return the tensors of a safetensors file, located, and the CRC of its header and samples of its bytes."""
    header, size = read_header(reader, file), reader.size(file)
    tensors: dict[Path, Any] = {(item, name): tensor for name, tensor in _parse_safetensors(header, file, size, source)}
    crc = zlib.crc32(header)
    for number in range(1, _SAMPLES + 1):
        start = max(size * number // _SAMPLES - _SAMPLE_BYTES, 0)
        crc = zlib.crc32(reader.read_range(file, start, min(_SAMPLE_BYTES, size - start), source), crc)
    return Content(tensors, {}, crc)


def _parse_safetensors(header: bytes, file: str, size: int, source: str) -> Iterator[tuple[str, LocalTensor]]:
    for name, tensor in parse_head(header, size, source)[0].items():
        if tensor.dtype is None:
            raise CorruptCheckpointError(f"{source}: this torch has no dtype {tensor.kind} for {name!r}")
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        strides = row_major_strides(tensor.shape)
        yield name, LocalTensor(file, StoredPayload(tensor.dtype, tensor.shape, strides, 0, tensor.start, nbytes))


def _locate(tensor: LazyTensor, file: str) -> LocalTensor:
    refuse_expanded(tensor.payload, "a tensor")
    return LocalTensor(file, tensor.payload, tensor.global_shape, tensor.spec)


def _name_parameters(loaded: Any, names: dict[Any, str]) -> Any:
    """Return an optimizer's state as torch's ``get_optimizer_state_dict`` names it, if its parameters have names.

    ``Optimizer.state_dict`` numbers the parameters, and has their names in ``param_names`` if the optimizer was given
    any. torch_checkpointing can replace the numbers in ``state``, and leaves ``params`` out then. Numbers stay where
    two parameters have one name, as those of two models may. ``names`` gets the name of each number. Where ``params``
    has names, as of ``get_optimizer_state_dict``, ``state`` has them, too.
    """
    groups = loaded.get("param_groups") if isinstance(loaded, dict) else None
    states = loaded.get("state") if isinstance(loaded, dict) else None
    if not isinstance(groups, list) or not isinstance(states, dict):
        return loaded
    if not all(isinstance(group, dict) and isinstance(group.get("param_names"), list) for group in groups):
        return loaded
    bare = [{option: value for option, value in group.items() if option != "param_names"} for group in groups]
    if all(isinstance(name, str) for group in groups for name in group.get("params", [0])):
        return {**loaded, "param_groups": bare}
    every = [name for group in groups for name in group["param_names"]]
    if len(set(every)) < len(every):
        return loaded
    for group in groups:
        if "params" in group:
            names.update(zip(group["params"], map(str, group["param_names"]), strict=True))
    named = [{**rest, "params": group["param_names"]} for rest, group in zip(bare, groups, strict=True)]
    rest = {key: value for key, value in loaded.items() if key != "_optimizer_state_format_version"}
    return {**rest, "state": {names.get(key, key): state for key, state in states.items()}, "param_groups": named}


class _Flattener:
    """Takes state dicts apart into values with their paths; the file's ``size`` in bytes limits their number.

    It enters dicts whose keys are texts, lists of containers, and any container with tensors. Other containers are
    values as they are, with their types and their keys.
    """

    def __init__(self, size: int) -> None:
        self._left = _FREE_VALUES + _VALUES_PER_BYTE * size
        self._with_tensors: dict[int, bool] = {}

    def flatten(self, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        """Yield the values with their paths."""
        self._left -= 1
        if self._left < 0:
            raise CorruptCheckpointError("its pickle repeats its own parts too often")
        if isinstance(value, dict) and value and (all(type(key) is str for key in value) or self._has_tensor(value)):
            for key, part in value.items():
                yield from self.flatten(part, (*path, DictKey(key) if type(key) is int else str(key)))
        elif isinstance(value, (list, tuple)) and (_has_container(value) or self._has_tensor(value)):
            for index, part in enumerate(value):
                yield from self.flatten(part, (*path, index))
        else:
            yield path, value

    def _has_tensor(self, value: Any) -> bool:
        """Return whether a value is a tensor, or has one in it; each container is visited once."""
        if not isinstance(value, (dict, list, tuple)):
            return isinstance(value, LazyTensor)
        if id(value) not in self._with_tensors:
            self._with_tensors[id(value)] = False  # a container that holds itself
            parts = value.values() if isinstance(value, dict) else value
            self._with_tensors[id(value)] = any(map(self._has_tensor, parts))
        return self._with_tensors[id(value)]


def _has_container(values: Any) -> bool:
    return type(values) is list and any(isinstance(part, (dict, list)) for part in values)
