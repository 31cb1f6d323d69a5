"""Tensors of torch's own dtypes of 8 and fewer bits: stored as they are, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import reader
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
#: Which torch itself can neither copy nor fill.
_BARE = ("int4", "uint1", "uint4", "uint7", "bits8")
NAMES = [name for name in (*_NAMES, *_BARE) if hasattr(torch, name)]
FLOATS = [name for name in NAMES if name.startswith("float8")]
#: Every byte, NaNs and infinities among them.
BITS = torch.arange(256, dtype=torch.uint8).reshape(16, 16)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).contiguous()


def _all_dtypes(bits: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: bits.clone().view(getattr(torch, name)) for name in NAMES}


@table("name", NAMES)
def test_slices_of_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A box of a tensor that is read in many small pieces has the stored bits."""
    monkeypatch.setattr(reader, "_READ_BYTES", 4 << 10)
    bits = torch.arange(400 * 300).to(torch.uint8).reshape(400, 300)
    dtype = getattr(torch, name)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", bits.view(dtype))}, tmp_path / "c")
    for rows, columns in ((slice(7, 390), slice(0, 300)), (slice(0, 400), slice(13, 280)), (slice(5, 6), slice(9, 10))):
        box = bits[rows, columns]
        wanted = torch.zeros(box.shape, dtype=torch.uint8).view(dtype)
        start = (rows.start, columns.start)
        shard = ShardedTensor("w", wanted, dtype, tuple(box.shape), (400, 300), start, None)
        dc.load({"w": shard}, tmp_path / "c", validate_access_integrity=False)
        assert torch.equal(_bits(wanted), box)


@table("name", FLOATS)
@table("rows", [16, 400])
def test_casting_loads(tmp_path: Path, name: str, rows: int) -> None:
    """Stored float8 fills bfloat16, and stored bfloat16 fills float8, as torch casts; small tensors and large."""
    dtype = getattr(torch, name)
    low = torch.linspace(0.5, 4, rows * 300).reshape(rows, 300).to(dtype)
    high = torch.linspace(0.5, 4, rows * 300, dtype=torch.bfloat16).reshape(rows, 300)
    shards = {"low": ShardedTensor.from_rank_offsets("low", low), "high": ShardedTensor.from_rank_offsets("high", high)}
    dc.save(shards, tmp_path / "c")
    wanted = {"low": torch.zeros_like(high), "high": torch.zeros_like(low)}
    dc.load(entire(wanted), tmp_path / "c")
    assert torch.equal(wanted["low"], low.bfloat16())
    assert torch.equal(_bits(wanted["high"]), _bits(high.to(dtype)))


@table("name", [name for name in NAMES if name not in FLOATS])
def test_packed_dtypes_are_not_cast(tmp_path: Path, name: str) -> None:
    """Two values a byte, or what torch knows nothing of, cannot be cast: the load says so before it fills anything."""
    packed = BITS.view(getattr(torch, name))
    ones = {"w": ShardedTensor.from_rank_offsets("w", packed), "a": ShardedTensor.from_rank_offsets("a", torch.ones(3))}
    dc.save(ones, tmp_path / "c")
    other = torch.zeros(3)
    wanted = {
        "a": ShardedTensor.from_rank_offsets("a", other),
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(16, 16, dtype=torch.bfloat16)),
    }
    with pytest.raises(ShardingError, match=rf"'w' is stored as torch\.{name}.*bfloat16: load it as torch"):
        dc.load(wanted, tmp_path / "c")
    assert other.tolist() == [0, 0, 0]


def test_exchanged_with_dcp(tmp_path: Path) -> None:
    """What plain DCP saves loads here, and what is saved here loads in plain DCP, with every bit."""
    stored = {name: data for name, data in _all_dtypes(BITS).items() if name not in _BARE}
    dcp.save(dict(stored), checkpoint_id=tmp_path / "dcp")
    dc.save(entire(stored), tmp_path / "ours")
    here = dc.load_plain_tensors(tmp_path / "dcp")
    there = {name: data for name, data in _all_dtypes(torch.zeros_like(BITS)).items() if name not in _BARE}
    dcp.load(there, checkpoint_id=tmp_path / "ours")
    for name in stored:
        assert torch.equal(_bits(here[name]), BITS)
        assert torch.equal(_bits(there[name]), BITS)
