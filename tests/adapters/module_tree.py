"""What the tests of module tree share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from shardckpt.adapters.modules import get_model_tensors


def check(module: nn.Module, *, is_usual: bool = True) -> None:
    """Raise unless the tensors are torch's: equal names, values and memory, detached."""
    found, expected = get_model_tensors([module]), get_model_state_dict(module)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        here: Any = found[name]
        if not isinstance(value, torch.Tensor):
            assert here == value
            continue
        assert type(here) is type(value)
        assert not here.requires_grad
        here, there = (each.to_local() if isinstance(each, DTensor) else each for each in (here, value))
        assert here.equal(there)
        assert here.data_ptr() == there.data_ptr() or not is_usual
