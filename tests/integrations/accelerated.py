"""Accelerate's global state, for the tests of what stands on it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from tests.integrations import small

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def accelerated() -> Iterator[None]:
    """Accelerate as torchrun starts it, and forgotten afterwards."""
    before = dict(os.environ)
    if dist.is_initialized():
        os.environ.update(small.torchrun())
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
