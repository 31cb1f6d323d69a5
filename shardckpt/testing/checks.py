"""Checks that say what is wrong: an AssertionError with a sentence, in the test's process and in its ranks."""

from __future__ import annotations

import torch

from shardckpt.testing.memory import bits


def check(condition: object, message: str) -> None:
    """Raise an AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def check_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise an AssertionError unless a tensor has the expected dtype, shape and bytes.

    Args:
        found: The tensor to check.
        expected: What it must be, NaNs and signs of zeros included.
        what: Names the tensor in the message.
    """
    if not isinstance(found, torch.Tensor):
        raise AssertionError(f"{what}: a tensor is expected, and {found!r:.200} was returned")
    check(found.dtype == expected.dtype, f"{what}: has dtype {found.dtype}, not {expected.dtype}")
    shapes = tuple(found.shape), tuple(expected.shape)
    check(shapes[0] == shapes[1], f"{what}: has shape {shapes[0]}, not {shapes[1]}")
    wrong = (bits(found) != bits(expected)).view(max(found.numel(), 1), -1).any(1) if found.numel() else None
    if wrong is not None and wrong.any():
        first = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {found.numel()} elements are not those that were saved; the first is "
            f"element {first} of the flattened tensor"
        )


__all__ = ["check", "check_same"]
