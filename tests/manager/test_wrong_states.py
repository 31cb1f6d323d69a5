"""States that a CheckpointManager does not take: each is refused with what to give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

_MODEL = torch.nn.Linear(2, 2)
_OPTIMIZER = torch.optim.AdamW(_MODEL.parameters())
_TAKEN = r"takes modules, their optimizers, PerRank\(...\), .* by name: \{'model': model, 'optimizer': optimizer\}$"


@table(
    "states, said",
    [
        (_MODEL, r"the states are an object of type Linear: give it by name, as \{'model': ...\}; .*" + _TAKEN),
        (_OPTIMIZER, f"the states are an object of type AdamW: .*{_TAKEN}"),
        ([_MODEL, _OPTIMIZER], f"the states are an object of type list: .*{_TAKEN}"),
        (None, f"the states are None: .*{_TAKEN}"),
        (_MODEL.state_dict(), r"tensors, as state_dict\(\) returns them \(weight, bias\): give the module itself, "),
        ({"model": _MODEL.state_dict()}, f"'model' is an object of type OrderedDict: give the object whose .*{_TAKEN}"),
        ({"model": _MODEL, "optimizer": _OPTIMIZER.state_dict()}, "'optimizer' is .* dict: give the object whose"),
        ({"model": _MODEL, "step": 3}, f"'step' is 3: .* the step is stored .manager.loaded_step.; .*{_TAKEN}"),
        ({"model": _MODEL, "optimizer": None}, f"'optimizer' is None: leave it out, or give its object; .*{_TAKEN}"),
        ({"model": torch.nn.Linear}, f"'model' is the class Linear: give an object of it; .*{_TAKEN}"),
        ({"model": _MODEL, "ema": torch.ones(2)}, "'ema' is .* Tensor: give the module or object that has it"),
        ({"model": _MODEL, 3: Progress()}, "3 cannot be the name of a state: give other text, as 'model'"),
    ],
)
def test_a_state_of_another_kind_is_refused(tmp_path: Path, states: Any, said: str) -> None:
    """What was given, what a manager takes, and how it is written: not one line of Python's."""
    with pytest.raises(CheckpointingException, match=said) as caught:
        CheckpointManager(CheckpointConfig(folder=tmp_path), states)
    assert type(caught.value) is CheckpointingException
