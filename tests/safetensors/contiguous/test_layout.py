from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import PluginError
from shardckpt.huggingface import HubTensor
from shardckpt.manifest import Record
from shardckpt.planning import Box
from shardckpt.plugins import KeyMapEntry
from shardckpt.storage import SMALL_RECORD
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_safetensors.contiguous.layout import FolderLayout, FolderPayload, TensorInfo
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.planning import Ints

PAGES = 128 << 10


def _lay_out(**sizes: int) -> FolderLayout:
    """Lay out tensors of some bytes each."""
    infos = [TensorInfo(name, torch.uint8, (nbytes,)) for name, nbytes in sizes.items()]
    payloads = [
        FolderPayload(HubTensor(info.key, info.dtype, info.shape), Box.from_shape(info.shape), number)
        for number, info in enumerate(infos)
    ]
    return FolderLayout(infos, payloads, 1 << 40)


def test_each_payload_begins_in_one_range(tmp_path: Path) -> None:
    """Those without bytes, too, wherever they lie: the ranges of a file count all of its payloads."""
    for sizes in ({"a": PAGES, "b": 0, "c": 0, "d": 100}, {"a": PAGES, "b": 0}, {"b": 0, "c": 64}):
        layout = _lay_out(**sizes)
        (file,) = layout.files
        bounds = sorted({span.start for span in file.tensors} | {file.size})
        ranges = [layout.cut_range(0, start, stop) for start, stop in pairwise(bounds)]
        assert sum(count for _, count in ranges) == len(sizes)
        assert layout.cut_range(0, bounds[0], file.size) == ([n for found, _ in ranges for n in found], len(sizes))
    tensors = {name: torch.ones(nbytes, dtype=torch.uint8) for name, nbytes in {"a": PAGES, "b": 0, "d": 9}.items()}
    dc.save(entire(tensors), tmp_path / "c", SafetensorsSaveShardedStrategy(layout="contiguous"))
    files = Record.parse((tmp_path / "c" / "shardckpt.json").read_bytes()).files
    assert [file.keys for file in files if file.name == "model.safetensors"] == [3]


def test_a_range_may_cut_payloads() -> None:
    """Segments are as long as the range; one that begins in the header has the bytes of the payloads alone."""
    layout = _lay_out(a=PAGES, b=SMALL_RECORD, c=64, d=3)
    (file,) = layout.files
    first = file.tensors[0].start
    for start, stop, count in ((first + 8, file.size, 3), (first + PAGES + 5, file.size - 2, 2), (0, first + 9, 1)):
        lengths, begun = layout.cut_range(0, start, stop)
        assert (sum(lengths), begun) == (stop - max(start, first), count)
        assert all(0 < length <= SMALL_RECORD for length in lengths[1:])
    assert layout.find_payload(0, first) == 0
    for at in (0, first - 1, file.size):
        with pytest.raises(IndexError, match="is of no tensor"):
            layout.find_payload(0, at)


class _Twice:
    """Maps both halves of a tensor to one tensor of the folder."""

    def links(self, key: str, shape: Ints) -> list[KeyMapEntry]:
        half = (shape[0] // 2, *shape[1:])
        return [KeyMapEntry(key, half, (0, 0), Box((row, 0), half)) for row in (0, half[0])]


@table("layout", ["contiguous", "auto"])
def test_a_mapping_that_gives_one_name_twice_is_refused(tmp_path: Path, layout: str) -> None:
    """By key and name, before anything is written: the last of the parts would be written in the place of all."""
    strategy = SafetensorsSaveShardedStrategy(layout=layout, mapping=_Twice())
    with pytest.raises(PluginError, match=r"_Twice maps 2 parts of 'w' of shape \(4, 3\) to 'w', each as the whole"):
        dc.save(entire({"w": torch.rand(4, 3)}), tmp_path / "c", strategy)
    assert not (tmp_path / "c").exists()
