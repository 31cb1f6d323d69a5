"""Lay out contiguous tensors in the files of a Hugging Face folder.

The layout follows from names, dtypes and shapes alone: however ranks shard the tensors, the files are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import PluginError
from shardckpt.huggingface import HubTensor, assign_files, encode_weights_index, lay_out
from shardckpt.planning import find_hole, find_overlap
from shardckpt.plugins import get_key_map_entries
from shardckpt.storage import SMALL_RECORD, cut_segments
from shardckpt_safetensors.dtypes import header_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardckpt.huggingface import FileLayout
    from shardckpt.mapping import BlockScales
    from shardckpt.planning import Box, Ints
    from shardckpt.plugins import KeyMapEntry, KeyMapping


class TensorInfo(NamedTuple):
    """A tensor of the checkpoint, whichever ranks store it."""

    key: str
    dtype: torch.dtype
    shape: Ints
    scales: BlockScales | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" + (f" with {self.scales}" if self.scales else "")


class FolderPayload(NamedTuple):
    """The bytes of a folder tensor. The elements of that tensor are a box of one tensor of the checkpoint.

    Attributes:
        hub_tensor: The folder tensor.
        box: The box of the checkpoint's tensor that has the elements.
        tensor_number: The number of the checkpoint's tensor in the layout.
    """

    hub_tensor: HubTensor
    box: Box
    tensor_number: int

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.hub_tensor.nbytes


class FolderSplit(NamedTuple):
    """The folder tensors of a tensor of the checkpoint.

    Attributes:
        parts: Each folder tensor, with the box of the checkpoint's tensor that has its elements.
        obstacle: Why the tensor cannot be stored contiguously, as a predicate: ``"is transposed"``. ``""`` if it can.
    """

    parts: list[tuple[HubTensor, Box]]
    obstacle: str = ""


class FolderLayout:
    """The files of a folder: payloads are assigned to files in order, at most ``limit`` bytes to each.

    Attributes:
        tensors: The checkpoint's tensors.
        payloads: The payload of each folder tensor.
        file_names: The names of the files.
        files: The layouts of the files.
        places: The place of each payload: the number of its file, and the offset there.
    """

    def __init__(self, tensors: Sequence[TensorInfo], payloads: Sequence[FolderPayload], limit: int) -> None:
        self.tensors = tensors
        self.payloads = payloads
        numbers = {payload.hub_tensor.name: n for n, payload in enumerate(payloads)}
        self._payload_numbers = numbers
        self.file_names: list[str] = []
        self.files: list[FileLayout] = []
        self.places = [(0, 0)] * len(payloads)
        sizes = {payload.hub_tensor.name: payload.nbytes for payload in payloads}
        for file_name, tensor_names in assign_files(sizes, limit).items():
            file = lay_out([payloads[numbers[name]].hub_tensor for name in tensor_names])
            for span in file.tensors:
                self.places[numbers[span.tensor.name]] = (len(self.files), span.start)
            self.file_names.append(file_name)
            self.files.append(file)

    def find_payload(self, file_number: int, offset: int) -> int:
        """Return the number of the payload that has a byte of a file."""
        file = self.files[file_number]
        return self._payload_numbers[file.tensors[file.find_tensor(offset)].tensor.name]

    def cut_range(self, file_number: int, start: int, stop: int) -> tuple[list[int], int]:
        """Cut a range of a file into segments; return their lengths, and how many payloads begin in the range.

        A payload above ``SMALL_RECORD`` has segments of its own. Smaller neighbours share segments of at most
        ``SMALL_RECORD``::

            payloads   | large                       | 8K | 30K | 40K | large         |
            segments   | large  | large   | large    |   38K    | 40K | large | large |
        """
        file = self.files[file_number]
        # payloads without bytes begin where the next payload does, or at the end of the file
        first = bisect_left(file.tensors, start, key=lambda span: span.start)
        last = bisect_left(file.tensors, stop, key=lambda span: span.start) if stop < file.size else len(file.tensors)
        lengths: list[int] = []
        shared = 0  # bytes of the segment that small payloads share, so far
        for number in range(max(first - 1, 0), last):  # the payload before the first may reach into the range
            span = file.tensors[number]
            length = min(stop, span.stop) - max(start, span.start)
            if length <= 0:
                continue
            is_large = span.tensor.nbytes > SMALL_RECORD
            if shared and (is_large or shared + length > SMALL_RECORD):
                lengths.append(shared)
                shared = 0
            if is_large:
                lengths += cut_segments(length)
            else:
                shared += length
        return [*lengths, shared] if shared else lengths, last - first

    def encode_index(self) -> bytes:
        """Return the content of ``model.safetensors.index.json``."""
        places = zip(self.payloads, self.places, strict=True)
        files = {payload.hub_tensor.name: self.file_names[file_number] for payload, (file_number, _) in places}
        return encode_weights_index(files, sum(payload.nbytes for payload in self.payloads))


def split_tensor(info: TensorInfo, prefix: str, mapping: KeyMapping) -> FolderSplit:
    """Split a tensor of the checkpoint into folder tensors.

    Args:
        prefix: The prefix of the key that names in the folder lack.
        mapping: Maps the rest of the key to names in the folder.

    Raises:
        PluginError: The mapping gives two parts of the tensor one name.
    """
    if not header_name(info.dtype):
        return FolderSplit([], f"is of {info.dtype}, which inference tools do not read from safetensors files")
    entries = get_key_map_entries(mapping, info.key[len(prefix) :], info.shape)
    obstacle = _find_obstacle(entries, info.shape)
    if obstacle:
        return FolderSplit([], obstacle)
    for name, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise PluginError(
                f"{type(mapping).__name__} maps {count} parts of {info.key!r} of shape {info.shape} to {name!r}, each "
                "as the whole of it: give each part a name of its own"
            )
    return FolderSplit([(HubTensor(entry.name, info.dtype, entry.shape), entry.box) for entry in entries])


def _find_obstacle(entries: Sequence[KeyMapEntry], shape: Ints) -> str:
    """Return why the entries of a tensor allow no contiguous payloads, as a predicate; ``""`` if they do."""
    if not entries:
        return "has no name in the folder"
    for entry in entries:
        if entry.transposed or entry.folder_box.shape != entry.shape:
            return f"is transposed, or only a part of {entry.name!r} in the folder"
    boxes = [entry.box for entry in entries]
    if find_overlap(boxes) is not None or find_hole(shape, boxes) is not None:
        return "is not in the folder as a whole, by the mapping"
    return ""
