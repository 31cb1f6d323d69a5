from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.compat.megatron.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    force_all_tensors_to_non_fp8,
    replace_prefix_for_sharding,
)
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.quantized import native_factory
from tests.tables import table
from tests.torch_dist.te_stand_in import Float8StandIn, MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

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


def _make() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


def _step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3)).sum().backward()
    optimizer.step()


@table("is_fresh", [True, False], ids=["a fresh optimizer", "state of one parameter"])
def test_a_load_under_other_keys_has_the_optimizers_state(tmp_path: Path, is_fresh: bool) -> None:
    """Models of one job under prefixes of their own resume with the moments that are saved, of all parameters."""
    saved, loaded = ({name: _make() for name in ("gen", "dis")} for _ in range(2))
    for pair in saved.values():
        _step(*pair)
    states = {name: to_sharded_state_dict(*pair) for name, pair in saved.items()}
    for name, state in states.items():
        add_prefix_for_sharding(state, f"{name}.")
    dist_checkpointing.save(states, tmp_path / "c")
    for model, optimizer in () if is_fresh else loaded.values():
        model.weight.requires_grad_(False)
        _step(model, optimizer)
    wanted = {name: to_sharded_state_dict(*pair) for name, pair in loaded.items()}
    add_prefix_for_sharding(wanted["gen"], "gen.")
    add_prefix_for_sharding(wanted["dis"], "old.")
    apply_prefix_mapping(wanted, {"other.": "none.", "old.": "older."})
    replace_prefix_for_sharding(wanted["dis"], "older.", "dis.")
    found = dist_checkpointing.load(wanted, tmp_path / "c")
    for name, (model, optimizer) in loaded.items():
        load_into(found[name], model, optimizer)
        before, now = (each.state_dict()["state"] for each in (saved[name][1], optimizer))
        assert now.keys() == before.keys(), name
        assert all(torch.equal(now[n][slot], value) for n in before for slot, value in before[n].items()), name
