"""torchao's quantized tensors as sources and destinations; torchao is imported in these tests only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import ShapeMismatchError, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.quantized import native_factory
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

#: Exact in every process, whatever its threads and libraries are.
FULL = ((torch.arange(64 * 128) * 37 % 1001 - 500) / 128).reshape(64, 128).bfloat16() + 0.25
KINDS = (
    "float8 rows",
    "float8 columns",
    "float8 tensor",
    "float8 blocks",
    "int8 rows",
    "int8 tensor",
    "int8 asymmetric",
    "int4 groups",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "nvfp4 tensor",
)


def _quantized(kind: str, values: torch.Tensor) -> Any:
    """The values quantized by torchao."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, PerRow, PerTensor
    from torchao.quantization.granularity import PerBlock
    from torchao.quantization.quant_primitives import MappingType

    makers: dict[str, Callable[[torch.Tensor], Any]] = {
        "float8 rows": lambda v: Float8Tensor.from_hp(v, granularity=PerRow()),
        "float8 columns": lambda v: Float8Tensor.from_hp(v, granularity=PerRow(0)),
        "float8 tensor": lambda v: Float8Tensor.from_hp(v, torch.float8_e5m2, PerTensor()),
        "float8 blocks": lambda v: Float8Tensor.from_hp(v, granularity=PerBlock([16, 32])),
        "int8 rows": lambda v: Int8Tensor.from_hp(v, PerRow()),
        "int8 tensor": lambda v: Int8Tensor.from_hp(v, PerTensor(), reduce_range=True),
        "int8 asymmetric": lambda v: Int8Tensor.from_hp(v, PerRow(), mapping_type=MappingType.ASYMMETRIC),
        "int4 groups": lambda v: IntxUnpackedToInt8Tensor.from_hp(v, (1, 32), torch.int4),
        "mxfp8": lambda v: MXTensor.to_mx(v, torch.float8_e4m3fn, 32),
        "mxfp4": lambda v: MXTensor.to_mx(v, torch.float4_e2m1fn_x2, 32),
        "nvfp4": NVFP4Tensor.to_nvfp4,
        "nvfp4 tensor": lambda v: NVFP4Tensor.to_nvfp4(v, per_tensor_scale=per_tensor_amax_to_scale(v.abs().max())),
    }
    return makers[kind](values)


def _bits(wrapper: Any) -> dict[str, list[int]]:
    """All that is inside, as bytes."""
    inner = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: part.contiguous().reshape(-1).view(torch.uint8).tolist() for name, part in inner.items()}


def _other(kind: str, values: torch.Tensor) -> Any:
    """A wrapper of the same form with other values and other scales."""
    return _quantized(kind, torch.cos(values.float() * 3).to(values.dtype) * 7 + 1)


def _save_rows(path: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL.chunk(size)[rank].contiguous(), (0, rank, size))}, path)


def _load_rows(path: str) -> list[str]:
    """Kinds that are not as if quantized from these rows, or were not filled in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = FULL.chunk(size)[rank].contiguous()
    faults = []
    for kind in KINDS:
        wrapper = _other(kind, rows)
        loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", wrapper, (0, rank, size))}, path)["w"]
        if loaded is not wrapper or _bits(wrapper) != _bits(_quantized(kind, rows)):
            faults.append(kind)
    return faults


@pytest.mark.parametrize("size", [2, *in_proof(1, 4)])
def test_resharded_into_torchao_tensors(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """High precision of 4 ranks loads into every kind of torchao tensor as torchao itself quantizes it, in place."""
    ranks.run(4, _save_rows, str(tmp_path / "c"))
    assert ranks.run(size, _load_rows, str(tmp_path / "c")) == [[]] * size


@table("kind", KINDS)
def test_saved_as_values(tmp_path: Path, kind: str) -> None:
    """A torchao tensor in a ShardedTensor is stored as its dequantized values, and plain DCP fills another from it."""
    wrapper, other = _quantized(kind, FULL), _other(kind, FULL)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", wrapper)}, tmp_path / "c")
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], wrapper.dequantize())
    wanted = {"w": ShardedTensor.from_rank_offsets("w", other)}
    dcp.load(wanted, checkpoint_id=tmp_path / "c", planner=ShardedLoadPlanner())
    assert _bits(other) == _bits(_quantized(kind, wrapper.dequantize()))


def test_slices_of_a_torchao_tensor(tmp_path: Path) -> None:
    """Rows with scales of their own load as views of one tensor; slices that share scales are refused."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL)}, tmp_path / "c")

    def halves(wrapper: Any, axis: int) -> list[ShardedTensor]:
        parts = [wrapper.narrow(axis, half * wrapper.shape[axis] // 2, wrapper.shape[axis] // 2) for half in (0, 1)]
        return [ShardedTensor.from_rank_offsets("w", part, (axis, half, 2)) for half, part in enumerate(parts)]

    wrapper = _other("float8 rows", FULL)
    dc.load({"w": halves(wrapper, 0)}, tmp_path / "c")
    assert _bits(wrapper) == _bits(_quantized("float8 rows", FULL))
    for kind, axis in (("float8 rows", 1), ("float8 tensor", 0)):
        wrapper = _other(kind, FULL)
        before = _bits(wrapper)
        with pytest.raises(ShardingError, match="views of one quantized tensor"):
            dc.load({"w": halves(wrapper, axis)}, tmp_path / "c")
        assert _bits(wrapper) == before


def test_what_torchao_cannot_rebuild(tmp_path: Path) -> None:
    """A tensor that its class does not make anew in the same form is refused, and stays as it was."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL)}, tmp_path / "c")
    wrapper = _other("int8 rows", FULL)
    wrapper.zero_point = None
    before = _bits(wrapper)
    with pytest.raises(ShardingError, match=r"'w': .*Int8Tensor.*the destination has.*without data"):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", wrapper)}, tmp_path / "c")
    assert _bits(wrapper) == before


@table("kind", KINDS)
def test_native_round_trip(tmp_path: Path, kind: str) -> None:
    """Stored natively, a torchao tensor comes back with every bit of data and scales."""
    wrapper, other = _quantized(kind, FULL), _other(kind, FULL)
    dc.save({"w": native_factory("w", wrapper)}, tmp_path / "c")
    assert dc.load({"w": native_factory("w", other)}, tmp_path / "c")["w"] is other
    assert _bits(other) == _bits(wrapper)


def _native_rows(path: str, kind: str, *, save: bool) -> bool:
    """Save this rank's rows of the whole quantized tensor, or load them and say whether every bit is theirs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = 64 // size
    mine = _quantized(kind, FULL).narrow(0, rank * rows, rows)
    if save:
        dc.save({"w": native_factory("w", mine, (0, rank, size))}, path)
        return True
    other = _other(kind, FULL[rank * rows : (rank + 1) * rows].contiguous())
    dc.load({"w": native_factory("w", other, (0, rank, size))}, path)
    return _bits(other) == _bits(mine)


@pytest.mark.parametrize("kind", ["float8 rows", "float8 blocks", "mxfp8"])
def test_native_resharding(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Scales that belong to rows are split with the rows, and reshard with them."""
    ranks.run(4, partial(_native_rows, save=True), str(tmp_path / "c"), kind)
    for size in (1, 2, 4):
        assert ranks.run(size, partial(_native_rows, save=False), str(tmp_path / "c"), kind) == [True] * size


def test_native_scales_of_a_whole_shard(ranks: Ranks, tmp_path: Path) -> None:
    """A scale for all of a rank's rows loads at the same number of ranks, and is refused at another before any read."""
    ranks.run(4, partial(_native_rows, save=True), str(tmp_path / "c"), "float8 tensor")
    assert ranks.run(4, partial(_native_rows, save=False), str(tmp_path / "c"), "float8 tensor") == [True] * 4
    other = _other("float8 tensor", FULL)
    before = _bits(other)
    with pytest.raises(ShapeMismatchError, match=r"w\.scale"):
        dc.load({"w": native_factory("w", other)}, tmp_path / "c")
    assert _bits(other) == before


def test_native_scalars_are_not_split() -> None:
    """A scale without axes cannot follow a split: the factory says so when it is made."""
    with pytest.raises(ShardingError, match=r"'w': per_tensor_scale of shape \(\) .* split with it along axes \[0\]"):
        native_factory("w", _quantized("nvfp4 tensor", FULL), (0, 0, 2))


def test_native_form_differs(tmp_path: Path) -> None:
    """Bits of one dtype loaded as another's are an error that names both."""
    from torchao.quantization import Float8Tensor, PerTensor

    dc.save({"w": native_factory("w", _quantized("float8 tensor", FULL))}, tmp_path / "c")
    other = Float8Tensor.from_hp(FULL, torch.float8_e4m3fn, PerTensor())
    with pytest.raises(ShardingError, match=r"Float8Tensor\(qdata=torch\.float8_e5m2.*loaded into.*float8_e4m3fn"):
        dc.load({"w": native_factory("w", other)}, tmp_path / "c")
