"""A load strategy for files of ``torch.save``, so that they are read by the same steps as a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.lazy_reads import LazyReads, refuse_expanded
from shardckpt.archive.lazy_tensors import LazyTensor
from shardckpt.archive.payload_reads import read_payload
from shardckpt.archive.reader import Archive
from shardckpt.chunks.load import ChunkLoadStrategy, StoredChunk
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError, listed
from shardckpt.huggingface.folder import read_index
from shardckpt.huggingface.names import BIN, file_names, index_name
from shardckpt.huggingface.structure import make_structure
from shardckpt.huggingface.torch_file import is_archive, read_torch_file
from shardckpt.manifest.names import CONTENT
from shardckpt.mapping.sharded_object import PlainObject
from shardckpt.planning.boxes import Box
from shardckpt.state_dict import extract_matching_values, keep_counter, list_dcp_values
from shardckpt.strategy import LoadContext, StoredFile, find_error
from shardckpt.tensors.wrappers import copy_values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shardckpt.archive.payload import StoredPayload
    from shardckpt.chunks.load import ChunkRead
    from shardckpt.mapping.base import StateDict
    from shardckpt.storage.reader import CheckpointReader

#: Limit on the values of a file: this many, and more for each byte. A pickle can name one list any number of times.
_FREE_VALUES, _VALUES_PER_BYTE = 1 << 16, 8
#: Classes of values that several files of a model may have under one name, if they are equal.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, type(None))


@dataclass(frozen=True)
class _Content:
    """The content of a file: its state dict with tensors of the meta device, and where each one's values are."""

    state_dict: dict[Any, Any]
    tensors: dict[str, StoredPayload | torch.Tensor]


class TorchFileLoadStrategy(ChunkLoadStrategy):
    """Reads files of ``torch.save`` by the allow-list, without running code in them.

    The key of a tensor is its path in the state dict, joined by dots; all other values are common state. Ranges of
    tensors are read from the files, so that memory is bounded; one of before torch 1.6 is in memory as a whole.

    A state dict in one file is given by the name of ``file``; one in several files by ``weight_map``, which has the
    file of each tensor. ``lost`` are the tensors whose files are missing: they are not read.
    """

    backend = "torch_save"
    version = 1
    reads = "files of torch.save"

    def __init__(self, file: str = "", weight_map: Mapping[str, str] | None = None, lost: Collection[str] = ()) -> None:
        self.lost = lost
        self._weight_map = weight_map or {}
        self._files = sorted({*self._weight_map.values()}) or [file]

    def list_chunks(self, context: LoadContext) -> Iterator[StoredChunk]:
        """Yield a box for each tensor: the file has all of it."""
        for file in self._files:
            for key, source in self._content(context, file).tensors.items():
                shape = tuple(source.shape)
                yield StoredChunk(key, source.dtype, shape, Box.from_shape(shape), file, source)

    def read_part(self, read: ChunkRead, context: LoadContext) -> None:
        """Read a range of a tensor, which may be in memory."""
        chunk = read.chunk
        if isinstance(chunk.source, torch.Tensor):
            copy_values(read.target, chunk.source[Box(read.start, tuple(read.target.shape)).within(chunk.box)])
        else:
            read_payload(context.reader, chunk.file, chunk.source, read.start, read.target, chunk.key)

    def load_common(self, context: LoadContext) -> StateDict:
        """Return all that is no tensor, and as ``content_metadata`` the structure by which the dict is restored."""
        state_dict = self._state_dict(context)
        _, rest = extract_matching_values(state_dict, lambda value: isinstance(value, torch.Tensor))
        return {**rest, CONTENT: make_structure(state_dict)}

    def read_plain_objects(self, context: LoadContext) -> list[PlainObject]:
        """Return the values that are no tensors as stock ``dcp.load`` asks for them: by their paths.

        The description of a tensor in a state, in a file that was converted, has the path of that tensor.
        """
        taken = {key for file in self._files for key in self._content(context, file).tensors}
        return [PlainObject(k, value) for k, value in list_dcp_values(self._state_dict(context)) if k not in taken]

    def list_plain_objects(self, context: LoadContext) -> list[str]:  # noqa: ARG002 - they are the common state
        """Return an empty list: the common state has the values of all."""
        return []

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files, with the tensors in each."""
        context = LoadContext(reader, Comm(alone=True))
        return [StoredFile(file, keys=tuple(self._content(context, file).tensors)) for file in self._files]

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each file, or None: it is compared with the CRC-32 that it has of its values, if any."""

        def check(file: str) -> None:
            self._content(LoadContext(reader, Comm(alone=True)), file)
            if is_archive(reader, file):
                Archive.of_file(reader, file).check_members(reader, file)

        return {file: find_error(check, file) for file in self._files}

    def _state_dict(self, context: LoadContext) -> dict[Any, Any]:
        """Return the state dict of all files, with the dicts of one name joined."""
        found: dict[Any, Any] = {}
        for file in self._files:
            found = _join(found, self._content(context, file).state_dict, f"{context.reader.directory / file}: ")
        return found

    def _content(self, context: LoadContext, file: str) -> _Content:
        reader = context.reader
        content = reader.parsed(f"state dict of {file}", lambda: _read_content(reader, file, context.allow_globals))
        if self._weight_map:
            promised = {key for key, where in self._weight_map.items() if where == file}
            if different := promised ^ content.tensors.keys():
                raise CorruptCheckpointError(
                    f"{reader.directory / file} does not have the tensors that the index names: {listed(different)}"
                )
        return content


def _join(first: dict[Any, Any], second: dict[Any, Any], where: str) -> dict[Any, Any]:
    """Return a dict with the entries of both; two values of one name that differ are an error: one would be lost."""
    joined = {**first, **second}
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        if isinstance(one, dict) and isinstance(other, dict):
            joined[name] = _join(one, other, f"{where}{name}.")
        elif not _are_same(one, other):
            raise CheckpointingException(
                f"{where}{name} is another value in an earlier file of the index: save the model with each tensor "
                "under a name of its own, and without other values"
            )
    return joined


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal and have no tensors, which lie in a file each."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return type(one) in _PLAIN and (one == other or (one != one and other != other))  # noqa: PLR0124 - both are NaN


def _read_content(reader: CheckpointReader, file: str, allow_globals: tuple[Any, ...]) -> _Content:
    path, size = reader.directory / file, reader.size(file)
    if is_archive(reader, file):
        found = Archive.of_file(reader, file).describe(allow_globals)
        if not isinstance(found, dict):
            what = "tensor" if isinstance(found, LazyTensor) else type(found).__name__
            raise CheckpointingException(f"{path} holds a {what}, not a state dict")
    else:
        found = read_torch_file(path)
    walker = _Walker(reader, file, _FREE_VALUES + _VALUES_PER_BYTE * size)
    try:
        return _Content(walker.describe(found, ""), walker.tensors)
    except RecursionError as exc:
        raise CorruptCheckpointError(
            f"{path} is damaged: a container in it holds itself, or is nested too deep"
        ) from exc


class _Walker:
    """Locates the tensors of a nested state dict, and puts tensors of the meta device in their places."""

    def __init__(self, reader: CheckpointReader, file: str, most: int) -> None:
        self._reader = reader
        self._file = file
        self._left = most
        self._reads = LazyReads(self._read)
        self.tensors: dict[str, StoredPayload | torch.Tensor] = {}

    def describe(self, value: Any, key: str) -> Any:
        """Return nested dicts and lists with tensors of the meta device; any other container keeps its tensors."""
        self._left -= 1
        if self._left < 0:
            raise CorruptCheckpointError(f"{self._name}: its pickle repeats its own parts too often")
        if isinstance(value, dict):
            parts = {name: self.describe(part, f"{key}.{name}" if key else f"{name}") for name, part in value.items()}
            return keep_counter(value, parts)
        if isinstance(value, list):
            return [self.describe(inner, f"{key}.{number}") for number, inner in enumerate(value)]
        if not isinstance(value, (LazyTensor, torch.Tensor)):
            # a checkpoint has them in the common state, with their values
            return self._reads.fill(value, key)
        source = self._locate(value, key) if isinstance(value, LazyTensor) else value.detach()
        if key in self.tensors:
            raise ShardingError(
                f"{self._name} has two tensors whose paths, joined by dots, are {key!r}: rename one, and save it again"
            )
        self.tensors[key] = source
        return torch.empty(source.shape, dtype=source.dtype, device="meta")

    @property
    def _name(self) -> str:
        return str(self._reader.directory / self._file)

    def _locate(self, tensor: LazyTensor, key: str) -> StoredPayload:
        if tensor.spec is not None:
            raise CheckpointingException(
                f"{self._name}: {key!r} is a DTensor, of which one rank's file has a part: convert the checkpoint of "
                "all ranks, or save its full_tensor()"
            )
        refuse_expanded(tensor.payload, f"{self._name}: {key!r}")
        return tensor.payload

    def _read(self, tensor: LazyTensor, key: str) -> torch.Tensor:
        source = self._locate(tensor, key)
        target = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        read_payload(self._reader, self._file, source, (0,) * len(source.shape), target, key)
        return target


def find_torch_weights(
    place: Path, names: Collection[str], *, skip_damaged: bool = False
) -> TorchFileLoadStrategy | None:
    """Return the reader of a model in a folder of the Hub with files of ``torch.save``; None if there are none.

    ``names`` are the names of the files in the folder. With ``skip_damaged`` files that the index names may be missing,
    but not all of them.
    """
    (only,) = file_names(1, BIN)
    if index_name(BIN) in names:
        weight_map = read_index(place, BIN)[0]
        left = {key: file for key, file in weight_map.items() if file in names}
        if skip_damaged and left:
            return TorchFileLoadStrategy(weight_map=left, lost=[key for key in weight_map if key not in left])
        return TorchFileLoadStrategy(weight_map=weight_map)
    return TorchFileLoadStrategy(only) if only in names else None
