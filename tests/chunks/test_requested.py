from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.mapping import ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_torch_dist import TorchDistSaveShardedStrategy
from tests.torch_dist.te_stand_in import ClosedStandIn, Float8StandIn, MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

FULL = torch.randn(24, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture(
    params=[TorchDistSaveShardedStrategy, SafetensorsSaveShardedStrategy], ids=["torch_dist", "safetensors"]
)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tensor in three pieces."""
    pieces = [
        ShardedTensor("w", FULL[low : low + 8].clone(), FULL.dtype, (8, 64), (24, 64), (low, 0), None)
        for low in (0, 8, 16)
    ]
    dc.save({"w": pieces}, tmp_path / "c", request.param())
    return tmp_path / "c"


def _wanted(data: Any, low: int, **options: Any) -> ShardedTensor:
    return ShardedTensor("w", data, data.dtype, tuple(data.shape), (24, 64), (low, 0), None, **options)


def _load(path: Path, wanted: ShardedTensor) -> Any:
    return dc.load({"w": wanted}, path, validate_access_integrity=False)["w"]


@pytest.mark.parametrize("kind", [Float8StandIn, MXFP8StandIn])
@pytest.mark.parametrize(("low", "rows"), [(0, 24), (8, 8), (5, 13)])
def test_quantized_destinations(path: Path, kind: Any, low: int, rows: int) -> None:
    """A quantized destination over several pieces has what quantizing the values gives, in one step."""
    destination = kind.quantized(torch.ones(rows, 64, dtype=FULL.dtype))
    loaded = _load(path, _wanted(destination, low))
    assert loaded is destination
    assert torch.equal(loaded.dequantize(), kind.quantized(FULL[low : low + rows]).dequantize())


def test_a_destination_that_cannot_be_quantized_is_refused(path: Path) -> None:
    """A quantized class that takes no values is an error with the key."""
    with pytest.raises(CheckpointingException, match=r"'w'.*ClosedStandIn"):
        _load(path, _wanted(ClosedStandIn.quantized(torch.ones(24, 64, dtype=FULL.dtype)), 0))


def test_a_negated_view_with_a_cast(path: Path) -> None:
    """A destination that shows its memory negated has the values, cast to its dtype, with their signs."""
    view = torch._neg_view(torch.zeros(13, 64))
    assert torch.equal(_load(path, _wanted(view, 5)), FULL[5:18].float())


@pytest.mark.parametrize("few", [64, 0])
@pytest.mark.parametrize(
    ("low", "rows", "left", "columns"),
    [(9, 3, 0, 64), (9, 3, 5, 20), (8, 8, 1, 63), (8, 8, 0, 64), (7, 2, 0, 64), (0, 24, 3, 1), (23, 1, 63, 1)],
)
def test_parts_of_pieces(
    path: Path, monkeypatch: pytest.MonkeyPatch, few: int, low: int, rows: int, left: int, columns: int
) -> None:
    """Shards within a piece, over pieces and as a piece have their values, matched one by one or by columns."""
    monkeypatch.setattr("shardckpt.chunks.matched.FEW", few)
    data = torch.zeros(rows, columns, dtype=FULL.dtype)
    wanted = ShardedTensor("w", data, data.dtype, (rows, columns), (24, 64), (low, left), None)
    unallocated = ShardedTensor("w", None, data.dtype, (columns,), (24, 64), (low, left), None, prepend_axis_num=1)
    loaded = dc.load({"first": wanted, "second": unallocated}, path, validate_access_integrity=False)
    first, second = loaded["first"], loaded["second"]
    assert first is data
    assert torch.equal(data, FULL[low : low + rows, left : left + columns])
    assert torch.equal(second, FULL[low, left : left + columns])


def test_files_are_as_large_as_the_index_says_before_memory_is_taken(path: Path) -> None:
    """A shard without data is not allocated if the files do not have its bytes."""
    data = next(file for file in path.iterdir() if file.name.startswith(("rank_", "__0")))
    data.write_bytes(data.read_bytes()[:64])
    wanted = ShardedTensor.from_global_shape("w", FULL.dtype, (24, 64))
    with pytest.raises(CorruptCheckpointError, match=data.name):
        _load(path, wanted)
    assert wanted.data is None
