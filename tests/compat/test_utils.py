from __future__ import annotations

import torch

from shardckpt.compat.megatron.dist_checkpointing.utils import extract_nonpersistent, force_all_tensors_to_non_fp8
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.quantized import native_factory
from tests.torch_dist.te_stand_in import Float8StandIn, MXFP8StandIn

VALUES = torch.linspace(-3, 5, 16 * 64).reshape(16, 64).bfloat16()


def test_everything_dequantized() -> None:
    """Quantized data of tensors and factories becomes plain, in place; all else, and the native form, stays."""
    wrapper = Float8StandIn.quantized(VALUES)
    native = native_factory("n", MXFP8StandIn.quantized(VALUES))
    plain = ShardedTensor.from_rank_offsets("p", VALUES)
    factory = ShardedTensorFactory("f", wrapper, lambda *_: {}, lambda _: wrapper)
    described = ShardedTensor.from_rank_offsets("w", wrapper)
    state = {"a": [described, {"b": factory}], "p": plain, "n": native, "o": ShardedObject("o", 1, (1,), (0,)), "s": 3}
    force_all_tensors_to_non_fp8(state)
    for leaf in (described, factory):
        assert type(leaf.data) is torch.Tensor
        assert torch.equal(leaf.data, wrapper.dequantize())
    assert plain.data is VALUES
    assert isinstance(native.data, MXFP8StandIn)


def test_local_objects_are_taken_out() -> None:
    """Local non-persistent objects are parted from all else."""
    state = {"o": ShardedObject("o", 1, (1,), (0,)), "n": LocalNonpersistentObject(1), "c": 5}
    local, rest = extract_nonpersistent(state)
    assert set(local) == {"n"}
    assert set(rest) == {"o", "c"}
