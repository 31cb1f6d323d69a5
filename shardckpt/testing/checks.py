"""Checks that name the fault: an AssertionError with a sentence, in the test's process and in its ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardckpt.testing.memory import bits

if TYPE_CHECKING:
    from collections.abc import Iterator


def check(condition: object, message: str) -> None:
    """Raise an AssertionError with the message unless the condition holds."""
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(message)


def check_equal(found: object, expected: object, what: str) -> None:
    """Raise an AssertionError unless a call returned the expected value.

    Args:
        found: The returned value.
        expected: The expected value.
        what: The call, and the expectation, in words.
    """
    __tracebackhide__ = True
    check(found == expected, f"{what}: {expected!r:.200} is expected, and it returned {found!r:.200}")


@contextmanager
def expect_error(kind: type[Exception], what: str) -> Iterator[None]:
    """Raise an AssertionError unless the block, of one call, raises an error of that class.

    Args:
        kind: The class.
        what: The call.
    """
    __tracebackhide__ = True
    try:
        yield
    except kind:
        return
    except Exception as exc:
        raise AssertionError(f"{what}: {kind.__name__} is expected, and it raised {type(exc).__name__}: {exc}") from exc
    raise AssertionError(f"{what}: {kind.__name__} is expected, and it raised nothing")


def check_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise an AssertionError unless a tensor has the expected dtype, shape and bytes.

    Args:
        found: The tensor to check.
        expected: The right tensor, NaNs and signs of zeros included.
        what: A name for the tensor in the message.
    """
    __tracebackhide__ = True
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
            f"element {first} of the flattened tensor: it is {found.flatten()[first].item()}, not "
            f"{expected.flatten()[first].item()}"
        )
