"""A module's tensors are listed as torch's own state-dict functions list them, whatever was done to the module."""

from __future__ import annotations

import pytest
import torch

from shardckpt.adapters import get_model_tensors
from shardckpt.adapters.module_tree import list_state_tensors
from tests.adapters.models import made_model
from tests.adapters.module_tree import check


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lists_a_compiled_module() -> None:
    """The names that torch.compile adds are left out, around the model and inside it."""
    module = made_model(1)
    module[0] = torch.compile(module[0])
    compiled = torch.compile(module)
    assert list_state_tensors(compiled) is not None  # type: ignore[arg-type]
    check(compiled)  # type: ignore[arg-type]
    assert get_model_tensors([compiled]).keys() == get_model_tensors([made_model(1)]).keys()  # type: ignore[list-item]
