"""A module's tensors are listed as torch's own state-dict functions list them, whatever was done to the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.adapters.module_tree import list_state_tensors
from shardckpt.adapters.modules import get_model_tensors
from shardckpt.errors import ShardingError
from tests.adapters.models import made_model
from tests.adapters.module_tree import check
from tests.adapters.own_keys import Scaled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lists_a_compiled_module() -> None:
    """The names that torch.compile adds are left out, around the model and inside it."""
    module = made_model(1)
    module[0] = torch.compile(module[0])
    compiled = torch.compile(module)
    assert list_state_tensors(compiled) is not None  # type: ignore[arg-type]
    check(compiled)  # type: ignore[arg-type]
    assert get_model_tensors([compiled]).keys() == get_model_tensors([made_model(1)]).keys()  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_gets_what_its_hooks_store(tmp_path: Path) -> None:
    """The keys of a compiled module are those that it has without torch.compile; two values of one are refused."""
    model, resumed = (torch.compile(torch.nn.Sequential(Scaled(seed))) for seed in (3.0, 5.0))
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "saved")
    load_into(dist_checkpointing.load(to_sharded_state_dict(resumed), tmp_path / "saved"), resumed)
    assert repr(resumed.state_dict()) == repr(model.state_dict())
    with dist_checkpointing.open_checkpoint(tmp_path / "saved") as checkpoint:
        assert set(checkpoint) == {"0.weight", "0.bias", "0.weight.absmax"}
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({"0.bias": torch.ones(1)}))
    with pytest.raises(ShardingError, match=r"'_orig_mod.0.bias' and '0.bias' .* have the name '0.bias'"):
        to_sharded_state_dict(model)
