"""The content of a checkpoint, put together from the files of all ranks."""

from __future__ import annotations

import logging
import pickle
import re
import weakref
import zlib
from dataclasses import dataclass
from functools import cached_property
from operator import add, eq, le
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.planning import Box, BoxFinder, find_uncovered
from shardckpt_torch_checkpointing.files import LocalTensor, find_files, join_path, read_content
from shardckpt_torch_checkpointing.metadata import METADATA_FILE, Chunk, drop_copies, parse_metadata
from shardckpt_torch_dist import NestedState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_checkpointing.files import Content, Path
    from shardckpt_torch_checkpointing.metadata import DeclaredItem

logger = logging.getLogger(__name__)

#: The key under which torchtitan's data loader has its state.
_LOADER_KEY = re.compile(r"dp_rank_[0-9]+")

_PARTS = (
    "%s: the ranks have saved different tensors or keys in %r, and no %s says that they are parts of one: they are "
    "loaded as an object of each rank. If they are parts, copy %s of an earlier save of the training into the directory"
)


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor.

    Attributes:
        key: Its key: the item's and the path in it, joined by dots.
        path: The path under which the files have it.
        shape: Its global shape.
        chunks: Its boxes in the files, each once.
        copies: Ranks that hold a full copy not yet compared; empty for cut tensors.
        is_exact: Whether a local tensor has nothing but its chunks.
    """

    key: str
    path: Path
    dtype: torch.dtype
    shape: Ints
    chunks: list[Chunk]
    copies: Ints = ()
    is_exact: bool = True

    @cached_property
    def local_shapes(self) -> dict[int, Ints]:
        """The least shape of each rank's local tensor."""
        found: dict[int, Ints] = {}
        for box, place, rank in self.chunks:
            end = tuple(map(add, place, box.shape))
            found[rank] = tuple(map(max, end, found.get(rank, end)))
        return found

    @cached_property
    def finder(self) -> BoxFinder:
        """Finds the chunks that a box touches."""
        return BoxFinder([chunk.box for chunk in self.chunks])


@dataclass(frozen=True)
class Region:
    """A box of a tensor that is in one file.

    It begins at ``start`` in the tensor of the file, along every axis; ``box`` is in the global tensor.
    """

    local: LocalTensor
    start: Ints
    box: Box


class Listing:
    """The files of a checkpoint, and their description in the metadata; no other file is read.

    ``metadata`` is empty if there is none. ``declared`` are the items whose tensors it describes, ``files`` the file of
    each item on each rank.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.metadata = reader.read(METADATA_FILE) if reader.has(METADATA_FILE) else b""
        source = str(reader.directory / METADATA_FILE)
        declared = parse_metadata(self.metadata, source) if self.metadata else {}
        self.files = find_files(reader, declared)
        # of an item without tensors, as the state of SGD is, the metadata says nothing: its files have all of it
        self.declared = {key: item for key, item in declared.items() if item.tensors}


class Index:
    """Everything that a checkpoint stores.

    Of an item that the metadata describes, the structure of as many files is read as together have all its tensors; the
    others are opened when a tensor is read that is in them. Of any other item, the structure of all files is read.
    Pickles may name ``allow_globals``, in addition to the plain classes and functions; at another one nothing is run.

    Attributes:
        files: The file of each item on each rank.
        tensors: The tensors, by key.
        values: The other values, by path; those on which all ranks agree.
        per_rank: For each item that is an object of each rank: its content on each rank, by path.
        nbytes: Bytes of all files.
        identity: Identifies the save, to compare it across ranks: the sizes of all files, and :attr:`Content.crc` of
            the files that were read.
    """

    def __init__(self, reader: CheckpointReader, allow_globals: tuple[Any, ...]) -> None:
        # the reader keeps this index: a reference back would keep the checkpoint's directory open
        self._reader: CheckpointReader = weakref.proxy(reader)
        self._allow_globals = allow_globals
        listing = Listing(reader)
        self.files = listing.files
        sizes = {layout.file: reader.size(layout.file) for ranks in self.files.values() for layout in ranks.values()}
        self.nbytes = sum(sizes.values())
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[Path, Any] = {}
        self.per_rank: dict[str, dict[int, dict[Path, Any]]] = {}
        self._conflicts: set[Path] = set()
        crcs: dict[str, int] = {}
        for item, layouts in self.files.items():
            declared = listing.declared.get(item)
            ranks = sorted(layouts) if declared is None else declared.holders
            contents = {rank: self.content(item, rank) for rank in ranks}
            crcs.update((layouts[rank].file, content.crc) for rank, content in contents.items())
            self._add_item(item, contents, declared)
        # not the times or inodes of files: nodes may see others of one file on a shared file system
        self.identity = repr((zlib.crc32(listing.metadata), sorted(sizes.items()), sorted(crcs.items()))).encode()

    @cached_property
    def nested(self) -> NestedState:
        """The values and tensors as objects."""
        paths = {key: tensor.path for key, tensor in self.tensors.items()}
        return NestedState([*self.values, *self._conflicts], paths, self._read_value)

    def content(self, item: str, rank: int) -> Content:
        """Return the structure of an item's file; it is read once."""
        layout = self.files[item][rank]
        return self._reader.parsed(layout.file, lambda: read_content(self._reader, item, layout, self._allow_globals))

    def find_regions(self, key: str, wanted: Box) -> list[Region]:
        """Return where the elements of a box of a tensor are; the box may reach beyond the tensor.

        A file that has another tensor than is declared is a CorruptCheckpointError.
        """
        tensor = self.tensors[key]
        return [
            self.locate(tensor, tensor.chunks[number], overlap) for number, overlap in tensor.finder.touching(wanted)
        ]

    def check_stored(self, key: str, wanted: Box) -> None:
        """Raise CorruptCheckpointError if elements of a box of a tensor are not stored."""
        tensor = self.tensors[key]
        hole = find_uncovered(wanted, tensor.finder) if wanted.volume else None
        if hole is not None:
            raise CorruptCheckpointError(
                f"{self._reader.directory}: of tensor {key!r} of shape {tensor.shape}, the elements at {hole.offset} "
                f"of shape {hole.shape} are in no file: the file of a rank is missing"
            )

    def check_copies(self, keys: Iterable[str], share: int, shares: int) -> None:
        """Compare the plain tensors that several ranks have saved, of all items with requested ones.

        torch_checkpointing declares every plain tensor as replicated, also the local parts of objects that are no
        DTensor. Here are compared the files of rank ``share``, ``share + shares`` and so on. Different values are a
        ShardingError.
        """
        requested = [self.tensors[key] for key in keys if key in self.tensors]
        items = {tensor.path[0] for tensor in requested if self._is_copied(tensor)}
        for tensor in self.tensors.values() if items else ():
            if tensor.path[0] in items and self._is_copied(tensor):
                self._compare_copies(tensor, share, shares)

    def _is_copied(self, tensor: StoredTensor) -> bool:
        if len(tensor.copies) <= 1 or not tensor.chunks:
            return False
        local = self.content(str(tensor.path[0]), tensor.chunks[0].rank).by_key.get(tensor.key)
        return isinstance(local, LocalTensor) and local.global_shape is None

    def _compare_copies(self, tensor: StoredTensor, share: int, shares: int) -> None:
        item, first = str(tensor.path[0]), tensor.chunks[0].rank
        one = self.content(item, first).by_key[tensor.key]
        for rank in tensor.copies:
            if rank == first or rank % shares != share:
                continue
            other = self.content(item, rank).by_key.get(tensor.key)
            if other is not None and not _is_same(one, other, self._reader):
                raise ShardingError(
                    f"{self._reader.directory}: the ranks {first} and {rank} have saved different values of "
                    f"{tensor.key!r}, a plain tensor, which {METADATA_FILE} declares as equal on all ranks: a part of "
                    "a tensor must be saved as a DTensor. Read one rank's values from its file, "
                    f"{self.files[item][rank].file}"
                )

    def locate(self, tensor: StoredTensor, chunk: Chunk, overlap: Box) -> Region:
        """Return where a box of a tensor is in the file that has a chunk of it.

        A file that has no such tensor, or another one than is declared, is a CorruptCheckpointError.
        """
        item = str(tensor.path[0])
        local = self.content(item, chunk.rank).by_key.get(tensor.key)
        file = self._reader.directory / self.files[item][chunk.rank].file
        if not isinstance(local, LocalTensor):
            raise CorruptCheckpointError(f"{file} has no tensor {tensor.key!r}, which {METADATA_FILE} lists")
        least = tensor.local_shapes[chunk.rank]
        is_there = len(local.shape) == len(least) and all(map(eq if tensor.is_exact else le, least, local.shape))
        if local.dtype != tensor.dtype or not is_there:
            raise CorruptCheckpointError(
                f"{file}: {tensor.key!r} is of {local.dtype} and shape {local.shape}, and {METADATA_FILE}, or the mesh "
                f"in the file, says {tensor.dtype} and {least}"
            )
        steps = zip(overlap.offset, chunk.box.offset, chunk.place, strict=True)
        return Region(local, tuple(first - offset + place for first, offset, place in steps), overlap)

    def _add_item(self, item: str, contents: dict[int, Content], declared: DeclaredItem | None) -> None:
        """Add the declared tensors of an item, then whatever else its files have."""
        first = next(iter(contents.values()), None)
        known = self._add_declared(item, declared, first) if declared is not None and first is not None else set()
        others: dict[Path, dict[int, Any]] = {}
        for rank, content in contents.items():
            for path, value in content.values.items():
                if join_path(path) not in known:
                    others.setdefault(path, {})[rank] = value
        inner = {path[:end] for path in others for end in range(1, len(path))}
        for path in inner & others.keys():  # a stage without parameters has an empty dict where another has parts
            if all(isinstance(value, dict) and not value for value in others[path].values()):
                del others[path]
        # of the ranks that have the path
        different = {path for path, by_rank in others.items() if path in inner or not self._are_same(by_rank)}
        uneven = {path: by_rank for path, by_rank in others.items() if len(by_rank) < len(contents)}
        is_cut = bool(known) or any(t.global_shape is not None for found in others.values() for t in _tensors(found))
        is_per_rank = bool(different) or (not _has_floats(others) and not _are_of_loaders(uneven))
        if is_cut or not is_per_rank:
            self._add_others(others, different, inner)
            return
        self.per_rank[item] = {rank: content.values for rank, content in contents.items()}
        if _has_floats({path: others[path] for path in (*different, *uneven)}):
            logger.warning(_PARTS, self._reader.directory, item, METADATA_FILE, METADATA_FILE)

    def _add_others(self, others: dict[Path, dict[int, Any]], different: set[Path], inner: set[Path]) -> None:
        """Add the values that the metadata does not declare."""
        for path, found in others.items():
            if path in inner:
                raise CorruptCheckpointError(
                    f"{self._reader.directory}: {join_path(path)!r} is a value on one rank and has parts on another"
                )
            if _tensors(found):
                self._add_undeclared(path, found)
            elif path not in different:
                self.values[path] = next(iter(found.values()))
            elif path[-3:-2] == ("param_groups",) and path[-1] == "params":
                # pipeline stages have the parameters of a group between them
                self.values[path] = list(dict.fromkeys(name for names in found.values() for name in names))
            else:
                self._conflicts.add(path)

    def _add_declared(self, item: str, declared: DeclaredItem, content: Content) -> set[str]:
        """Add the tensors that the metadata declares, and return their keys."""
        known = set()
        for nested, found in declared.tensors.items():
            path = content.rename((item, *nested))
            key = join_path(path)
            self._add_tensor(
                StoredTensor(
                    key, path, found.dtype, found.shape, found.chunks, copies=found.copies, is_exact=found.is_exact
                )
            )
            known.add(key)
        return known

    def _add_undeclared(self, path: Path, found: dict[int, Any]) -> None:
        """Add a tensor whose cut the files themselves say, or that every file has."""
        tensors = {rank: value for rank, value in found.items() if isinstance(value, LocalTensor)}
        first = next(iter(tensors.values()))
        kinds = {(t.dtype, t.global_shape or t.shape, t.global_shape is None) for t in tensors.values()}
        if len(tensors) != len(found) or len(kinds) != 1:
            raise CorruptCheckpointError(
                f"{self._reader.directory}: the files of the ranks have different tensors {join_path(path)!r}"
            )
        if first.global_shape is not None:
            chunks = drop_copies([chunk for rank, tensor in tensors.items() for chunk in tensor.cut(rank)])
            self._add_tensor(StoredTensor(join_path(path), path, first.dtype, first.global_shape, chunks))
            return
        if not self._are_same(tensors):
            raise CorruptCheckpointError(
                f"{self._reader.directory}: the ranks have saved different values of the tensor {join_path(path)!r}, "
                f"and {METADATA_FILE} does not say how it is cut"
            )
        full = Chunk(Box.from_shape(first.shape), (0,) * len(first.shape), next(iter(tensors)))
        self._add_tensor(StoredTensor(join_path(path), path, first.dtype, first.shape, [full]))

    def _add_tensor(self, tensor: StoredTensor) -> None:
        if tensor.key in self.tensors:
            raise CorruptCheckpointError(f"{self._reader.directory}: two tensors have the key {tensor.key!r}")
        self.tensors[tensor.key] = tensor

    def _are_same(self, by_rank: Mapping[int, Any]) -> bool:
        first, *others = by_rank.values()
        return all(_is_same(first, other, self._reader) for other in others)

    def _read_value(self, path: Path) -> Any:
        if path in self._conflicts:
            raise ShardingError(
                f"{self._reader.directory}: the ranks have saved different values of {join_path(path)!r}, in an item "
                "with parts of tensors: of these, none can be chosen"
            )
        return self.values[path]


def _has_floats(by_path: Mapping[Path, Mapping[int, Any]]) -> bool:
    """Return whether an item has floating-point tensors, as models and optimizers do.

    Pipeline stages have those between them. States of random generators and data loaders, which are each rank's own,
    have integers.
    """
    return any(tensor.dtype.is_floating_point for found in by_path.values() for tensor in _tensors(found))


def _are_of_loaders(uneven: Iterable[Path]) -> bool:
    """Return whether all paths that some ranks lack have torchtitan's key of a data loader, which names its rank."""
    return all(_LOADER_KEY.fullmatch(str(key)) for path in uneven for key in path[1:2])


def _tensors(found: Mapping[int, Any]) -> list[LocalTensor]:
    return [value for value in found.values() if isinstance(value, LocalTensor)]


def _is_same(one: Any, other: Any, reader: CheckpointReader) -> bool:
    if isinstance(one, LocalTensor) and isinstance(other, LocalTensor):
        return one.global_shape is not None or one.is_same(other, reader)
    if type(one) is not type(other):
        return False
    try:
        equal = one == other
        if bool(equal.all() if hasattr(equal, "all") else equal):
            return True
        return pickle.dumps(one) == pickle.dumps(other)  # NaN does not equal itself
    except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError):
        return False  # a value that cannot be compared counts as different
