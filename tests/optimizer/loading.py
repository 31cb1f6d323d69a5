"""What the tests of loading share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train for some steps."""
    for number in range(steps):
        model(torch.full((3, 6), 0.1 + number, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(found: Any, expected: Any) -> None:
    """Nests with equal values."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
