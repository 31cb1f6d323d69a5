"""Statistics of stored values, block by block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import statistics
from shardckpt.maintenance.statistics import compute_each, compute_statistics
from shardckpt.mapping import ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "float32": torch.randn(7, 5, 3),
    "bfloat16": torch.randn(40).bfloat16(),
    "float8": torch.randn(4, 6).to(torch.float8_e4m3fn),
    "bool": torch.arange(11) % 3 == 0,
    "complex": torch.randn(6, dtype=torch.complex64),
    "large": torch.tensor([2**62 + 1, -(2**62) - 1, 3]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "nan": torch.full((3,), float("nan")),
}


@table("limit", [8, 64, 1 << 20])
def test_statistics_do_not_depend_on_the_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """They are those of torch in float64 whatever is read at a time, for every dtype."""
    monkeypatch.setattr(statistics, "_BLOCK_BYTES", limit)
    dc.save({key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in TENSORS.items()}, tmp_path / "c")
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        read: list[int] = []
        each = compute_each(checkpoint, [checkpoint[key] for key in TENSORS], read.append)
        for tensor, found in zip(TENSORS.values(), each, strict=True):
            values = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.double()
            finite = values[values.isfinite()]
            assert (found.count, found.nans) == (tensor.numel(), int(values.isnan().sum()))
            assert found.norm == pytest.approx(finite.norm().item())
            if finite.numel():
                exact = tensor if tensor.dtype == torch.int64 else finite
                extremes = (exact.min().item(), exact.max().item())
                # the last bit of torch's ``abs`` of a complex number depends on how many are computed at once
                expected = pytest.approx(extremes, rel=1e-15) if tensor.is_complex() else extremes
                assert (found.minimum, found.maximum) == expected
                assert found.mean == pytest.approx(finite.mean().item())
            else:
                assert (found.minimum, found.maximum, found.mean) == (None, None, None)
    assert sum(read) == sum(tensor.nbytes for tensor in TENSORS.values())


def test_blocks_are_the_region_in_order(tmp_path: Path) -> None:
    """Each element once, none larger than asked for."""
    values = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        for limit in (4, 12, 28, 100, 1000):
            blocks = list(checkpoint["w"].blocks((slice(1, 4), ..., slice(1, 5)), max_bytes=limit))
            assert max(block.nbytes for block in blocks) <= limit
            assert torch.equal(torch.cat([block.flatten() for block in blocks]), values[1:, :, 1:].flatten())


@table("values", [[1.7e308] * 4, [1.7e308, 1.7e308, -1.7e308, -1.7e308]])
def test_a_sum_beyond_float64_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """The mean of such values is what float64 gives, infinite or not a number; the extremes are exact."""
    monkeypatch.setattr(statistics, "_BLOCK_BYTES", 16)
    tensor = torch.tensor(values, dtype=torch.float64)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "c", overwrite=True)
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        found = compute_statistics(checkpoint["w"])
    assert (found.minimum, found.maximum) == (min(values), max(values))
    assert found.mean is not None
    assert not math.isfinite(found.mean)


def test_a_sum_that_passes_float64_on_the_way_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose sums add up to a float64 have their mean, whatever their order."""
    monkeypatch.setattr(statistics, "_BLOCK_BYTES", 8)
    tensor = torch.tensor([1e308, 1e308, -1e308], dtype=torch.float64)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "c")
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        assert compute_statistics(checkpoint["w"]).mean == 1e308 / 3


def test_a_finite_complex_value_is_finite(tmp_path: Path) -> None:
    """Its absolute value may be beyond the dtype of its parts, and is computed in float64."""
    tensor = torch.tensor([3e38 + 3e38j, 0], dtype=torch.complex64)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "c")
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        found = compute_statistics(checkpoint["w"])
    length = abs(complex(tensor[0]))
    assert (found.infs, found.minimum, found.maximum) == (0, 0.0, pytest.approx(length))
    assert (found.mean, found.norm) == (pytest.approx(length / 2), pytest.approx(length))
