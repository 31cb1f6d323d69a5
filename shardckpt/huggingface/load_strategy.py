"""A load strategy for Hugging Face folders, so that they are loaded by the same steps as a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.chunks.load import ChunkLoadStrategy, StoredChunk
from shardckpt.distributed.comm import Comm
from shardckpt.errors import KeyMismatchError, ShapeMismatchError, ShardingError
from shardckpt.huggingface.check import check_weights
from shardckpt.huggingface.dtypes import is_castable, is_unpacked_float
from shardckpt.huggingface.scaled import SCALE_ENDING, Scaled, block_size, refuse_other_schemes
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import Box, shard_parts, with_memory
from shardckpt.planning.coverage import find_hole, find_overlap, find_uncovered
from shardckpt.planning.lookup import BoxFinder
from shardckpt.plugins.key_mapping import KeyMapEntry, MapsPart, get_key_map_entries
from shardckpt.storage.scatter import StoredArray, read_box
from shardckpt.strategy import LoadContext, StoredBox, StoredColumns, StoredFile, find_error
from shardckpt.tensors.wrappers import is_quantized

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import torch

    from shardckpt.chunks.load import ChunkRead
    from shardckpt.errors import CheckpointingException
    from shardckpt.huggingface.folder import Folder
    from shardckpt.manifest.names import Rescue
    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.planning.boxes import FlatPart, Ints
    from shardckpt.plugins.key_mapping import KeyMapping
    from shardckpt.storage.reader import CheckpointReader


class HuggingFaceLoadStrategy(ChunkLoadStrategy):
    """Reads requested shards from a folder.

    ``mapping`` maps keys, without the prefix, to the folder's names. ``absent`` are the requested keys that the folder
    lacks: such a tensor stays as it is, or, if it is tied to one that the folder has, is filled with that.
    """

    backend = "huggingface"
    version = 1
    reads = "folders of safetensors files"

    def __init__(self, folder: Folder, mapping: KeyMapping, prefix: str, requested: Sequence[ShardedBase]) -> None:
        #: The content of the folder.
        self.folder = folder
        shards = [shard for shard in requested if isinstance(shard, ShardedTensor)]
        self._requested = {shard.key: shard for shard in shards}
        #: Key map entries by key; none of keys that the folder lacks.
        self._links: dict[str, Sequence[KeyMapEntry]] = {}
        #: The results of :meth:`_fit_links`, by key and ``allow_shape_mismatch``.
        self._fitted: dict[tuple[str, bool], tuple[Sequence[KeyMapEntry], BoxFinder]] = {}
        #: Whether the folder has a part of the model, and the rest stays as it is.
        self.is_partial = isinstance(mapping, MapsPart)
        lacking: dict[str, list[str]] = {}
        # by key: a tensor of hundreds of experts that is read box by box has as many shards, and many entries
        for key, shard in self._requested.items():
            if not key.startswith(prefix):
                raise KeyMismatchError(f"the requested key {key!r} does not begin with the prefix {prefix!r}")
            links = get_key_map_entries(mapping, key[len(prefix) :], tuple(shard.global_shape))
            names = [link.name for link in links if link.name not in folder.tensors]
            self._links[key] = () if names else links
            if not self._links[key]:
                lacking[key] = names if links or self.is_partial else [key]
        self.absent = set(lacking)
        # a tied weight may be stored under the other name only: it is filled if that one is
        filled = {_memory_key(shard) for shard in shards if shard.key not in lacking}
        #: The absent keys that are missing: neither tied to a key that the folder has, nor without elements here.
        self._missing = {
            s.key for s in shards if s.key in lacking and _memory_key(s) not in filled and 0 not in s.data_shape
        }
        #: The names of the tensors that these need, by key; without keys that need none.
        self.missing = {key: lacking[key] for key in self._missing if lacking[key]}
        self._block = block_size(folder.config)

    @property
    def used(self) -> set[str]:
        """The names of the folder's tensors that fill requested ones."""
        return {link.name for links in self._links.values() for link in links}

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: load as the base does, once for shards of the same memory; absent ones stay unchanged."""
        with context.comm.local_phase("planning the load"):
            tensors = [shard for shard in wanted if isinstance(shard, ShardedTensor)]
            for shard in {shard.key: shard for shard in tensors if shard.key not in self.absent}.values():
                self._fit_links(shard)  # before memory is taken
            filled = [with_memory(shard) for shard in tensors]
            # of tied ones the first that the folder has
            once = {_memory_key(s): s for s in reversed(filled) if s.key not in self.absent}
        super().load([*once.values()], context)
        return [shard.data for shard in filled]

    def list_chunks(self, context: LoadContext) -> list[StoredChunk]:  # noqa: ARG002 - the headers have been read
        """Return the boxes of the requested tensors that the folder has: each a tensor of it, or a part of one."""
        return [
            StoredChunk(key, shard.dtype, tuple(shard.global_shape), link.box, self._file_of(link.name))
            for key, shard in self._requested.items()
            for link in self._links[key]
        ]

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Return which file holds which box of each requested tensor; a reader may serve several requests."""
        chunks = self.list_chunks(LoadContext(reader, Comm(alone=True)))
        return (StoredBox(chunk.key, *chunk.box, chunk.file) for chunk in chunks)

    def match(
        self,
        shard: ShardedTensor,
        context: LoadContext,  # noqa: ARG002 - the headers have been read
    ) -> Mapping[FlatPart, Sequence[tuple[StoredChunk, Box]]]:
        """Return the tensors of the folder that fill each part of a shard, with their values in its dtype."""
        links, finder = self._fit_links(shard)
        return {
            part: [(self._make_chunk(shard, links[number]), common) for number, common in finder.touching(part.box)]
            for part in shard_parts(shard)
            if part.box.volume
        }

    def read_part(self, read: ChunkRead, context: LoadContext) -> None:
        """Fill a tensor from one of the folder."""
        link, source = read.chunk.source
        start = link.to_folder(Box(read.start, tuple(read.target.shape)).moved(link.box.offset)).offset
        # leading axes of extent 1 (one expert of many) are absent in the folder's tensor
        target = read.target[(0,) * link.dropped]
        target = target.transpose(-1, -2) if link.transposed else target
        if isinstance(source, Scaled):
            source.read(context.reader, start, target, read.chunk.key)
        else:
            read_box(context.reader, source, start, target, read.chunk.key)

    def load_common(self, context: LoadContext) -> StateDict:  # noqa: ARG002 - a folder has none
        """Return an empty dict: a folder has tensors only."""
        return {}

    def list_columns(self, context: LoadContext) -> StoredColumns:  # noqa: ARG002 - the headers have been read
        """Return the requested tensors that the folder can fill, in the order of the request."""
        keys = [key for key in self._requested if key not in self._missing]
        stored = [self._describe_stored(key) for key in keys]
        return StoredColumns(keys, [dtype for dtype, _ in stored], [shape for _, shape in stored], (), {})

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:  # noqa: ARG002 - the headers have been read
        """Return the files of weights, with the tensors in each."""
        names, faults = self.folder.names, self.folder.faults
        stored = {key: (tensor.file, tensor.stop or tensor.start) for key, tensor in self.folder.tensors.items()}
        ends: dict[str, dict[str, int | None]] = {file: {} for file in names}
        for key, (file, end) in (*stored.items(), *self.folder.lost.items()):
            ends.setdefault(file, {})[key] = end
        found = []
        for file, keys in ends.items():
            known = {key: end for key, end in keys.items() if end is not None}
            least = max(known.values(), default=0)
            found.append(StoredFile(names.get(file, file), least, tuple(keys), known, faults.get(file, "")))
        return found

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each file by name, or None: its header is read again, and compared with its length."""
        return {file.name: find_error(check_weights, reader.place / file.name) for file in self.list_files(reader)}

    @property
    def library(self) -> str:
        """The name of the folder's writer; ``""`` if unknown."""
        return self.folder.library

    @property
    def rescue(self) -> Rescue:
        """The keys that the rescue that has written the folder left out."""
        return self.folder.rescue

    def _describe_stored(self, key: str) -> tuple[torch.dtype, Ints]:
        """Return the dtype and shape that the folder can fill a requested tensor with."""
        requested = self._requested[key]
        shape, dtype = tuple(requested.global_shape), requested.dtype
        links = self._links[key]
        if links:
            stored = self.folder.tensors[links[0].name]
            if _is_unchanged(links):
                shape = stored.shape
            # quantized tensors are read as the requested dtype; _source refuses tensors that cannot be cast
            if stored.dtype is not None and is_castable(stored.dtype) and is_castable(dtype):
                dtype = stored.dtype
        return dtype, shape

    def _make_chunk(self, shard: ShardedTensor, link: KeyMapEntry) -> StoredChunk:
        source = self._source(link.name, shard.dtype)
        array = source.weight if isinstance(source, Scaled) else source
        shape = tuple(shard.global_shape)
        return StoredChunk(shard.key, shard.dtype, shape, link.box, array.file, (link, source), array.offset)

    def _fit_links(self, shard: ShardedTensor) -> tuple[Sequence[KeyMapEntry], BoxFinder]:
        """Return the key map entries of a shard, and the finder of their boxes.

        They have all elements of its tensor, but of a part of the model, and with allow_shape_mismatch. They are the
        same for all shards of a tensor: a model with hundreds of experts has as many shards of it as entries.
        """
        at = shard.key, shard.allow_shape_mismatch
        if at not in self._fitted:
            links = self._links_at_stored_shape(shard)
            boxes = [link.box for link in links]
            finder = BoxFinder(boxes)
            may_lack = shard.allow_shape_mismatch or self.is_partial
            hole = None if may_lack else _find_lacking(tuple(shard.global_shape), boxes, finder)
            if hole is not None:
                raise ShardingError(
                    f"the mapping gives no tensor of the folder for the elements {hole} of {shard.key!r} of shape "
                    f"{tuple(shard.global_shape)}: its entries must have all of them, or the "
                    "ShardedTensor allow_shape_mismatch, by which the rest is zero"
                )
            self._fitted[at] = links, finder
        return self._fitted[at]

    def _links_at_stored_shape(self, shard: ShardedTensor) -> Sequence[KeyMapEntry]:
        """Return the key map entries of a shard; with allow_shape_mismatch, cut to the shape that is stored."""
        links = self._links[shard.key]
        for link in links:
            found = self.folder.tensors[link.name].shape
            if found != link.shape and not (shard.allow_shape_mismatch and _is_unchanged(links)):
                raise ShapeMismatchError(
                    f"{shard.key!r} of shape {tuple(shard.global_shape)} needs {link.name!r} of shape {link.shape}; "
                    f"the folder has {found}"
                )
        if not shard.allow_shape_mismatch or not _is_unchanged(links):
            return links
        found = self.folder.tensors[links[0].name].shape
        common = Box.from_shape([*map(min, found, links[0].shape)])
        return [links[0]._replace(shape=found, box=common)] if common.volume else []

    def _source(self, name: str, requested: torch.dtype) -> StoredArray | Scaled:
        """Return the source of a tensor's values in the requested dtype.

        A stored dtype that cannot be converted to it is a ShardingError.
        """
        stored = self._array(name)
        if stored.dtype == requested:
            return stored
        if not is_castable(requested) or not is_unpacked_float(stored.dtype):
            raise ShardingError(
                f"{name!r} is stored as {stored.dtype} and requested as {requested}: load it as {stored.dtype}"
            )
        # scales are plain numbers, whatever their dtype; 8-bit weights mean nothing without theirs
        if is_castable(stored.dtype) or name.endswith(SCALE_ENDING):
            return stored
        if name + SCALE_ENDING not in self.folder.tensors:
            refuse_other_schemes(name, self.folder.tensors, self.folder.config)
            return stored
        scaled = Scaled(stored, self._array(name + SCALE_ENDING), self._block)
        scaled.check(name)
        return scaled

    def _file_of(self, name: str) -> str:
        return self.folder.names[self.folder.tensors[name].file]

    def _array(self, name: str) -> StoredArray:
        found = self.folder.tensors[name]
        return StoredArray(self._file_of(name), found.start, found.find_dtype(name), found.shape)


def _find_lacking(shape: Ints, boxes: Sequence[Box], finder: BoxFinder) -> Box | None:
    """Return a box of elements that none of the boxes has, or None; two names of the folder may have the same ones."""
    if find_overlap(boxes) is None:  # nearly always, and far faster
        return find_hole(shape, boxes)
    return find_uncovered(Box.from_shape(shape), finder)


def _is_unchanged(links: Sequence[KeyMapEntry]) -> bool:
    """Return whether a key maps to one full tensor of the folder, not transposed."""
    return len(links) == 1 and not links[0].transposed and links[0].box.shape == links[0].shape


def _memory_key(shard: ShardedTensor) -> Hashable:
    """Return a key that is equal for shards of the same memory: tied weights."""
    if shard.data is None or is_quantized(shard.data) or not shard.data.numel():
        return shard.key
    position = tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.data.shape), shard.data.stride()
    return shard.data.data_ptr(), shard.data.device, shard.dtype, position
