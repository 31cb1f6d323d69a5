"""Quantized tensors in state dicts: the native form, and dequantizing all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import ShardingError
from shardckpt.quantized import native_factory
from tests.tables import table
from tests.torch_dist.te_stand_in import Float8StandIn, MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

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


def test_a_copy_of_the_factory_returns_its_own_tensor(tmp_path: Path) -> None:
    """A load of an optimizer's state, described by its parameter's factory with other data, returns the state."""
    weight, moment = MXFP8StandIn.quantized(VALUES), MXFP8StandIn.quantized(-VALUES)
    factory = native_factory("w", weight)
    dc.save({"w": factory, "exp_avg": replace(factory, key="exp_avg.w", data=moment)}, tmp_path / "c")
    factory, new = native_factory("w", MXFP8StandIn.quantized(VALUES + 1)), MXFP8StandIn.quantized(VALUES + 2)
    loaded = dc.load({"w": factory, "exp_avg": replace(factory, key="exp_avg.w", data=new)}, tmp_path / "c")
    assert loaded["w"] is factory.data
    assert loaded["exp_avg"] is new
    assert new.bits() == moment.bits()


def _save_replicated(path: str) -> None:
    dc.save({"w": native_factory("w", MXFP8StandIn.quantized(VALUES), replicated=True)}, path)


def test_the_library_chooses_among_replicas(ranks: Ranks, tmp_path: Path) -> None:
    """With replicated=True all ranks may describe one tensor without replica ids."""
    ranks.run(2, _save_replicated, str(tmp_path / "c"))
    other = MXFP8StandIn.quantized(-VALUES)
    dc.load({"w": native_factory("w", other)}, tmp_path / "c")
    assert other.bits() == MXFP8StandIn.quantized(VALUES).bits()


@table(
    ("offset", "text"),
    [
        ((2, 0, 2), "'w': there is no axis 2"),
        ((-1, 0, 2), "'w': there is no axis -1"),
        ((0, 2, 2), "'w': shard 2 of 2 along axis 0 does not exist"),
        ((0, 2), "no tuple"),
    ],
)
def test_a_shard_that_does_not_exist_is_refused(offset: Any, text: str) -> None:
    """A wrong rank offset is an error where it is given, not when the state dict is saved."""
    with pytest.raises(ShardingError, match=text):
        native_factory("w", MXFP8StandIn.quantized(VALUES), offset)
