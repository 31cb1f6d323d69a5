"""Lay out contiguous tensors in files of a Hugging Face folder: by names, dtypes and shapes, not by their sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
    from shardckpt.plugins import KeyMapping


class TensorInfo(NamedTuple):
    """A tensor of the checkpoint, whichever ranks store it."""

    key: str
    dtype: torch.dtype
    shape: Ints
    scales: BlockScales | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" + (f" with {self.scales}" if self.scales else "")


class FolderPayload(NamedTuple):
    """A payload: a tensor of the folder.

    ``written`` is the folder's tensor, ``box`` where its elements are in the checkpoint's tensor, and ``tensor`` the
    number of that tensor in the layout.
    """

    written: HubTensor
    box: Box
    tensor: int

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.written.nbytes


class FolderLayout:
    """The files of a folder, of at most ``limit`` bytes of tensors each; payloads are assigned to them in order.

    Attributes:
        tensors: The checkpoint's tensors.
        payloads: The folder's tensors.
        names: The names of the files.
        files: The layouts of the files.
        places: File and offset of each payload.
    """

    def __init__(self, tensors: Sequence[TensorInfo], payloads: Sequence[FolderPayload], limit: int) -> None:
        self.tensors = tensors
        self.payloads = payloads
        self._numbers = numbers = {payload.written.name: number for number, payload in enumerate(payloads)}
        self.names: list[str] = []
        self.files: list[FileLayout] = []
        self.places = [(0, 0)] * len(payloads)
        for name, names in assign_files({payload.written.name: payload.nbytes for payload in payloads}, limit).items():
            layout = lay_out([payloads[numbers[each]].written for each in names])
            for span in layout.tensors:
                self.places[numbers[span.tensor.name]] = (len(self.files), span.start)
            self.names.append(name)
            self.files.append(layout)

    def find_payload(self, number: int, at: int) -> int:
        """Return the number of the payload that has a byte of a file."""
        file = self.files[number]
        return self._numbers[file.tensors[file.find_tensor(at)].tensor.name]

    def segments(self, number: int, start: int, stop: int) -> tuple[list[int], int]:
        """Return the lengths of the segments of a range of a file, and how many payloads begin in it.

        A large payload shares no segment with another; small ones share them.
        """
        file = self.files[number]
        lengths: list[int] = []
        small = count = 0
        for number_in_file in range(file.find_tensor(start), len(file.tensors)):  # a slice would copy the list
            tensor, first, end = file.tensors[number_in_file]
            if first >= stop:
                break
            count += first >= start
            length = min(stop, end) - max(start, first)
            if small and (tensor.nbytes > SMALL_RECORD or small + length > SMALL_RECORD):
                lengths.append(small)
                small = 0
            if tensor.nbytes > SMALL_RECORD:
                lengths += cut_segments(length)
            else:
                small += max(length, 0)
        return [*lengths, small] if small else lengths, count

    def weights_index(self) -> bytes:
        """Return the content of ``model.safetensors.index.json``."""
        files = {
            payload.written.name: self.names[file]
            for payload, (file, _) in zip(self.payloads, self.places, strict=True)
        }
        return encode_weights_index(files, sum(payload.nbytes for payload in self.payloads))


def split_tensor(info: TensorInfo, prefix: str, mapping: KeyMapping) -> list[tuple[HubTensor, Box]] | str:
    """Return the folder's tensors that a tensor of the checkpoint becomes, each with its box; or why it cannot be.

    That is the end of a sentence. ``mapping`` maps what is left without the prefix to names in the folder.
    """
    if not header_name(info.dtype):
        return f"is of {info.dtype}, which inference tools do not read from safetensors files"
    links = get_key_map_entries(mapping, info.key[len(prefix) :], info.shape)
    if not links:
        return "has no name in the folder"
    for link in links:
        if link.transposed or link.folder_box.shape != link.shape:
            return f"is transposed, or only a part of {link.name!r} in the folder"
    boxes = [link.box for link in links]
    if find_overlap(boxes) is not None or find_hole(info.shape, boxes) is not None:
        return "is not in the folder as a whole, by the mapping"
    return [(HubTensor(link.name, info.dtype, link.shape), link.box) for link in links]
