from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.chunks.item_reader import ItemReader
from shardckpt.chunks.regions import Region
from shardckpt.chunks.stored import Chunk, Item
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import Manifest
from shardckpt.mapping import ShardedObject
from shardckpt.planning.boxes import Box
from shardckpt.storage import CheckpointReader
from tests import states
from tests.damage import flip
from tests.resources import watch_reads
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@table("dtype", [torch.float32, torch.float64])
@table("copies", [1, 40])
def test_a_box_behind_others_in_its_item(tmp_path: Path, dtype: torch.dtype, copies: int) -> None:
    """Of an item with several boxes, each is read from where it begins: alone, or with its neighbours."""
    values = torch.arange(12 * copies, dtype=torch.float32).view(copies, 12)
    (tmp_path / "data").write_bytes(values.numpy().tobytes())
    targets = [torch.zeros(4, 2, dtype=dtype).T for _ in range(copies)]
    index: Any = SimpleNamespace(keys=["w"], dtypes=[torch.float32])
    regions = [
        Region(0, Chunk(Box((0, 0), (2, 4)), Item("data", 48 * n, 48), first=4, volume=12), (0, 0), target, True)
        for n, target in enumerate(targets)
    ]
    with CheckpointReader(tmp_path, Manifest(backend="rows", version=1)) as reader:
        ItemReader(reader, index).read_units([(region,) for region in regions])
    for target, row in zip(targets, values, strict=True):
        assert torch.equal(target.float(), row[4:].view(2, 4))


@table("backend", ["safetensors", "torch_dist"])
def test_a_damaged_object_does_not_have_the_tensors_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """An error names what is damaged; what is not is read once at most."""
    tensors = {f"t{number}": torch.rand(1 << 15) for number in range(40)}
    payload = ShardedObject("o", b"the bytes of the object" * 8, (1,), (0,))
    dc.save({**states.entire(tensors), "o": payload}, tmp_path / "c", backend)
    data = max((tmp_path / "c").iterdir(), key=lambda path: path.stat().st_size)
    flip(data, b"the bytes of the object")
    reads = watch_reads(monkeypatch)
    wanted = {key: torch.zeros(1 << 15) for key in tensors}
    with pytest.raises(CorruptCheckpointError, match=r"\bo\b.*digest differs"):
        dc.load({**states.entire(wanted), "o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c")
    assert sum(read.nbytes for read in reads if read.name == data.name) <= data.stat().st_size


@table("first", [-4, 8])
@table(("copies", "rows"), [(1, 2), (40, 2), (2, 1 << 15)])
@table("is_plain", [True, False])
def test_a_box_beyond_its_item_is_damage(tmp_path: Path, first: int, copies: int, rows: int, is_plain: bool) -> None:
    """What an index claims of an item that has fewer elements is an error, and not its neighbours' values."""
    nbytes = rows * 16
    (tmp_path / "data").write_bytes(bytes(nbytes * (copies + 2)))
    index: Any = SimpleNamespace(keys=["w"], dtypes=[torch.float32])
    targets = torch.zeros(copies, rows, 4) if is_plain else torch.zeros(copies, 4, rows).mT
    regions = [
        Region(0, Chunk(Box((0, 0), (rows, 4)), Item("data", nbytes * (n + 1), nbytes), first, 4), (0, 0), target, True)
        for n, target in enumerate(targets)
    ]
    with (
        CheckpointReader(tmp_path, Manifest(backend="rows", version=1)) as reader,
        pytest.raises(CorruptCheckpointError, match=r"w: the index claims \d+ elements of torch.float32 from element"),
    ):
        ItemReader(reader, index).read_units([(region,) for region in regions])
