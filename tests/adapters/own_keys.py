"""What the tests of own keys share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Scaled(nn.Linear):
    """Stores a tensor that is neither a parameter nor a buffer, below a parameter's name."""

    def __init__(self, seed: float) -> None:
        super().__init__(2, 3)
        self.scale = torch.full((3,), seed)
        nn.init.constant_(self.weight, seed)
        nn.init.constant_(self.bias, seed)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}weight.absmax")
        super()._load_from_state_dict(state_dict, prefix, *rest)
