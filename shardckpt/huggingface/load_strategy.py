"""Reading wanted shards from a Hugging Face folder, through the same steps as from a checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError, KeyMismatchError, ShapeMismatchError, ShardingError
from shardckpt.huggingface.dtypes import is_castable, is_real
from shardckpt.huggingface.scaled import SCALE_ENDING, Scaled, block_size, refuse_other_schemes
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box, intersect, part_view, shard_parts
from shardckpt.plugins import Link, links_of
from shardckpt.storage import StoredArray, read_box
from shardckpt.strategy import LoadStrategy
from shardckpt.tensors import is_quantized, synchronize_devices

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    import torch

    from shardckpt.huggingface.folder import Folder
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.planning import Ints
    from shardckpt.plugins import KeyMapping
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext


class _Read(NamedTuple):
    """A box of a tensor of the folder, and where it goes."""

    source: StoredArray | Scaled
    start: Ints
    target: torch.Tensor
    what: str

    @property
    def nbytes(self) -> int:
        """Bytes that are made of it."""
        return self.target.nbytes


class HuggingFaceLoadStrategy(LoadStrategy):
    """Reads what a folder has under the keys that are wanted.

    Args:
        folder: What it has.
        mapping: Of the keys, without the prefix.
        prefix: Before the wanted keys, where the folder's names have none.
        wanted: The shards that will be asked for.
    """

    backend = "huggingface"
    version = 1
    reads = "folders of safetensors files"

    def __init__(self, folder: Folder, mapping: KeyMapping, prefix: str, wanted: Sequence[ShardedBase]) -> None:
        self._folder = folder
        self._mapping = mapping
        self._prefix = prefix
        shards = [shard for shard in wanted if isinstance(shard, ShardedTensor)]
        self._wanted = {shard.key: tuple(shard.global_shape) for shard in shards}
        self._dtypes = {shard.key: shard.dtype for shard in shards}
        self._absent = {key for key in self._wanted if self._lacks(key)}
        filled = {_identity(shard) for shard in shards if shard.key not in self._absent}
        unfilled = [s for s in shards if s.key in self._absent and _identity(s) not in filled and 0 not in s.data_shape]
        #: Wanted keys that nothing fills; the others that are not there are tied to one that is, or empty on this rank.
        self._missing = {shard.key for shard in unfilled}
        self._block = block_size(folder.config)

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Plan, and once every rank has a sound plan, read into the destinations."""
        tensors = [shard for shard in wanted if isinstance(shard, ShardedTensor)]
        with context.comm.collective_phase("planning the load"):
            filled = [_with_memory(shard) for shard in tensors]
            once = {_identity(shard): shard for shard in reversed(filled)}  # of tied ones the first
            reads = [read for shard in once.values() for read in self._reads(shard)]
        with context.comm.collective_phase("reading shards"):
            _clear(filled)
            reader = context.reader
            synchronize_devices(read.target for read in reads)
            reader.map(lambda read: _fill(reader, read), sorted(reads, key=_place), lambda read: read.nbytes)
        return [shard.data for shard in filled]

    def load_common(self, context: LoadContext) -> StateDict:  # noqa: ARG002 - a folder has none
        """Nothing: a folder has tensors only."""
        return {}

    def load_index(self, context: LoadContext) -> list[ShardedBase]:  # noqa: ARG002 - the headers have been read
        """The wanted tensors that are there."""
        found = self._wanted.keys() - self._missing
        return [ShardedTensor.whole(key, self._dtype(key), self._shape(key)) for key in found]

    def missing(self) -> list[str]:
        """What the wanted tensors need and the folder lacks, by its names."""
        names = {name for key in self._missing for name in self._lacks(key)}
        return sorted(names)

    def _lacks(self, key: str) -> list[str]:
        """The folder's tensors that a wanted one needs, and that are not there."""
        links = self._links(key)
        return [link.name for link in links if link.name not in self._folder.tensors] if links else [key]

    def _links(self, key: str) -> Sequence[Link]:
        if not key.startswith(self._prefix):
            raise KeyMismatchError(f"the wanted key {key!r} does not begin with the prefix {self._prefix!r}")
        return links_of(self._mapping, key[len(self._prefix) :], self._wanted[key])

    def _shape(self, key: str) -> Ints:
        """The global shape of a wanted tensor in the folder: the wanted one where it is cut into several there."""
        links = self._links(key)
        if key in self._absent or not _is_itself(links):
            return self._wanted[key]
        return self._folder.tensors[links[0].name].tensor.shape

    def _dtype(self, key: str) -> torch.dtype:
        """The dtype of a wanted tensor in the folder, among those that are cast; else the wanted one.

        What is quantized is not what it stands for, and what cannot be cast is refused by :meth:`_source`.
        """
        wanted = self._dtypes[key]
        links = self._links(key) if key not in self._absent else ()
        stored = self._folder.tensors[links[0].name].tensor.dtype if links else None
        return stored if stored is not None and is_castable(stored) and is_castable(wanted) else wanted

    def _reads(self, shard: ShardedTensor) -> Iterator[_Read]:
        """What fills a shard; nothing if it is tied to another, or empty."""
        for link in self._true_links(shard):
            source = self._source(link.name, shard.dtype)
            for part in shard_parts(shard):
                common = intersect(part.box, link.box)
                if common is None:
                    continue
                target = part_view(shard, part)[common.within(part.box)][(0,) * link.dropped]
                target = target.transpose(-1, -2) if link.transposed else target
                yield _Read(source, link.to_hub(common).offset, target, shard.key)

    def _true_links(self, shard: ShardedTensor) -> Sequence[Link]:
        """The links of a shard, by the shapes that the folder's tensors have."""
        links = self._links(shard.key) if shard.key not in self._absent else ()
        for link in links:
            found = self._folder.tensors[link.name].tensor.shape
            if found != link.shape and not (shard.allow_shape_mismatch and _is_itself(links)):
                raise ShapeMismatchError(
                    f"{shard.key!r} of shape {tuple(shard.global_shape)} needs {link.name!r} of shape {link.shape}; "
                    f"the folder has {found}"
                )
        if not shard.allow_shape_mismatch or not _is_itself(links):
            return links
        return _at_true_shape(links[0], self._folder.tensors[links[0].name].tensor.shape)

    def _source(self, name: str, wanted: torch.dtype) -> StoredArray | Scaled:
        """What gives the values of a tensor in a dtype.

        Raises:
            ShardingError: nothing does.
        """
        stored = self._array(name)
        if stored.dtype == wanted:
            return stored
        if not is_castable(wanted) or not is_real(stored.dtype):
            raise ShardingError(
                f"{name!r} is stored as {stored.dtype} and wanted as {wanted}: load it as {stored.dtype}, which it has"
            )
        if is_castable(stored.dtype) or name.endswith(SCALE_ENDING):
            return stored
        if name + SCALE_ENDING not in self._folder.tensors:
            refuse_other_schemes(name, self._folder.tensors, self._folder.config)
            return stored
        scaled = Scaled(stored, self._array(name + SCALE_ENDING), self._block)
        scaled.check(name)
        return scaled

    def _array(self, name: str) -> StoredArray:
        file, tensor = self._folder.tensors[name]
        if tensor.dtype is None:
            raise CorruptCheckpointError(f"{name!r} in {file} has the dtype {tensor.kind}, which this torch has not")
        return StoredArray(self._folder.names[file], tensor.start, tensor.dtype, tensor.shape)


def _is_itself(links: Sequence[Link]) -> bool:
    """Whether a stored tensor is one tensor of the folder, whole and as it is."""
    return len(links) == 1 and not links[0].transposed and links[0].box.shape == links[0].shape


def _identity(shard: ShardedTensor) -> Hashable:
    """The same for shards that are one: tied weights."""
    if shard.data is None or is_quantized(shard.data) or not shard.data.numel():
        return shard.key
    place = tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.data.shape), shard.data.stride()
    return shard.data.data_ptr(), shard.data.device, shard.dtype, place


def _at_true_shape(link: Link, found: Ints) -> Sequence[Link]:
    """The link of a tensor that may be larger or smaller than the folder's: what both have."""
    common = Box((0,) * len(found), tuple(map(min, found, link.shape)))
    return (link._replace(shape=found, box=common),) if math.prod(common.shape) else ()


def _with_memory(shard: ShardedTensor) -> ShardedTensor:
    """The shard with a plain tensor to fill: its own, where it has one."""
    if shard.data is None or is_quantized(shard.data):
        shard = shard.without_data()
        shard.init_data("cpu")
    return shard


def _clear(shards: Sequence[ShardedTensor]) -> None:
    """Make those zero that may be larger than what the folder has of them."""
    for shard in shards:
        if shard.allow_shape_mismatch and shard.data is not None:
            shard.data.zero_()


def _place(read: _Read) -> tuple[str, int]:
    """Files from front to back."""
    array = read.source.weight if isinstance(read.source, Scaled) else read.source
    return array.file, array.offset


def _fill(reader: CheckpointReader, read: _Read) -> None:
    if isinstance(read.source, Scaled):
        read.source.read(reader, read.start, read.target, read.what)
    else:
        read_box(reader, read.source, read.start, read.target, read.what)
    if read.target.device.type != "cpu":
        synchronize_devices([read.target])  # this thread's stream is not the caller's


__all__ = ["HuggingFaceLoadStrategy"]
