"""Quantized tensors in state dicts: the native form, and dequantizing all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import ShardingError
from shardckpt.quantized import native_factory
from tests.torch_dist.te_stand_in import Float8StandIn, MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

VALUES = torch.linspace(-3, 5, 16 * 64).reshape(16, 64).bfloat16()


def test_the_native_form_is_lossless(tmp_path: Path) -> None:
    """Data and scales are stored by their names and come back bit for bit, without quantizing anything."""
    wrapper = MXFP8StandIn.quantized(VALUES)
    wrapper._scale_inv += 1  # scales that quantizing would not choose
    other = MXFP8StandIn.quantized(-VALUES)
    dc.save({"w": native_factory("w", wrapper)}, tmp_path / "c")
    assert set(dc.load_tensors_metadata(tmp_path / "c")) == {"w._data", "w._scale_inv"}
    assert dc.load({"w": native_factory("w", other)}, tmp_path / "c")["w"] is other
    assert other.bits() == wrapper.bits()
    assert other.times == 0


def test_the_native_form_of_replicas() -> None:
    """Every piece carries the replica id, and one shard alone writes what tells the form."""
    wrapper = MXFP8StandIn.quantized(VALUES)
    built = [native_factory("w", wrapper, (0, cell, 2), replica_id=(0, 3)).build() for cell in (0, 1)]
    assert [nest["_data"].replica_id for nest in built] == [(0, 3), (0, 3)]
    assert [nest["class"].replica_id for nest in built] == [(0, 3), 1]
    assert [nest["_scale_inv"].global_offset for nest in built] == [(0, 0), (16, 0)]


def test_classes_without_the_protocol() -> None:
    """A class that does not name its inner tensors has no native form."""
    with pytest.raises(ShardingError, match=r"'w': .*Float8StandIn has no __tensor_flatten__"):
        native_factory("w", Float8StandIn.quantized(VALUES))
